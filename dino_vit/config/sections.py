"""Every setting of pretraining, section by section; the defaults are the published ViT-S/16 recipe.

`pretrain.py` puts the sections together, and says which combinations are refused.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, Field, model_validator

from dino_vit.config.settings import (
    BelowOne,
    Count,
    Dimension,
    Few,
    FewOrZero,
    NonNegative,
    Number,
    Positive,
    Probability,
    PrototypeCount,
    Rescale,
    Settings,
    Side,
    Stages,
    read_texts,
    setting,
)
from dino_vit.core import VIT_SIZES, Size, height_width
from dino_vit.core.text import plural, public

Arch = Literal["vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge"]
TimmName = Annotated[str, Field(pattern=r"^timm:.", examples=["timm:NAME"])]
WeightsFormat = Literal["dino-vit", "reference", "timm", "torchvision", "huggingface", "dinov2", "dinov3"]
ResizeMode = Literal["crop", "whole"]  # how an evaluation resizes an image
Interpolation = Literal["bicubic", "bilinear"]
Tokens = Literal["cls", "mean", "cells", "cls+mean", "cls+cells", "patches", "all"]
BaselineName = Literal["pixels", "edges"]  # features that nothing has learned, in the place of weights
BASELINES: tuple[BaselineName, ...] = get_args(BaselineName)
Stem = Literal["patch", "conv", "hybrid"]
REDUCTION, GROUPS = 16, 32  # of the feature map of the ResNet of a hybrid stem, and of its norms
HEAD_CHANNELS = 64  # of every named size but vit_huge
STUDENT_TEMPERATURE = 0.1
START_TEACHER_TEMPERATURE = 0.04  # where loss.warmup_teacher_temp_epochs begins
PositiveShare = Annotated[Positive, Field(le=1)]
Area = Annotated[float, Field(ge=1e-3, le=1)]  # less than a pixel would be the whole image
Share = tuple[Area, Area]
Minutes = Annotated[float, Field(ge=0.01, le=1e6)]  # PyTorch counts them in nanoseconds
Sigma = Annotated[float, Field(ge=1e-12, le=1000)]
Triple = tuple[Probability, Probability, Probability]
Sources = Annotated[str | tuple[str, ...], BeforeValidator(read_texts)]


class ChannelStatistics(NamedTuple):
    """Mean and std per channel of pixels in [0, 1]; each image has the same weight."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    highest: float  # value of any pixel
    images: int  # that were measured


