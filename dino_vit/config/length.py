"""How many steps a run has, and how it is evaluated."""

from typing import NamedTuple

from dino_vit.config.cost import evaluation_seconds, step_seconds
from dino_vit.config.draft import Draft
from dino_vit.config.facts import EVALUATED_IMAGES, Facts
from dino_vit.config.pretrain import PretrainConfig

EVALUATIONS = 6  # in a run of fewer than 60 epochs
# Share of the minutes that evaluations may take. Where they would take more there are fewer of them; where
# those before the first step and after the last one would, they are of fewer images, down to FEWEST_IMAGES.
EVALUATED, FEWEST_IMAGES = 0.1, 250


class Length(NamedTuple):
    """The steps of a run, as many as are expected with `budget.minutes`, and its evaluations."""

    steps: int
    evaluations: int = EVALUATIONS
    images: int = EVALUATED_IMAGES  # of an evaluation, at most


def run_length(draft: Draft, facts: Facts) -> Length:
    """Return the length of a run."""
    budget, checkpoint = draft.config.budget, facts.checkpoint
    images = checkpoint.evaluated_images if checkpoint else EVALUATED_IMAGES
    if budget.minutes is None:
        # The images that do not fill a last batch wait for the next epoch; a larger batch is refused.
        per_epoch = max(1, facts.images.count // global_batch(draft, facts))
        return Length(budget.steps or (budget.epochs or 0) * per_epoch, images=images)
    if not checkpoint:
        return _in_time(draft.config, facts, 60 * budget.minutes, global_batch(draft, facts))
    steps = checkpoint.length
    if budget.minutes != checkpoint.settings["budget.minutes"]:
        steps = max(1, round(60 * budget.minutes * checkpoint.step / max(checkpoint.seconds, 1e-6)))
    return Length(steps, images=images)


def _in_time(config: PretrainConfig, facts: Facts, seconds: float, batch: int) -> Length:
    """Return the steps and the evaluations that are expected in some seconds."""
    images, evaluations = min(EVALUATED_IMAGES, facts.images.count), 0
    if config.compute.eval_every:
        first, later = (
            evaluation_seconds(config, facts, images, is_first=is_first) for is_first in (True, False)
        )
        affordable = EVALUATED * seconds
        evaluations = max(1, min(EVALUATIONS, int((affordable - first) / later)))
        if (share := affordable / (first + evaluations * later)) < 1:
            images = max(FEWEST_IMAGES, int(share * images))
        seconds -= min(1.0, share) * (first + evaluations * later)
    # Where decoded images are kept, only the first epoch decodes them.
    slow = step_seconds(config, facts, are_decoded=False)
    fast = step_seconds(config, facts, are_decoded=facts.speed.keeps_images)
    decoding = min(seconds, facts.images.count // batch * slow)
    steps = decoding / slow + (seconds - decoding) / fast
    return Length(max(1, int(steps)), evaluations or EVALUATIONS, images)


def global_batch(draft: Draft, facts: Facts) -> int:
    """Return the images of a step."""
    return draft["data.batch_size"] * draft["optim.accumulate"] * facts.launch.processes
