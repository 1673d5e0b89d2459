"""What files state about a backbone beside its tensors, validated before anything uses it.

`Facts` is the one model for our own files, our exports and folders of the Hugging Face Hub, whose JSON
`HubFacts` reads. What they do not know is ignored; what they know has the bounds of the settings.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, JsonValue, ValidationError, model_validator

from dino_vit.config.constructors import faults
from dino_vit.config.sections import Interpolation, ResizeMode, WeightsFormat
from dino_vit.config.settings import (
    Dimension,
    FewOrZero,
    NonEmpty,
    NonNegative,
    NormEps,
    Number,
    Positive,
    Settings,
    Side,
)
from dino_vit.core.text import brief

Text = Annotated[str, Field(max_length=200)]
Json = dict[str, JsonValue]
Mean = NonEmpty[Number]
Std = NonEmpty[Positive]
Pair = tuple[Dimension, Dimension]
F = TypeVar("F", bound=Settings)


class WeightsError(ValueError):
    """The given weights cannot be used as requested."""


class OtherArchitecture(WeightsError):
    """The given weights are not those of our vision transformer; timm may have theirs."""


class Stated(Settings):
    """Facts in a file, which may have others too."""

    model_config = ConfigDict(extra="ignore")


class Preparation(Settings):
    """How images are prepared, where it is not as published."""

    resize_mode: ResizeMode | None = None
    shorter_side: Dimension | None = None
    interpolation: Interpolation | None = None


class Facts(Stated):
    """What is known of a backbone; nothing that a file states is used unless it is in here."""

    mean: Mean | None = None
    std: Std | None = None
    bits: Literal[8, 16] | None = None
    range: tuple[Number, Number] | None = None
    size: Pair | None = None
    preparation: Preparation | None = None
    network: Literal["teacher", "student", "classifier"] | None = None
    step: Annotated[int, Field(ge=0, le=10**12)] | None = None
    config: Json | None = None
    # Of our own files.
    kind: Text | None = None
    architecture: Json | None = None  # the arguments of a constructor, which validates them
    # Of exports and of the hub, as far as tensors do not show it.
    format: WeightsFormat | None = None
    name: Text | None = None  # of a model of timm
    timm_name: Text | None = None  # of one that may be ours
    model_args: Json | None = None
    positions: Literal["learned", "sinusoidal", "rotary"] | None = None
    heads: FewOrZero | None = None  # 0: of a model of timm, whose heads are not known
    image_size: Side | None = None
    channels: Dimension | None = None
    norm_eps: NormEps | None = None
    activation: Text | None = None
    rotary_base: Number | None = None
    rotary_rescale: NonNegative | None = None  # 0: none

    @model_validator(mode="after")
    def _agree(self) -> Self:
        counts = {len(values) for values in (self.mean, self.std) if values}
        if len(counts) > 1:
            raise ValueError("mean and std have different numbers of channels")
        if self.range and self.range[0] >= self.range[1]:
            raise ValueError("range does not go from low to high")
        channels = (self.architecture or {}).get("channels", self.channels)
        if isinstance(channels, int) and counts - {channels}:
            raise ValueError(f"mean and std have {counts.pop()} values, but images {channels} channels")
        return self

    def stated(self) -> dict[str, Any]:
        """Return what is stated; null states nothing."""
        return self.model_dump(exclude_none=True)


class PretrainedCfg(Stated):
    """What timm states of pretrained weights."""

    input_size: tuple[Dimension, Dimension, Dimension] | None = None
    mean: Mean | None = None
    std: Std | None = None
    crop_pct: Annotated[float, Field(gt=0.01, le=10)] | None = None
    crop_mode: Text | None = None
    interpolation: Text | None = None


class Edges(Stated):
    """A size of a processor."""

    height: Dimension | None = None
    width: Dimension | None = None
    shortest_edge: Dimension | None = None


class Rope(Stated):
    """Rotary positions."""

    rope_theta: Number | None = None


class HubFacts(Stated):
    """config.json and preprocessor_config.json of a folder of the hub, as far as they are about a ViT."""

    model_type: Text | None = None
    architecture: Text | None = None
    pretrained_cfg: PretrainedCfg | None = None
    model_args: Json | None = None
    num_attention_heads: FewOrZero | None = None
    image_size: Side | None = None
    layer_norm_eps: NormEps | None = None
    hidden_act: Text | None = None
    rope_theta: Number | None = None
    rope_parameters: Rope | None = None
    pos_embed_rescale: NonNegative | None = None
    image_mean: Mean | None = None
    image_std: Std | None = None
    do_center_crop: bool | None = None
    size: Side | Edges | None = None
    crop_size: Side | Edges | None = None
    resample: Annotated[int, Field(ge=0, le=5)] | None = None


def parse(where: str, text: Any) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        content = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{where} is not a JSON object: {brief(error, 200)}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{where} is not a JSON object")
    return content


def check(cls: type[F], content: Mapping[str, Any], where: str) -> F:
    """Return what a file states if it may be used, or raise WeightsError with what is wrong and allowed."""
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        problems = brief("; ".join(faults(content, error)), 400)
        raise WeightsError(f"{where} describes no backbone that is supported: {problems}") from None