class Data(Settings):
    """The images, and how many of them a process takes at once."""

    # It is resumable where the same images are in another place, as their fingerprint tells.
    source: Sources | None = setting(
        None, "folder, list, archive, array, hf:NAME, or several", resumable=True
    )
    labels: str | None = setting(None, "file of labels to judge by, or none; null: its own", resumable=True)
    several: bool = setting(False, "a cell of data.labels has several, as in sea;sky", resumable=True)
    batch_size: Dimension = setting(64, "images per process and forward pass", resumable=True)
    workers: FewOrZero | None = setting(None, "DataLoader workers; null: by the cores", resumable=True)
    order: Literal["global", "window"] | None = setting(
        None, "shuffle all, or a window of shards; null: by source"
    )
    window: Few = setting(16, "shards that data.order=window mixes at a time")
    cache: str | None = setting(None, "copies of remote shards; null: ~/.cache/dino-vit", resumable=True)
    cache_gb: NonNegative = setting(50.0, "size of data.cache, and of indexes; 0: no copies", resumable=True)
    timeout: Positive = setting(180.0, "seconds until a remote file that fails ends a run", resumable=True)
    channels: Dimension = setting(3, "channels; grey is repeated to make 3, alpha counts in 2 and 4")
    bits: Literal[8, 16] | None = setting(None, "8: bytes; 16: anything deeper; null: as the images have")
    range: tuple[Number, Number] | None = setting(None, "values of black and white; null: those of the type")
    mean: tuple[Number, ...] | None = setting((0.485, 0.456, 0.406), "mean of values 0 to 1; null: measured")
    std: tuple[Positive, ...] | None = setting((0.229, 0.224, 0.225), "like mean; null: measured")
    scaled_decoding: bool = setting(True, "decode a JPEG at 1/2, 1/4 or 1/8 where its views need no more")
    keep_decoded: bool = setting(
        True, "keep decoded images that fit into a quarter of the free memory", resumable=True
    )
    max_pixels: Count = setting(200_000_000, "larger images are not decoded", resumable=True)
    max_unreadable: Probability = setting(0.1, "unreadable share that ends a run", resumable=True)

    @property
    def images(self) -> str:
        """The source of a run as text, without secrets; a run does not start without one."""
        if self.source is None:
            text = "no images are given: name a folder, list, archive, table or array (data.source)"
            raise ValueError(f"{text}, as in `dino-vit pretrain photos`; `synthetic` are generated textures")
        return ", ".join(map(public, self.sources))

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources of a run, mostly one."""
        return (self.source,) if isinstance(self.source, str) else self.source or ()

    def contradictions(self) -> Iterator[str]:
        """Yield what does not go with the number of sources."""
        if isinstance(self.source, tuple) and self.labels not in (None, "none"):
            yield f"data.labels={self.labels} is a file for one source; remove it, or give one data.source"


class Model(Settings):
    """The backbone: a named size, its own width, depth and heads, or a model of timm."""

    one_of: ClassVar = (("arch",), ("width", "depth", "heads"))
    arch: Arch | TimmName | None = setting("vit_small", "named size; null: see width, depth")
    width: Dimension | None = setting(None, "embedding dimension")
    depth: Few | None = setting(None, "number of blocks")
    heads: Few | None = setting(None, "attention heads per block; null: one for every 64 of the width")
    patch_size: Dimension = setting(16, "side of a patch in pixels; 14 for vit_huge unless given")
    image_size: Side | None = setting(None, "size of images to read features from; null: as global views")
    stem: Stem = setting("patch", "conv: early convolutions; hybrid: a ResNet")
    stem_width: Dimension | None = setting(None, "width of the last 3 × 3 of stem=conv; null: width")
    resnet_layers: Stages = setting((3, 4, 9), "blocks in the stages of the ResNet of a hybrid stem")
    resnet_width: Dimension = setting(64, "width of the first stage of the ResNet of a hybrid stem")
    positions: Literal["learned", "sinusoidal", "rotary"] = setting(
        "learned", "sinusoidal: fixed; rotary: DINOv3's"
    )
    rotary_rescale: Rescale | None = setting(2.0, "in training, rescale rotary positions by up to this")
    key_bias: bool | None = setting(None, "bias of the keys; null: unless positions are rotary")
    registers: FewOrZero = setting(0, "register tokens")
    qk_scale: Positive | None = setting(None, "scale of query-key products; null: 1 / sqrt(head width)")
    dropout: BelowOne = setting(0.0, "dropout of tokens after positions, attention and MLP layers")
    attention_dropout: BelowOne = setting(0.0, "dropout of attention weights")
    drop_path: BelowOne = setting(0.1, "stochastic depth of the student's last block")
    drop_path_schedule: Literal["linear", "uniform"] = setting("linear", "rising from 0, or all equal")
    patch_drop: BelowOne = setting(0.0, "share of a global view's patches that the student does not see")
    layer_scale: Positive | None = setting(None, "initial scale of the branches of a block; null: none")
    init_std: Positive = setting(0.02, "standard deviation of the first weights of linear layers")
    grad_checkpointing: bool = setting(False, "recompute blocks to save memory", resumable=True)

    @model_validator(mode="before")
    @classmethod
    def _patches_of_the_named_size(cls, given: Any) -> Any:
        is_huge = isinstance(given, dict) and given.get("arch") == "vit_huge"
        return {"patch_size": VIT_SIZES["vit_huge"]["patch_size"], **given} if is_huge else given

    @property
    def timm(self) -> str | None:
        """The name of a model of timm."""
        return self.arch.partition(":")[2] if self.arch and ":" in self.arch else None

    @property
    def title(self) -> str:
        """What the backbone is, in words."""
        if self.timm:
            return f"{self.timm} of timm"
        width, depth, heads = self.shape
        blocks, block_heads = plural(depth, "block"), plural(heads, "head")
        return f"ViT/{self.patch_size}, width {width}, {blocks}, {block_heads}"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Width, depth and heads, whichever way they were given."""
        if self.arch:
            assert not self.timm, "a model of timm knows its shape only when it is built"
            size = VIT_SIZES[self.arch]
            return size["width"], size["depth"], size["heads"]
        width = self.width or 0
        return width, self.depth or 0, self.heads or width // HEAD_CHANNELS


