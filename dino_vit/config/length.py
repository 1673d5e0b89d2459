"""The number of steps of a run, its evaluations, and what a short run sees less of."""

from typing import Any, NamedTuple

from dino_vit.config.draft import Draft
from dino_vit.config.facts import EVALUATED_IMAGES, Facts, StepTime
from dino_vit.config.pretrain import PretrainConfig, needing_all_patches

EVALUATIONS = 6  # in a run of fewer than 60 epochs
# Share of the minutes that evaluations may take. Where they would take more there are fewer of them; where
# those before the first step and after the last one would, they are of fewer images, down to FEWEST_IMAGES.
EVALUATED, FEWEST_IMAGES = 0.1, 250
BEFORE_TRAINING = 2  # evaluations: with what needs no network the first one takes as long as two
SHORT = 30_000  # steps; shorter runs get `_choose_for_short`
# What the student sees of an image in a short run, and in others.
SEEN_IN_SHORT: dict[str, Any] = {"views.local_count": 4, "model.patch_drop": 0.75}
SEEN_IN_LONG: dict[str, Any] = {"views.local_count": 8, "model.patch_drop": 0.0}


class Length(NamedTuple):
    """The steps of a run, as many as are expected with `budget.minutes`, and its evaluations."""

    steps: int
    evaluations: int = EVALUATIONS
    images: int = EVALUATED_IMAGES  # of an evaluation, at most


def run_length(draft: Draft, facts: Facts) -> Length:
    """Return the length of a run."""
    minutes, checkpoint, time = draft["budget.minutes"], facts.checkpoint, facts.step_time
    if minutes is None:
        batch = min(global_batch(draft, facts), facts.images.count)  # more is refused
        steps = max(1, draft.config.budget.total_steps(facts.images.count, batch))
        return Length(steps, images=checkpoint.evaluated_images if checkpoint else EVALUATED_IMAGES)
    if checkpoint:
        steps = checkpoint.length
        if minutes != checkpoint.settings["budget.minutes"]:
            steps = max(1, round(60 * minutes * checkpoint.step / max(checkpoint.seconds, 1e-6)))
        return Length(steps, images=checkpoint.evaluated_images)
    if time is None:
        return Length(1)  # unknown yet; the step that is timed is a short run's
    return _in_time(draft, 60 * minutes, time)


def _in_time(draft: Draft, seconds: float, time: StepTime) -> Length:
    """Return the steps and the evaluations that are expected in some seconds."""
    step_seconds = draft.slowdown * time.step_seconds
    evaluation_seconds = draft.slowdown * time.evaluation_seconds
    affordable, images = EVALUATED * seconds / max(evaluation_seconds, 1e-6), EVALUATED_IMAGES
    evaluations = max(1, min(EVALUATIONS, int(affordable) - BEFORE_TRAINING))
    if (share := affordable / (evaluations + BEFORE_TRAINING)) < 1:
        images = max(FEWEST_IMAGES, int(share * time.evaluated_images))
        evaluation_seconds *= min(1.0, images / time.evaluated_images)
    # Measuring and evaluations are part of the minutes.
    seconds -= time.measuring_seconds + (evaluations + BEFORE_TRAINING) * evaluation_seconds
    steps = max(1, int(seconds / step_seconds))
    if steps >= SHORT:  # a step of a long run takes longer than that of a short run, which was timed
        steps = max(SHORT - 1, int(steps / _long_step(draft)))
    return Length(steps, evaluations, images)


def _long_step(draft: Draft) -> float:
    """Return what a step of a long run costs, in steps of a short one; heads and stem are not counted."""
    if draft["recipe"] != "auto" or not may_see_less(draft.config):
        return 1.0
    costs = []
    for chosen in (SEEN_IN_LONG, SEEN_IN_SHORT):
        local, drop = (draft[key] if key in draft.given else value for key, value in chosen.items())
        costs.append(_view_cost(draft["views.global_count"], local, drop))
    return costs[0] / costs[1]


def _view_cost(global_count: int, local_count: int, patch_drop: float) -> float:
    """Return what the views of an image cost, in passes of a global view through the teacher.

    A global view passes the teacher and, three times as long, the student; local ones are 3/7 as wide.
    """
    return global_count * (1 + 3 * (1 - patch_drop)) + 3 * local_count * (3 / 7) ** 2


def global_batch(draft: Draft, facts: Facts) -> int:
    """Return the images of a step."""
    return draft["data.batch_size"] * draft["optim.accumulate"] * facts.launch.processes


def may_see_less(config: PretrainConfig) -> bool:
    """Tell whether a short run gets SEEN_IN_SHORT: where patches can be left out of global views."""
    same_size = config.views.global_shape == config.views.local_shape
    return not (config.model.timm or needing_all_patches(config) or same_size)
