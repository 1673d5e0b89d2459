"""What a run is decided by beside its settings: images, launch, checkpoint, weights, the speed of the device.

Facts are plain values, measured once by `training.inputs`; where all ranks must agree they are rank 0's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from dino_vit.config.pretrain import PHASES, PretrainConfig, fitting_phase, in_steps, scaled_lr
from dino_vit.config.sections import ChannelStatistics, Optim
from dino_vit.config.settings import get
from dino_vit.core import Size
from dino_vit.core.text import plural

EVALUATED_IMAGES = 5000  # by an evaluation, at most
# No scaled learning rate outside of these is known to have worked (dino#61, #273).
SANE_LR = {"adamw": (1e-7, 1e-2), "sgd": (1e-6, 10.0)}


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """The images of a run."""

    count: int
    size: int  # shorter side of a typical image
    channels: int = 3
    readable_channels: frozenset[int] = frozenset({3})  # that some of the images can be converted to
    bits: int = 8
    likeness: float = 0.0  # mean correlation of two images, of which 0: nothing lies alike
    shards: int = 0
    is_remote: bool = False  # some of the shards are
    measured: ChannelStatistics | None = None  # as the run reads them
    seconds: float = 0.0  # to read and decode one


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint keeps for the run that resumes from it."""

    step: int
    global_batch: int
    settings: Mapping[str, Any]  # of the run, by dotted key
    chosen: frozenset[str] = frozenset()  # those that nobody gave
    length: int = 0  # in steps; with minutes as many as were expected
    seconds: float = 0.0  # of training
    evaluated_images: int = EVALUATED_IMAGES


@dataclass(frozen=True, kw_only=True)
class WeightsFacts:
    """The weights that a run starts from (`init.weights`)."""

    architecture: Mapping[str, Any]
    is_read: bool = True  # a run that resumes does not need them any more
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run that trained them
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    range: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class TeacherFacts:
    """A frozen teacher (`teacher.weights`)."""

    pixels: Mapping[str, Any]  # how it reads images, by setting of `data`
    heads: Mapping[str, Any]  # settings of its heads that the student shares; none without heads
    has_patch_head: bool
    patch: int  # its side; 0: it has none
    image_size: Size


class BlockTimes(NamedTuple):
    """Seconds that a transformer block takes, forward, and forward and backward (`trained`)."""

    width: int
    token: float
    pair: float  # of a token and one that it attends to
    trained: float
    trained_pair: float


class Speed(NamedTuple):
    """Seconds of what steps consist of in a process, and its cores; the defaults are those of some server."""

    blocks: tuple[BlockTimes, ...] = (
        BlockTimes(96, 3e-6, 1e-8, 9e-6, 3e-8),
        BlockTimes(384, 2.5e-5, 3e-8, 7.5e-5, 1e-7),
    )
    augment: float = 3e-8  # of a pixel of a view
    stem: float = 1e-8  # of a pixel of a view, in a stem of patches
    conv: float = 3e-9  # of a pixel and a channel of the first map, in one of convolutions
    edges: float = 1e-7  # of a pixel of a global view
    crop: float = 5e-8  # of a pixel of a view, in a worker
    byte: float = 1e-10  # that is read or written
    launch: float = 0.0  # of a block, forward and backward, at least
    cores: int = 1
    threads: int = 1  # of the network, on these cores
    workers: int = 0
    keeps_images: bool = False  # decoded, as there is room for all


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Everything that `complete` knows of a run beside its settings."""

    images: ImageFacts
    processes: int = 1
    device: str = "cpu"  # its type
    precision: str = "no"  # that compute.precision=auto means here
    checkpoint: CheckpointFacts | None = None
    weights: WeightsFacts | None = None
    teacher: TeacherFacts | None = None
    speed: Speed = field(default_factory=Speed)  # measured for a run of some minutes


def check_images(config: PretrainConfig, images: ImageFacts) -> None:
    """Check that some images can be read as configured, and that they can be normalised."""
    channels, measured = config.data.channels, images.measured
    if channels not in images.readable_channels:
        have = f"the images of {config.data.images} have {plural(images.channels, 'channel')}"
        text = f"data.channels={channels}, but {have}"
        raise ValueError(f"{text}; set data.channels, data.mean and data.std (null: measured)")
    constant = [channel for channel, std in enumerate(config.data.std or ()) if std <= 0]
    if constant and measured:
        text = f"channel {constant[0]} is constant in the {measured.images} images that were measured"
        raise ValueError(f"{text}, so its std is 0; leave the channel out, or give data.std")


def refused_by_facts(config: PretrainConfig, facts: RunFacts, steps: int, batch: int) -> Iterator[str]:
    """Yield what does not fit the number of images and processes."""
    count, data, accumulate = facts.images.count, config.data, config.optim.accumulate
    if batch > count:
        processes = plural(facts.processes, "process", "processes")
        text = f"{count} images do not fill a global batch of {batch} (data.batch_size={data.batch_size} x "
        yield f"{text}optim.accumulate={accumulate} x {processes}); lower one of them"
        return
    per_epoch = count // batch
    yield from _check_scaled_lr(config.optim, batch)
    epochs, length = steps / per_epoch, plural(steps, "step")
    # Where a run of some minutes resumes, more steps may have been expected.
    for key in () if facts.checkpoint and config.budget.minutes else PHASES:
        value = cast(float, get(config, key) or 0)
        if 0 < round(in_steps(value, per_epoch)) >= steps:
            text = f"{key}={value:g} is not shorter than the run ({epochs:.3g} epochs, {length})"
            yield f"{text}; set {key}={fitting_phase(key, epochs)}, or a larger budget"


def _check_scaled_lr(optim: Optim, global_batch: int) -> Iterator[str]:
    """Refuse a scaled learning rate outside of the sane range, or one that rises to its end."""
    lr = scaled_lr(optim.lr, global_batch, optim.lr_scaling)
    lowest, highest = SANE_LR[optim.name]
    if not lowest <= lr <= highest:
        text = f"optim.lr={optim.lr} is {lr:.3g} at a global batch of {global_batch} (lr_scaling="
        yield f"{text}{optim.lr_scaling}); {optim.name} learns between {lowest:g} and {highest:g}"
    if optim.min_lr > lr:
        text = f"optim.min_lr={optim.min_lr:g} is above the peak of {lr:.3g} at a global batch of"
        yield f"{text} {global_batch}; lower it"
