"""Declare the settings of a command: a `Settings` class whose fields have a default, a type and a meaning."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

T = TypeVar("T")


def whole(value: object) -> object:
    """Turn a whole float into an int, so that an integer setting takes 1e6."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Every number has a largest value, so that what no machine holds is refused and not tried.
Count = Annotated[int, Field(ge=1, le=10**12), BeforeValidator(whole)]
CountOrZero = Annotated[int, Field(ge=0, le=10**12), BeforeValidator(whole)]
Dimension = Annotated[int, Field(ge=1, le=65_536), BeforeValidator(whole)]  # of a tensor or an image
Few = Annotated[int, Field(ge=1, le=1000), BeforeValidator(whole)]  # blocks, views, threads, ...
FewOrZero = Annotated[int, Field(ge=0, le=1000), BeforeValidator(whole)]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(whole)]
Number = Annotated[float, Field(ge=-1e38, le=1e38)]  # what float32 holds
Positive = Annotated[float, Field(gt=0, le=1e9)]
NonNegative = Annotated[float, Field(ge=0, le=1e9)]
Probability = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NonEmpty = Annotated[tuple[T, ...], Field(min_length=1)]


def setting(default: T, doc: str, *, resumable: bool = False) -> T:
    """Declare a setting; a resumable one may change when a run is resumed."""
    field: T = Field(default, description=doc, json_schema_extra={"resumable": resumable})
    return field


class Problem(NamedTuple):
    """One mistake, and the dotted keys of the settings that it is about."""

    text: str
    keys: tuple[str, ...]


class ConfigError(ValueError):
    """Everything that is wrong with a configuration."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        texts = [problem.text for problem in self.problems]
        many = f"{len(texts)} settings are wrong:\n  - " + "\n  - ".join(texts)
        super().__init__(texts[0] if len(texts) == 1 else many)


SKIP_CONTRADICTIONS = object()  # as pydantic's context: validate each field, but not all of them together


# What the settings of the commands are called elsewhere.
OTHER_NAMES = {
    "batch_size": "batch_size_per_gpu",
    "block": "layer",
    "cache": "cache_dir",
    "count": "images limit n",
    "dino2021.blocks": "n_last_blocks",
    "dino2021.mean": "avgpool_patchtokens",
    "dino2021.probe": "pretrained_linear",
    "drop_path": "drop_path_rate",
    "embeddings": "index",
    "grid.blocks": "n_last_blocks_list",
    "grid.rates": "learning_rates lrs",
    "images": "query queries",
    "k": "top topk nb_knn neighbours neighbors",
    "last_frames": "n_last_frames queue",
    "layer_decay": "layerwise_decay",
    "lr": "learning_rate base_lr",
    "mass": "threshold",
    "normalise": "normalize",
    "output": "out output_dir output_file html",
    "pairs": "limit top",
    "radius": "size_mask_neighborhood neighbourhood neighborhood",
    "readers": "workers num_workers threads",
    "repeats": "n_tries tries",
    "run": "weights folder",
    "shard_size": "maxsize shard_mb",
    "shots": "few_shot n_per_class",
    "size": "image_size img_size",
    "smoothing": "label_smoothing",
    "source": "images data data_path path input val queries",
    "threshold": "cosine similarity",
    "train": "bank gallery train_data",
    "truth": "annotations ground_truth gt",
    "weights": "checkpoint model run pretrained pretrained_weights init",
    "workers": "num_workers",
}


class Settings(BaseModel):
    """The settings of a command, or one section of them; sections do not contain further sections."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # Groups of settings that exclude each other: setting one group unsets the defaults of the others.
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()

    # Settings given on the command line by position; if the last one is a list, it takes all that remain.
    positional: ClassVar[tuple[str, ...]] = ()

    # Settings that may also be given as `--name VALUE`.
    options: ClassVar[tuple[str, ...]] = ()

    # Options without a value, `--name`, and the settings that they make true.
    switches: ClassVar[Mapping[str, str]] = {}

    # Other names of dotted keys, separated by spaces; they are only used for suggestions.
    also_known_as: ClassVar[Mapping[str, str]] = OTHER_NAMES

    def contradictions(self) -> Iterator[Problem]:
        """Yield what is wrong with settings that are valid one by one."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        """Refuse empty text, which is never meant: as a path it would be the current folder."""
        # Not by pydantic's `str_min_length`, which refuses the names of files that are not UTF-8.
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise ValueError("empty text")
        return value

    @model_validator(mode="before")
    @classmethod
    def _unset_other_groups(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        groups = [group for group in cls.one_of if any(given.get(name) is not None for name in group)]
        others = [name for group in cls.one_of if groups and group not in groups for name in group]
        return {**{name: None for name in others if cls.model_fields[name].default is not None}, **given}

    @model_validator(mode="after")
    def _check_contradictions(self, info: ValidationInfo) -> Self:
        problems = [] if info.context is SKIP_CONTRADICTIONS else list(self.contradictions())
        if problems:
            raise ConfigError(problems)
        return self


C = TypeVar("C", bound=Settings)


class SettingInfo(NamedTuple):
    """What is known of one setting."""

    key: str  # dotted
    doc: str
    default: object
    required: bool
    resumable: bool
    choices: tuple[str, ...]
    takes_text: bool
    takes_list: bool
    is_list: bool  # and nothing else but null
    allowed: str
    rivals: frozenset[str]  # the keys of the groups that exclude this setting


def section_of(annotation: object) -> type[Settings] | None:
    """Return the class of a field that is a section or an optional section."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None


