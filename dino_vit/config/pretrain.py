"""Every knob of pretraining on one page; the defaults are the published ViT-S/16 recipe.

What knobs must not say together stands in `rules.py`; every `PretrainConfig` that exists obeys it.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from dino_vit.config import checks as rules
from dino_vit.config.settings import (
    BelowOne,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Probability,
    Problem,
    Settings,
    given_keys,
    setting,
    whole,
)
from dino_vit.core.sizes import VIT_SIZES, height_width

Arch = Literal["vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge"]
AtLeastTwo = Annotated[int, Field(ge=2), BeforeValidator(whole)]
Size = Count | tuple[Count, Count]
PositiveShare = Annotated[Positive, Field(le=1)]
Share = tuple[Probability, Probability]
Triple = tuple[Probability, Probability, Probability]


class Data(Settings):
    """The images, and how many of them a process takes at once."""

    source: str = setting(
        "synthetic", "folder, list, tar shards, zip, Parquet, array, hf:NAME or `synthetic`"
    )
    labels: str | None = setting(
        None, "file of labels by name, for evaluation only; null: the source's own", resumable=True
    )
    weights: str | None = setting(
        None, "file of (name, weight): how often images are drawn; null: all equally", resumable=True
    )
    batch_size: Count = setting(64, "images per process and forward pass", resumable=True)
    workers: CountOrZero | None = setting(None, "loader processes; null: by the cores", resumable=True)
    channels: Count = setting(3, "of an image; grey is repeated to make 3, transparency counts in 2 and 4")
    bits: Literal[8, 16] | None = setting(
        None, "8: bytes; 16: all that is deeper, as floats; null: as needed"
    )
    range: tuple[float, float] | None = setting(
        None, "values that become 0 and 1; null: 0 and the largest of the type, 1 for floats"
    )
    mean: tuple[float, ...] | None = setting(
        (0.485, 0.456, 0.406), "per channel, of pixels from 0 to 1; null: measured"
    )
    std: tuple[Positive, ...] | None = setting(
        (0.229, 0.224, 0.225), "per channel, of pixels from 0 to 1; null: measured"
    )
    photometry: Literal["auto", "worker", "device"] = setting(
        "auto", "where colours are changed; auto: where it is measured to be faster"
    )
    max_pixels: Count = setting(200_000_000, "a larger image is not decoded", resumable=True)
    max_unreadable: Probability = setting(
        0.1, "share of unreadable images beyond which a run ends", resumable=True
    )


class Model(Settings):
    """The backbone: a named size, or its own width, depth and heads."""

    one_of: ClassVar = (("arch",), ("width", "depth", "heads"))
    arch: Arch | None = setting("vit_small", "size; null: by width, depth and heads")
    width: Count | None = setting(None, "channels of a token")
    depth: Count | None = setting(None, "number of blocks")
    heads: Count | None = setting(None, "attention heads of a block")
    patch_size: Count = setting(16, "side of a patch in pixels")
    registers: CountOrZero = setting(0, "register tokens")
    drop_path: BelowOne = setting(0.1, "stochastic depth of the student's last block")
    checkpoint_blocks: bool = setting(
        False, "recompute blocks backward: less memory, more time", resumable=True
    )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Width, depth and heads, whichever way they were given."""
        if self.arch:
            size = VIT_SIZES[self.arch]
            return size["width"], size["depth"], size["heads"]
        return self.width or 0, self.depth or 0, self.heads or 0


class Head(Settings):
    """The projection from the CLS token to the prototypes."""

    prototypes: AtLeastTwo = setting(65536, "outputs, between which views must agree")
    hidden_dim: Count = setting(2048, "width of the hidden layers")
    bottleneck_dim: Count = setting(256, "width of the normalised features before the prototypes")
    layers: Count = setting(3, "linear layers up to the bottleneck")
    batch_norm: bool = setting(False, "BatchNorm in the hidden layers")
    norm_last_layer: bool = setting(True, "fix the norm of the prototypes; false may help a ViT-S")


class Views(Settings):
    """The cuts of an image: the teacher sees the global ones, the student all."""

    global_count: Count = setting(2, "global views of an image")
    global_size: Size = setting(224, "pixels: side, or [height, width]")
    global_scale: Share = setting((0.4, 1.0), "share of the image's area, from and to")
    local_count: CountOrZero = setting(8, "local views of an image")
    local_size: Size = setting(96, "pixels: side, or [height, width]")
    local_scale: Share = setting((0.05, 0.4), "share of the image's area, from and to")
    ratio: tuple[Positive, Positive] = setting((3 / 4, 4 / 3), "width : height of a cut, from and to")

    @property
    def global_shape(self) -> tuple[int, int]:
        """Height and width of a global view."""
        return height_width(self.global_size)

    @property
    def local_shape(self) -> tuple[int, int]:
        """Height and width of a local view."""
        return height_width(self.local_size)


