"""How many steps a run has: as given, or as many as fit into some minutes, and how it is evaluated.

What steps and evaluations take is counted from the settings, at a measured speed.
"""

from collections.abc import Iterable
from itertools import pairwise
from math import log, prod
from typing import NamedTuple

from dino_vit.config.draft import Draft
from dino_vit.config.facts import EVALUATED_IMAGES, BlockTimes, RunFacts, Speed
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import Model
from dino_vit.core import Size, height_width

EVALUATIONS = 6  # in a run of fewer than 60 epochs
# Share of the minutes that evaluations may take. Where they would take more there are fewer of them; where
# those before the first step and after the last one would, they are of fewer images, down to FEWEST_IMAGES.
EVALUATED, FEWEST_IMAGES = 0.1, 250
LAST_BLOCK = 0.3  # of a block that gives CLS tokens alone, and takes keys and values of all
UPDATE_BYTES = 64  # read and written of a parameter by clipping, AdamW and the teacher's average
LOGIT_BYTES = 40  # of a logit, in all passes over it
MASKED = 0.15  # of the patches of global views, with loss.patch_weight
BETWEEN = 1.1  # times what the timed parts take, as Python runs between them: 6 to 19 % on three sets
REDUCED = 0.5  # of the time to decode a JPEG, at half its size or less
OTHER_LAUNCHES = 6  # augmentation, heads, losses and optimiser launch as much as so many blocks
BASELINES, THREADS = 2, 8  # that read the images again before the first step; of an evaluation, at most
TIMM = Model(arch="vit_small")  # what a model of timm counts as


class Length(NamedTuple):
    """The steps of a run, as many as are expected with `budget.minutes`, and its evaluations."""

    steps: int
    evaluations: int = EVALUATIONS
    images: int = EVALUATED_IMAGES  # of an evaluation, at most


def run_length(draft: Draft, facts: RunFacts) -> Length:
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


def _in_time(config: PretrainConfig, facts: RunFacts, seconds: float, batch: int) -> Length:
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


def global_batch(draft: Draft, facts: RunFacts) -> int:
    """Return the images of a step."""
    return draft["data.batch_size"] * draft["optim.accumulate"] * facts.processes


def step_seconds(config: PretrainConfig, facts: RunFacts, *, are_decoded: bool) -> float:
    """Return how long a step takes, with images that are decoded already or not yet."""
    speed, model, passes = facts.speed, _model(config), config.optim.accumulate
    images = passes * config.data.batch_size
    network = images * _image_seconds(config, speed)
    parameters = 12 * model.shape[0] ** 2 * model.shape[1] + _head_parameters(config)
    network += parameters * UPDATE_BYTES * speed.byte
    network = max(network, passes * model.shape[1] * speed.launch) + passes * OTHER_LAUNCHES * speed.launch
    loading = _view_pixels(config) * speed.crop
    if not are_decoded:
        loading += facts.images.seconds * (REDUCED if config.data.scaled_decoding else 1.0)
    return BETWEEN * _together(network, images * loading, speed.workers, speed)


def evaluation_seconds(config: PretrainConfig, facts: RunFacts, images: int, *, is_first: bool) -> float:
    """Return how long an evaluation of some images takes; the first one also evaluates baselines."""
    model, speed = _model(config), facts.speed
    sequences = [(1, 1 + model.registers + _patches(model, config.image_shape))]
    network = model.shape[1] * _block_seconds(model, sequences, speed)
    network += prod(config.image_shape) * _stem_seconds(config, speed)
    loading = facts.images.seconds + prod(config.image_shape) * speed.crop
    share, threads = images / facts.processes, min(THREADS, speed.cores)
    seconds = _together(share * network, share * loading, threads, speed)
    return seconds + is_first * BASELINES * images * loading / threads


def forward_flops(config: PretrainConfig) -> float:
    """Return the operations of the blocks on a global view, which tell how large a network is."""
    model = _model(config)
    (width, depth, _), tokens = model.shape, 1 + _patches(model, config.views.global_shape)
    return depth * tokens * (24 * width**2 + 4 * tokens * width)


