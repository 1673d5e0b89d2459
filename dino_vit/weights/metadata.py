"""Metadata of weight files: ours, our exports', and config.json."""

import json
import re
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

from dino_vit.core.text import brief
from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer

FORMAT_VERSION = 1  # of the metadata in our own files
EXPORT_KEY = "dino_vit_export"  # of an export, under which it says what its tensors do not show
HUB_FILES = ("model.safetensors", "pytorch_model.bin", "model.bin")  # a config.json beside these is theirs


class WeightsError(ValueError):
    """The given weights cannot be used as requested."""


# What pydantic calls the members of a union.
_UNION = re.compile(r"int|float|constrained-\w+|(list|tuple|dict)\[.*")
_Eps = Annotated[float, Field(gt=0, le=1)]
_Scale = Annotated[float, Field(gt=0, le=1000)]


class _Metadata(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


class _Provenance(_Metadata):
    """What is known of the training; see `Provenance`."""

    mean: tuple[float, ...] | None = None
    std: tuple[PositiveFloat, ...] | None = None
    bits: Literal[8, 16] | None = None
    range: tuple[float, float] | None = None
    network: str | None = None
    step: int | None = None


_HINTS = get_type_hints(VisionTransformer.__init__)
_ARGUMENTS: dict[str, Any] = {
    name: (_HINTS[name], parameter.default)
    for name, parameter in signature(VisionTransformer).parameters.items()
}
_ARGUMENTS |= {"norm_eps": (_Eps, 1e-6), "qk_scale": (_Scale | None, None)}
_STRICT = ConfigDict(allow_inf_nan=False, extra="forbid")
_Architecture = create_model("_Architecture", __config__=_STRICT, **_ARGUMENTS)


class _TimmArchitecture(BaseModel):
    """The arguments of a `TimmBackbone`."""

    model_config = _STRICT
    name: str
    image_size: PositiveInt | tuple[PositiveInt, PositiveInt] = 224
    channels: PositiveInt = 3
    drop_path: float = 0.0
    num_classes: int = 0


class _Own(_Provenance):
    """The metadata of a backbone file or a checkpoint."""

    kind: str
    mean: tuple[float, ...] | None
    std: tuple[PositiveFloat, ...] | None
    config: dict[str, Any] | None = None
    architecture: dict[str, Any]


class _Export(_Provenance):
    """What a file of another library's format does not show."""

    format: str
    heads: NonNegativeInt
    image_size: tuple[PositiveInt, PositiveInt]
    name: str | None = None  # of a model of timm
    channels: PositiveInt = 3
    positions: str = "learned"


class _Hub(_Metadata):
    model_config = ConfigDict(extra="allow")


class _ModelArguments(_Hub):
    num_heads: PositiveInt | None = None


class _PretrainedConfig(_Hub):
    input_size: list[PositiveInt] | None = None
    mean: list[float] | None = None
    std: list[PositiveFloat] | None = None


class _HubConfig(_Hub):
    """What is read of the config.json of Hugging Face and of timm, and of a preprocessor_config.json."""

    num_attention_heads: PositiveInt | None = None
    image_size: PositiveInt | list[PositiveInt] | dict[str, Any] | None = None
    layer_norm_eps: _Eps = 1e-12
    image_mean: list[float] | float | None = None
    image_std: list[PositiveFloat] | PositiveFloat | None = None
    model_args: _ModelArguments | None = None
    architecture: str | None = None  # in timm's files
    pretrained_cfg: _PretrainedConfig | None = None


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of one of our own files, its lists as the tuples that they were."""
    if (version := metadata.get("version", FORMAT_VERSION)) != FORMAT_VERSION:
        raise WeightsError(
            f"{path} has format version {brief(repr(version))}, but this dino-vit reads version "
            f"{FORMAT_VERSION}; upgrade dino-vit to load it"
        )
    where = f"the metadata of {path}"
    found = checked(_Own, metadata, where)
    kind = _TimmArchitecture if "name" in found["architecture"] else _Architecture
    return {**found, "architecture": checked(kind, found["architecture"], where, "architecture.")}


def parse_metadata(path: Path, text: str) -> dict[str, Any]:
    """Return the metadata in one of our own files."""
    return check_metadata(path, _parse(f"the metadata of {path}", text))


def describe_export(model: Backbone, format: str) -> str:
    """Return what the tensors of an export do not show, as JSON."""
    origin = {name: getattr(model.provenance, name, None) for name in _Provenance.model_fields}
    return json.dumps(
        {
            **origin,
            "format": format,
            "heads": model.heads,
            "image_size": model.image_size,
            "channels": model.channels,
            **{key: value for key, value in model.architecture.items() if key in ("positions", "name")},
        }
    )


def parse_export(path: Path, text: object) -> dict[str, Any]:
    """Return what one of our exports says about itself."""
    where = f"the metadata of {path}"
    return checked(_Export, _parse(where, text), where)


def read_hub_config(weights: Path) -> dict[str, Any]:
    """Return config.json of a hub folder together with the preprocessor's statistics, or an empty dict."""
    found: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "config.json"):
        path = weights.with_name(name)
        if weights.name in HUB_FILES and path.is_file():
            found |= _parse(str(path), path.read_bytes())
    if "model_type" not in found and "architecture" not in found:
        return {}
    return checked(_HubConfig, found, str(weights.with_name("config.json")))


def _parse(where: str, text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{where} is not a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{where} is not a JSON object")
    return found


def checked(kind: type[BaseModel], found: Mapping[str, Any], where: str, section: str = "") -> dict[str, Any]:
    """Return the values that are read of some metadata, in the types that they have in Python."""
    try:
        return kind.model_validate(found).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = section + ".".join(part for part in map(str, first["loc"]) if not _UNION.fullmatch(part))
        reason = first["msg"][:1].lower() + first["msg"][1:]
        given = f"= {brief(repr(first['input']), 40)}, but {reason}"
        fault = {"missing": "is missing", "extra_forbidden": "is unknown"}.get(first["type"], given)
        raise WeightsError(f"{where} cannot be used: {brief(key)} {fault}") from error
