"""Declare the settings of a command: a `Settings` class whose fields have a default, a type and a meaning."""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")
Task = Literal["multiclass", "multilabel"]
Title = Literal["top-1", "mAP"]  # what an accuracy is, by the task


def read_texts(value: object) -> object:
    """Read `[a, b]` as several texts where one would do too."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]") and "," in value:
        return tuple(part.strip() for part in value[1:-1].split(","))
    return tuple(value) if isinstance(value, list) else value


def whole(value: object) -> object:
    """Turn a whole float into an int, so that an integer setting takes 1e6."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Every number has a largest value, so that what no machine holds is refused and not tried.
Count = Annotated[int, Field(ge=1, le=10**12), BeforeValidator(whole)]
WIDEST = 65_536
Dimension = Annotated[int, Field(ge=1, le=WIDEST), BeforeValidator(whole)]  # of a tensor or an image
Few = Annotated[int, Field(ge=1, le=1000), BeforeValidator(whole)]  # blocks, views, threads, ...
FewOrZero = Annotated[int, Field(ge=0, le=1000), BeforeValidator(whole)]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(whole)]
Number = Annotated[float, Field(ge=-1e38, le=1e38)]  # what float32 holds
Positive = Annotated[float, Field(ge=1e-12, le=1e9)]  # float32 holds what follows from it
NonNegative = Annotated[float, Field(ge=0, le=1e9)]
Probability = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NonEmpty = Annotated[tuple[T, ...], Field(min_length=1)]
# Of a network, whose constructors and settings share them.
Side = Dimension | tuple[Dimension, Dimension]
Stages = tuple[Few, Few, Few]  # of a ResNet
Classes = Annotated[int, Field(ge=0, le=2**24), BeforeValidator(whole)]
PrototypeCount = Annotated[int, Field(ge=2, le=2**24), BeforeValidator(whole)]
MlpRatio = Annotated[Positive, Field(le=1000)]
NormEps = Annotated[Positive, Field(le=1)]
Rescale = Annotated[float, Field(ge=1, le=1000)]  # and its inverse


def setting(default: T, doc: str, *, resumable: bool = False) -> T:
    """Declare a setting; a resumable one may change when a run is resumed."""
    field: T = Field(default, description=doc, json_schema_extra={"resumable": resumable})
    return field


class ConfigError(ValueError):
    """Everything that is wrong with a configuration."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = texts = tuple(problems)
        many = f"{len(texts)} settings are wrong:\n  - " + "\n  - ".join(texts)
        super().__init__(texts[0] if len(texts) == 1 else many)

    def __reduce__(self) -> tuple[Any, ...]:
        return ConfigError, (self.problems,)


STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Settings(BaseModel):
    """The settings of a command, or one section of them; sections do not contain further sections."""

    model_config = STRICT

    # Groups of settings that exclude each other: setting one group unsets the defaults of the others.
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()
    # Settings given by position; if the last one is a list, it takes all that remain.
    positional: ClassVar[tuple[str, ...]] = ()
    # Command lines shown by `--help`, without `dino-vit`.
    examples: ClassVar[tuple[str, ...]] = ()
    # What a command line writes where `output` is null; after eval/ begins the name of a file of results.
    writes: ClassVar[str] = ""
    # Whether the same command, given again, goes on with what a signal stopped.
    resumes: ClassVar[bool] = False

    @property
    def given(self) -> frozenset[str]:
        """The dotted keys that the user gave, as opposed to defaults."""
        return frozenset(values(self, given=True))

    def contradictions(self) -> Iterator[str]:
        """Yield what is wrong with settings that are valid one by one; `load` calls it."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object, info: ValidationInfo) -> object:
        """Take paths, lists, and one value for a list of it; refuse empty text."""
        value = as_tuples(value)
        setting_info = settings_of(cls).get(str(info.field_name))
        if setting_info and setting_info.is_list and not isinstance(value, tuple | None):
            value = (value,)
        # Empty text is never meant: as a path it would be the current folder. pydantic's own `str_min_length`
        # refuses the names of files that are not UTF-8.
        if value == "" or (isinstance(value, tuple) and "" in value):
            raise PydanticCustomError("empty", "Input should be non-empty text")
        return value


C = TypeVar("C", bound=Settings)


def as_tuples(value: object) -> object:
    """Return lists and arrays as tuples, and paths as text, without a ~."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple):
        return tuple(map(as_tuples, value))
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    return os.path.expanduser(value) if isinstance(value, str) and value.startswith("~/") else value


class SettingInfo(NamedTuple):
    """What is known of one setting."""

    meaning: str  # with the choices
    default: object
    required: bool
    resumable: bool
    choices: tuple[str, ...]
    takes_text: bool
    is_list: bool  # of any length, and nothing else but null
    is_switch: bool
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
    infos: dict[str, SettingInfo] = {}
    for name, field in cls.model_fields.items():
        section = section_of(field.annotation)
        if section is not field.annotation:
            schema = properties[name]
            types = schema.get("anyOf", [schema])
            group = next((group for group in cls.one_of if name in group), None)
            rivals = [rival for other in cls.one_of if group not in (None, other) for rival in other]
            choices = [str(choice) for kind in types for choice in kind.get("enum", kind.get("examples", ()))]
            meaning = field.description or ""
            infos[prefix + name] = SettingInfo(
                meaning=f"{meaning} [{'|'.join(choices)}]" if choices else meaning,
                default=field.default,
                required=field.is_required(),
                resumable=schema.get("resumable", False),
                choices=tuple(choices),
                takes_text=any(
                    kind.get("type") == "string" and not {"enum", "const"} & kind.keys() for kind in types
                ),
                is_list=all(kind.get("type") == "null" or "items" in kind for kind in types),
                is_switch=types[0].get("type") == "boolean",
                rivals=frozenset(prefix + rival for rival in rivals),
            )
        if section:
            infos |= settings_of(section, f"{name}.")
    return infos


def sections(cls: type[Settings]) -> list[str]:
    """Return the names of the sections of `cls`."""
    return [name for name, field in cls.model_fields.items() if section_of(field.annotation)]


def values(config: Settings, *, given: bool = False) -> dict[str, object]:
    """Return all settings, or those that the user gave, by dotted key; a null section is one value."""
    return flat(config.model_dump(exclude_unset=given))


def flat(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Return values in sections by their dotted keys."""
    layer: dict[str, object] = {}
    for name, value in nested.items():
        key = f"{prefix}{name}"
        layer |= flat(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return layer


def nested(layer: Mapping[str, object]) -> dict[str, Any]:
    """Return values by dotted key in their sections."""
    result: dict[str, Any] = {}
    for key, value in layer.items():
        section, _, name = key.rpartition(".")
        (result.setdefault(section, {}) if section else result)[name] = value
    return result


def get(config: Settings, key: str) -> object:
    """Return the value of a dotted key; in an optional section that is null it is None."""
    return values(config).get(key)
