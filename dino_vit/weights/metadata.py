"""What files say of their weights: ours, which are written here, our exports, and config.json."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from dino_vit.core.storage import write_tensors
from dino_vit.core.text import brief
from dino_vit.models.backbone import Backbone

FORMAT_VERSION = 1  # of the metadata in our own files
EXPORT_KEY = "dino_vit_export"  # of an export, under which it says what its tensors do not show
HUB_FILES = ("model.safetensors", "pytorch_model.bin", "model.bin")  # a config.json beside these is theirs


class WeightsError(ValueError):
    """The given weights cannot be used as requested."""


# What pydantic calls the members of a union.
_UNION = re.compile(r"int|float|constrained-\w+|(list|tuple|dict)\[.*")
_Eps = Annotated[float, Field(gt=0, le=1)]


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


class _PretrainedConfig(_Metadata):
    input_size: list[PositiveInt] | None = None
    mean: list[float] | None = None
    std: list[PositiveFloat] | None = None


class _HubConfig(_Metadata):
    """What is read of the config.json of Hugging Face and of timm, and of a preprocessor_config.json."""

    model_config = ConfigDict(extra="allow")
    num_attention_heads: PositiveInt | None = None
    image_size: PositiveInt | list[PositiveInt] | dict[str, Any] | None = None
    layer_norm_eps: _Eps = 1e-12
    image_mean: list[float] | float | None = None
    image_std: list[PositiveFloat] | PositiveFloat | None = None
    model_args: dict[str, Any] | None = None
    architecture: str | None = None  # in timm's files
    pretrained_cfg: _PretrainedConfig | None = None


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of one of our own files, its lists as the tuples that they were."""
    if (version := metadata.get("version", FORMAT_VERSION)) != FORMAT_VERSION:
        raise WeightsError(
            f"{path} has format version {brief(repr(version))}, but this dino-vit reads version "
            f"{FORMAT_VERSION}; upgrade dino-vit to load it"
        )
    own = checked(_Own, metadata, f"the metadata of {path}")
    architecture = own["architecture"].items()
    return {**own, "architecture": {k: tuple(v) if isinstance(v, list) else v for k, v in architecture}}


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
    config: dict[str, Any] = {}
    for name in ("preprocessor_config.json", "config.json"):
        path = weights.with_name(name)
        if weights.name in HUB_FILES and path.is_file():
            config |= _parse(str(path), path.read_bytes())
    if "model_type" not in config and "architecture" not in config:
        return {}
    return checked(_HubConfig, config, str(weights.with_name("config.json")))


def _parse(where: str, text: Any) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{where} is not a JSON object: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{where} is not a JSON object")
    return content


def checked(kind: type[BaseModel], metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values that are read of some metadata, in the types that they have in Python."""
    try:
        return kind.model_validate(metadata).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(part for part in map(str, first["loc"]) if not _UNION.fullmatch(part))
        reason = first["msg"][:1].lower() + first["msg"][1:]
        fault = f"= {brief(repr(first['input']), 40)}, but {reason}"
        fault = "is missing" if first["type"] == "missing" else fault
        raise WeightsError(f"{where} cannot be used: {brief(key)} {fault}") from error


def save_backbone(
    model: Backbone,
    path: str | Path,
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    bits: Literal[8, 16] | None = None,
    range: tuple[float, float] | None = None,
    network: str | None = None,
    step: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write a safetensors file with all that loading needs; arguments default to the model's provenance."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"{path} must end in .safetensors")
    pixels = {"mean": mean, "std": std, "bits": bits, "range": range}
    given = {**pixels, "network": network, "step": step, "config": config}
    provenance = asdict(model.provenance) if model.provenance else {}
    metadata: dict[str, Any] = {
        k: provenance.get(k) if value is None else value for k, value in given.items()
    }
    for name in ("mean", "std"):
        values, channels = metadata[name], model.channels
        if values is not None and len(values) != channels:
            raise WeightsError(f"{name} needs one value per channel ({channels}), not {len(values)}")
    metadata |= {"kind": "backbone", "version": FORMAT_VERSION, "architecture": model.architecture}
    write_tensors(path, model.state_dict(), json.dumps(metadata, sort_keys=True))