def stem_problem(stem: Stem, patch_size: Size, resnet_width: int, section: str = "") -> str | None:
    """Return what is wrong with the patches or the ResNet of a stem, if something is."""
    height, width = patch_size
    given = f"{section}patch_size={height if height == width else patch_size}"
    if stem == "conv" and (max(patch_size) < 2 or any(side & (side - 1) for side in patch_size)):
        return f"{section}stem=conv halves the sides of images: it needs patches of 2, 4, 8, ..., not {given}"
    if stem == "hybrid" and any(side % REDUCTION for side in patch_size):
        return f"{section}stem=hybrid needs patches of {REDUCTION}, {2 * REDUCTION}, ..., not {given}"
    if stem == "hybrid" and resnet_width % GROUPS:
        return f"{section}resnet_width={resnet_width} must be a multiple of {GROUPS}"
    return None


class Head(Settings):
    """The projection from tokens to the prototypes."""

    prototypes: PrototypeCount = setting(65536, "output dimension")
    hidden_dim: Dimension = setting(2048, "width of the hidden layers")
    bottleneck_dim: Dimension = setting(256, "width of the normalised features before the prototypes")
    batch_norm: bool = setting(False, "BatchNorm in the hidden layers")
    norm_last_layer: bool = setting(True, "fix the norm of the prototypes; false may help a ViT-S")
    shared: bool = setting(True, "masked patches pass the head of the CLS token; false: one of their own")


class Views(Settings):
    """The views of an image: the teacher gets the global ones, the student all."""

    global_count: Few = setting(2, "global views of an image")
    global_size: Side = setting(224, "in pixels: side, or [height, width]")
    global_scale: Share = setting((0.4, 1.0), "share of the image's area, from and to")
    local_count: FewOrZero = setting(8, "local views of an image")
    local_size: Side = setting(96, "in pixels: side, or [height, width]")
    local_scale: Share = setting((0.05, 0.4), "share of the image's area, from and to")

    @property
    def title(self) -> str:
        """Numbers and sizes of both kinds of views."""
        kinds = (self.global_count, self.global_size), (self.local_count, self.local_size)
        return " and ".join(f"{count} × {size} px" for count, size in kinds)

    @property
    def global_shape(self) -> Size:
        """Height and width of a global view."""
        return height_width(self.global_size)

    @property
    def local_shape(self) -> Size:
        """Height and width of a local view."""
        return height_width(self.local_size)


class AugmentSettings(Settings):
    """What is drawn for each view; triples are for the first global view, other globals, locals."""

    flip: Probability = setting(0.5, "probability of a horizontal flip")
    vertical_flip: Probability = setting(0.0, "probability of a vertical flip")
    rotation: Annotated[float, Field(ge=0, le=180)] = setting(0.0, "degrees either way; 90: quarter turns")
    jitter: Probability = setting(0.8, "probability of the four jitters, in random order")
    brightness: Probability = setting(0.4, "factor from 1 - this to 1 + this")
    contrast: Probability = setting(0.4, "factor from 1 - this to 1 + this")
    saturation: Probability = setting(0.2, "factor from 1 - this to 1 + this")
    hue: Annotated[float, Field(ge=0, le=0.5)] = setting(0.1, "shift by up to this part of the colour circle")
    grey: Probability = setting(0.2, "probability of conversion to grey")
    blur: Triple = setting((1.0, 0.1, 0.5), "probability of a Gaussian blur")
    blur_sigma: tuple[Sigma, Sigma] = setting((0.1, 2.0), "sigma of the blur in pixels, from and to")
    solarise: Triple = setting((0.0, 0.2, 0.0), "probability of inverting the bright half")
    module: str | None = setting(None, "in Python: a module on batches of views instead of these")


class Loss(Settings):
    """The terms of the loss, and how the teacher's outputs are centred and sharpened."""

    teacher_temp: Positive = setting(0.04, "temperature of the teacher; 0.07 is as high as is known to work")
    warmup_teacher_temp_epochs: FewOrZero = setting(0, "epochs from a temperature of 0.04 to teacher_temp")
    centering: Literal["ema", "sinkhorn", "sinkhorn_ema"] = setting(
        "ema", "mean over steps; Sinkhorn-Knopp over a micro-batch, or the last ones"
    )
    koleo_weight: NonNegative = setting(0.0, "weight of KoLeo, which keeps images apart; 0.1 in DINOv2")
    patch_weight: NonNegative = setting(0.0, "weight of the loss of masked patches (iBOT); 1 in DINOv2")
    edge_weight: NonNegative = setting(0.0, "weight of predicting the edges around each patch")