def _together(network: float, loading: float, workers: int, speed: Speed) -> float:
    """Return the time in which a network computes and workers load, on cores that they share."""
    if not workers:
        return network + loading
    return max(network, loading / workers, (network * speed.threads + loading) / speed.cores)


def _image_seconds(config: PretrainConfig, speed: Speed) -> float:
    """Return how long the device takes for all views of an image."""
    views, model, pixels = config.views, _model(config), _view_pixels(config)
    first, patches = 1 + model.registers, _patches(model, views.global_shape)
    kept = max(1, round(patches * (1 - model.patch_drop)))
    seen = [
        (views.global_count, first + kept),
        (views.local_count, first + _patches(model, views.local_shape)),
    ]
    teachers = 1 + bool(config.gram)
    depth = model.shape[1] - (0 if config.loss.patch_weight or config.gram else 1 - LAST_BLOCK)
    seconds = depth * _block_seconds(model, seen, speed, are_trained=True)
    seconds += teachers * depth * _block_seconds(model, [(views.global_count, first + patches)], speed)
    global_pixels = views.global_count * prod(views.global_shape)
    seconds += (teachers * global_pixels + 3 * pixels) * _stem_seconds(config, speed)
    seconds += pixels * speed.augment
    seconds += global_pixels * speed.edges if config.loss.edge_weight else 0.0
    return seconds + _head_seconds(config, speed, patches)


def _head_seconds(config: PretrainConfig, speed: Speed, patches: int) -> float:
    """Return what projections and cross-entropies of an image take, of CLS tokens and masked patches."""
    masked = MASKED * patches * config.views.global_count if config.loss.patch_weight else 0.0
    trained = config.views.global_count + config.views.local_count + masked
    flops = 2 * _head_parameters(config) * (3 * trained + config.views.global_count + masked)
    logits = trained * config.head.prototypes
    width = _model(config).shape[0]
    flop = _at_width(width, speed).token / (24 * width**2)  # as in products of the size of a block's
    return flops * flop + logits * LOGIT_BYTES * speed.byte


def _head_parameters(config: PretrainConfig) -> int:
    head, width = config.head, _model(config).shape[0]
    layers = width, head.hidden_dim, head.hidden_dim, head.bottleneck_dim, head.prototypes
    return sum(before * after for before, after in pairwise(layers))


def _stem_seconds(config: PretrainConfig, speed: Speed) -> float:
    """Return what a pixel takes in the forward pass of the stem."""
    model = _model(config)
    if model.stem != "conv":
        return speed.stem
    halvings = max(height_width(model.patch_size)).bit_length() - 1
    channels = model.stem_width or model.shape[0]
    return speed.conv * (channels >> (halvings - 1))  # those of the first, largest map


def _block_seconds(
    model: Model, sequences: Iterable[tuple[int, int]], speed: Speed, *, are_trained: bool = False
) -> float:
    """Return what a block takes for sequences, each kind with its number and its tokens."""
    times = _at_width(model.shape[0], speed)
    token, pair = (times.trained, times.trained_pair) if are_trained else (times.token, times.pair)
    return sum(count * tokens * (token + tokens * pair) for count, tokens in sequences)


def _at_width(width: int, speed: Speed) -> BlockTimes:
    """Return the times of a block between those that were measured, as powers of the width."""
    narrow, wide = next((p for p in pairwise(speed.blocks) if width <= p[1].width), speed.blocks[-2:])
    share = log(width / narrow.width) / log(wide.width / narrow.width)
    return BlockTimes(width, *(a * (b / a) ** share for a, b in zip(narrow[1:], wide[1:], strict=True)))


def _model(config: PretrainConfig) -> Model:
    return TIMM if config.model.timm else config.model


def _patches(model: Model, size: Size) -> int:
    return max(1, prod(side // model.patch_size for side in size))


def _view_pixels(config: PretrainConfig) -> int:
    views = config.views
    return views.global_count * prod(views.global_shape) + views.local_count * prod(views.local_shape)