class Photometry(Settings):
    """Colour and sharpness, anew for each view; triples stand for first global, other globals, locals."""

    flip: Probability = setting(0.5, "probability of a horizontal flip")
    jitter: Probability = setting(0.8, "probability of the four jitters, in random order")
    brightness: Probability = setting(0.4, "factor from 1 - this to 1 + this")
    contrast: Probability = setting(0.4, "factor from 1 - this to 1 + this")
    saturation: Probability = setting(0.2, "factor from 1 - this to 1 + this")
    hue: Annotated[float, Field(ge=0, le=0.5)] = setting(0.1, "shift of up to this part of the colour circle")
    grey: Probability = setting(0.2, "probability of losing the colours")
    blur: Triple = setting((1.0, 0.1, 0.5), "probability of a Gaussian blur")
    blur_sigma: tuple[Positive, Positive] = setting((0.1, 2.0), "in pixels, from and to")
    solarise: Triple = setting((0.0, 0.2, 0.0), "probability of inverting the bright half")
    noise: Probability = setting(0.0, "probability of noise in every pixel and channel, added last")
    noise_std: tuple[PositiveShare, PositiveShare] = setting(
        (0.01, 0.1), "of values from 0 to 1, from and to"
    )


class Loss(Settings):
    """Cross-entropy between the teacher's sharpened, centred output and the student's."""

    student_temp: Positive = setting(0.1, "temperature of the student")
    teacher_temp: Positive = setting(0.04, "temperature of the teacher; 0.07 is as high as is known to work")
    warmup_teacher_temp: Positive = setting(0.04, "temperature of the teacher at the start")
    warmup_teacher_temp_epochs: CountOrZero = setting(0, "epochs from that to teacher_temp")
    center_momentum: BelowOne = setting(0.9, "EMA of the teacher's mean output")


class Optim(Settings):
    """The student's optimiser and its schedules."""

    name: Literal["adamw", "sgd", "lars"] = setting("adamw", "optimiser")
    lr: Positive = setting(5e-4, "peak learning rate at a global batch of 256")
    lr_scaling: Literal["linear", "sqrt", "none"] = setting(
        "linear", "how lr grows with the global batch over 256"
    )
    min_lr: NonNegative = setting(1e-6, "learning rate at the end")
    warmup_epochs: NonNegative = setting(10.0, "epochs of linear warm-up")
    weight_decay: NonNegative = setting(0.04, "at the start")
    weight_decay_end: NonNegative = setting(0.4, "at the end, after a cosine")
    clip: Positive = setting(3.0, "largest norm of a gradient")
    clip_mode: Literal["tensor", "module", "global", "none"] = setting("tensor", "of what the norm is taken")
    freeze_last_layer_epochs: NonNegative = setting(1.0, "epochs before the prototypes learn")
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = setting(
        None, "factor on lr per block towards the input; null: none"
    )
    accumulate: Count = setting(1, "forward passes per optimiser step", resumable=True)


class Teacher(Settings):
    """The exponential moving average of the student."""

    momentum: Probability = setting(0.996, "of the average, at the start; nearer 1 is slower")
    momentum_end: Probability = setting(1.0, "at the end, after a cosine")


class Budget(Settings):
    """How long to train: in exactly one of three units."""

    one_of: ClassVar = (("epochs",), ("steps",), ("images",))
    epochs: Count | None = setting(100, "passes over the images")
    steps: Count | None = setting(None, "optimiser steps")
    images: Count | None = setting(None, "images drawn, counted with repeats")


class Run(Settings):
    """How the run computes, reports and saves."""

    precision: Literal["auto", "no", "bf16", "fp16"] = setting("auto", "auto: bf16 where it is native")
    compile: bool = setting(False, "compile the networks with torch.compile")
    log_every: Count = setting(50, "steps between log lines", resumable=True)
    eval_every: Count | None = setting(10, "epochs between online evaluations; null: never", resumable=True)
    checkpoint_every: Count = setting(1000, "steps between checkpoints", resumable=True)
    keep_every: Count | None = setting(
        None, "keep the checkpoint of every so many steps for good", resumable=True
    )
    trackers: tuple[str, ...] = setting(("tensorboard",), "Accelerate trackers", resumable=True)
    max_nonfinite_steps: Count = setting(5, "non-finite steps in a row before a roll-back", resumable=True)
    resume: Literal["same", "changed", "never"] = setting(
        "same", "go on in `output` with the same settings, with changed ones, or never", resumable=True
    )