class Gram(Settings):
    """Gram anchoring: match an earlier teacher's patch similarities, late in a run."""

    weights: str = Field(description="weights of that teacher: a kept checkpoint, or another run or file")
    weight: Positive = setting(1.0, "weight of the term; 2 in DINOv3's last phase")
    scale: Literal[1, 2] = setting(1, "2: the earlier teacher sees the global views at twice their size")


class Optim(Settings):
    """The student's optimiser and its schedules."""

    name: Literal["adamw", "sgd"] = setting("adamw", "optimiser")
    lr: Positive = setting(5e-4, "peak learning rate at a global batch of 256")
    lr_scaling: Literal["linear", "sqrt", "none"] = setting("linear", "how lr grows with global batch / 256")
    min_lr: NonNegative = setting(1e-6, "learning rate at the end")
    warmup_epochs: NonNegative = setting(10.0, "epochs of linear warm-up")
    weight_decay: NonNegative = setting(0.04, "weight decay at the start")
    weight_decay_end: NonNegative = setting(0.4, "weight decay at the end, after a cosine")
    # With less, AdamW's epsilon is larger than the gradients, and nothing learns.
    clip: Annotated[float, Field(ge=1e-3, le=1e9)] = setting(3.0, "largest norm of a gradient")
    clip_mode: Literal["tensor", "module", "global", "none"] = setting("tensor", "whose norms are limited")
    freeze_last_layer_epochs: NonNegative = setting(1.0, "epochs before the prototypes learn")
    layer_decay: PositiveShare | None = setting(None, "factor on lr per block towards the input")
    patch_embed_lr: Probability = setting(1.0, "factor on lr of the patch embedding")
    accumulate: Dimension = setting(1, "micro-batches per optimiser step", resumable=True)


class Teacher(Settings):
    """The exponential moving average of the student, or a frozen network that is there already."""

    weights: str | None = setting(None, "run or weights of a frozen teacher; null: the student's average")
    patch_weight: NonNegative = setting(1.0, "weight of patches, with a frozen teacher without heads")
    momentum: BelowOne = setting(0.996, "EMA momentum at the start; 1 at the end, after a cosine")


class Budget(Settings):
    """How long to train: in exactly one of three units."""

    one_of: ClassVar = (("epochs",), ("steps",), ("minutes",))
    epochs: Count | None = setting(100, "passes over the images")
    steps: Count | None = setting(None, "optimiser steps")
    minutes: Positive | None = setting(None, "minutes of training and evaluations; the schedules follow")

    @property
    def unit(self) -> str:
        """The unit that is given."""
        return next(name for (name,) in self.one_of if getattr(self, name) is not None)


class Compute(Settings):
    """How the run computes, logs and saves."""

    precision: Literal["auto", "no", "bf16", "fp16"] = setting("auto", "auto: bf16 where it is native")
    compile: bool | Literal["auto"] = setting(
        "auto", "torch.compile the networks; auto: their blocks, in long runs on CUDA", resumable=True
    )
    sharded: bool = setting(False, "each process has a part of the weights (FSDP2)", resumable=True)
    log_every: Count = setting(50, "steps between log lines", resumable=True)
    eval_every: Positive | None = setting(10.0, "epochs between evaluations; null: never", resumable=True)
    checkpoint_every: Count = setting(1000, "steps between checkpoints", resumable=True)
    keep_every: Count | None = setting(None, "steps between checkpoints that are kept", resumable=True)
    verbose: bool = setting(False, "print each chosen setting at the start, with its reason", resumable=True)
    trackers: tuple[str, ...] = setting((), "Accelerate trackers, as [tensorboard]", resumable=True)
    peer_timeout: Minutes = setting(10.0, "minutes to wait for another rank", resumable=True)
    resume: Literal["same", "changed"] = setting(
        "same", "same: only with the same settings; changed: with any", resumable=True
    )


class Init(Settings):
    """Start from trained weights, with lower learning rates unless they are given."""

    weights: str = Field(description="run folder, weights file, hf:OWNER/NAME or timm:NAME")
    network: Literal["teacher", "student"] = setting("teacher", "network of a training checkpoint")
    format: WeightsFormat | None = setting(None, "format of files that look alike; null: detected")
    heads: Few | None = setting(None, "attention heads of weights that do not state them")
    head_epochs: NonNegative = setting(1.0, "epochs in which only the heads learn")