@cache
def settings_of(cls: type[Settings], prefix: str = "") -> dict[str, SettingInfo]:
    """Return all settings of `cls` by dotted key; an optional section is a setting too, which takes null."""
    properties = cls.model_json_schema()["properties"]
    found: dict[str, SettingInfo] = {}
    for name, field in cls.model_fields.items():
        section = section_of(field.annotation)
        if section is not field.annotation:
            schema = properties[name]
            types = schema.get("anyOf", [schema])
            grouped = any(name in group for group in cls.one_of)
            others = [other for group in cls.one_of if grouped and name not in group for other in group]
            found[prefix + name] = SettingInfo(
                key=prefix + name,
                doc=field.description or "",
                default=field.default,
                required=field.is_required(),
                resumable=schema.get("resumable", False),
                choices=tuple(str(choice) for one in types for choice in one.get("enum", ())),
                takes_text=any(one.get("type") == "string" and "enum" not in one for one in types),
                takes_list=any(one.get("type") == "array" for one in types),
                is_list=all(one.get("type") in ("array", "null") for one in types),
                allowed=" or ".join(map(_allowed, types)),
                rivals=frozenset(prefix + other for other in others),
            )
        if section:
            found |= settings_of(section, f"{name}.")
    return found


def sections(cls: type[Settings]) -> list[str]:
    """Return the names of the sections of `cls`."""
    return [name for name, field in cls.model_fields.items() if section_of(field.annotation)]


_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "non-empty text",
}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "of at least"}
_BOUNDS |= {"maximum": "of at most", "exclusiveMaximum": "below"}


def _allowed(schema: Mapping[str, Any]) -> str:
    """Describe in words what a JSON schema allows."""
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "prefixItems" in schema:
        items = [_allowed(item) for item in schema["prefixItems"]]
        return f"a list of {len(items)}, each {' or '.join(dict.fromkeys(items))}"
    if "items" in schema:
        count = " of 1 or more" if schema.get("minItems") else ""
        return f"a list{count}, each {_allowed(schema['items'])}"
    if "examples" in schema:
        return " or ".join(schema["examples"])
    if schema.get("type") not in _TYPES:
        return "null" if schema.get("type") == "null" else "a section"
    if {"minimum", "maximum"} <= schema.keys():
        limits = f"from {_number(schema['minimum'])} to {_number(schema['maximum'])}"
    else:
        limits = " and ".join(
            f"{word} {_number(schema[name])}" for name, word in _BOUNDS.items() if name in schema
        )
    return f"{_TYPES[schema['type']]} {limits}".strip()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def values(config: Settings, *, given: bool = False) -> dict[str, object]:
    """Return all settings, or those that the user gave, by dotted key; a null section is one value."""
    found: dict[str, object] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        if given and name not in config.model_fields_set:
            continue
        if isinstance(value, Settings):
            found |= {f"{name}.{key}": inner for key, inner in values(value, given=given).items()}
        else:
            found[name] = value
    return found


def get(config: Settings, key: str) -> object:
    """Return the value of a dotted key; in an optional section that is null it is None."""
    return values(config).get(key)


def given_keys(config: Settings) -> set[str]:
    """Return the dotted keys that the user gave, as opposed to defaults."""
    return set(values(config, given=True))


def result_changes(config: C, base: C) -> dict[str, tuple[object, object]]:
    """Return key: (old, new) of the settings that change the result and differ from an earlier `base`."""
    new, old = values(config), values(base)
    fixed = [key for key, info in settings_of(type(config)).items() if not info.resumable]
    return {key: (old.get(key), new.get(key)) for key in fixed if old.get(key) != new.get(key)}