class Init(Settings):
    """Start from trained weights; `recipes.resolve_init` gives the rates that keep what they know."""

    weights: str = Field(description="run folder or weight file to start from")
    head_epochs: NonNegative = setting(1.0, "epochs in which only the heads learn")


# Names that people bring along from the reference and from other libraries.
ALSO_KNOWN_AS = {
    "output": "output_dir out",
    "data.source": "data_path dataset path root",
    "data.batch_size": "batch_size_per_gpu",
    "data.workers": "num_workers",
    "data.channels": "in_chans in_channels",
    "data.bits": "bit_depth depth dtype",
    "data.range": "value_range min_max",
    "model.arch": "model backbone",
    "model.width": "embed_dim dim hidden_size",
    "model.depth": "num_layers layers",
    "model.heads": "num_heads",
    "model.patch_size": "patch",
    "model.registers": "num_register_tokens",
    "model.drop_path": "drop_path_rate",
    "head.prototypes": "out_dim n_prototypes output_dim",
    "head.layers": "nlayers",
    "head.batch_norm": "use_bn_in_head use_bn",
    "views.global_count": "global_crops_number n_global_views",
    "views.global_size": "global_crop_size image_size img_size",
    "views.global_scale": "global_crops_scale",
    "views.local_count": "local_crops_number n_local_views",
    "views.local_size": "local_crop_size",
    "views.local_scale": "local_crops_scale",
    "photometry.jitter": "color_jitter",
    "photometry.grey": "gray grayscale",
    "photometry.blur_sigma": "blur_radius",
    "photometry.solarise": "solarize solarization",
    "photometry.noise": "gaussian_noise",
    "photometry.noise_std": "noise_sigma",
    "data.weights": "sample_weights sampling_weights",
    "optim.name": "optimizer",
    "optim.lr": "learning_rate base_lr",
    "optim.min_lr": "final_lr",
    "optim.weight_decay": "wd",
    "optim.clip": "clip_grad max_norm",
    "optim.freeze_last_layer_epochs": "freeze_last_layer",
    "optim.layer_decay": "layerwise_decay",
    "optim.accumulate": "gradient_accumulation_steps accumulate_grad_batches",
    "teacher.momentum": "momentum_teacher ema",
    "budget.epochs": "max_epochs num_epochs",
    "budget.steps": "max_steps iterations",
    "budget.images": "samples",
    "run.precision": "use_fp16 amp",
    "run.log_every": "print_freq",
    "run.checkpoint_every": "saveckp_freq save_every",
    "run.trackers": "logger report_to",
    "init": "pretrained checkpoint",
}

# What `recipe: auto` fills where the user left it open; see recipes.py.
AUTO_KEYS = frozenset(
    (
        *("data.channels", "data.mean", "data.std", "model.patch_size", "head.prototypes", "budget.epochs"),
        *("views.global_size", "views.local_size", "photometry.blur_sigma"),
        *("photometry.saturation", "photometry.hue", "photometry.grey"),
        *("head.hidden_dim", "head.bottleneck_dim", "head.batch_norm", "loss.teacher_temp"),
        *("optim.lr", "optim.warmup_epochs", "optim.freeze_last_layer_epochs", "teacher.momentum"),
    )
)


class PretrainConfig(Settings):
    """Self-supervised pretraining of a vision transformer with DINO."""

    recipe: Literal["dino", "auto"] = setting(
        "dino", "dino: defaults of 2021; auto: fill what is left open from the data"
    )
    seed: CountOrZero = setting(0, "of every random number")
    output: str = setting("runs/pretrain", "folder of the run; it resumes there", resumable=True)
    data: Data = Data()
    model: Model = Model()
    head: Head = Head()
    views: Views = Views()
    photometry: Photometry = Photometry()
    loss: Loss = Loss()
    optim: Optim = Optim()
    teacher: Teacher = Teacher()
    budget: Budget = Budget()
    run: Run = Run()
    init: Init | None = setting(None, "set init.weights to start from trained weights")

    also_known_as: ClassVar = ALSO_KNOWN_AS

    def contradictions(self) -> Iterator[Problem]:
        """Yield what the settings must not say together, but for what recipe auto has yet to fill."""
        filled_later = AUTO_KEYS - given_keys(self) if self.recipe == "auto" else frozenset[str]()
        for rule in rules.ALL:
            yield from (problem for problem in rule(self) if not filled_later.intersection(problem.keys))
