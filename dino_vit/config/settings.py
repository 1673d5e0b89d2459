"""Declare the settings of a command: a `Settings` class of knobs, each with its default, type and meaning."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, NamedTuple, Self, TypeVar, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticUndefined

from dino_vit.config import yaml

T = TypeVar("T")


def whole(value: object) -> object:
    """Turn a whole float into an int, so that 1e6 counts images."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=1), BeforeValidator(whole)]
CountOrZero = Annotated[int, Field(ge=0), BeforeValidator(whole)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]


def setting(default: T, doc: str, *, resumable: bool = False) -> T:
    """Declare a setting; one that `may_change` can have another value when a run is resumed."""
    field: T = Field(default, description=doc, json_schema_extra={"resumable": resumable})
    return field


FIELDS_ONLY = object()  # as pydantic's context: leave contradictions unchecked


class Problem(NamedTuple):
    """One mistake in words, and the dotted keys that it is about."""

    text: str
    keys: tuple[str, ...]


class ConfigError(ValueError):
    """What is wrong with a configuration: every mistake, each with what to do."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        texts = [problem.text for problem in self.problems]
        many = f"{len(texts)} settings are wrong:\n  - " + "\n  - ".join(texts)
        super().__init__(texts[0] if len(texts) == 1 else many)


class Settings(BaseModel):
    """Settings of a command, or one section of them: frozen, strictly typed, unknown names refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    # Groups of knobs that exclude each other; giving one group unsets the default of the others.
    one_of: ClassVar[tuple[tuple[str, ...], ...]] = ()

    # What words without a name set on the command line, in this order; a tuple, the last, takes all the rest.
    positional: ClassVar[tuple[str, ...]] = ()

    # Options without a value, `--name` on the command line, and the settings that they make true.
    switches: ClassVar[Mapping[str, str]] = {}

    # Other names of dotted keys, separated by spaces: for suggestions only.
    also_known_as: ClassVar[Mapping[str, str]] = {}

    def contradictions(self) -> Iterator[Problem]:
        """Yield what is wrong with valid settings taken together."""
        yield from ()

    @model_validator(mode="before")
    @classmethod
    def _unset_the_others(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        groups = [group for group in cls.one_of if any(given.get(name) is not None for name in group)]
        others = [name for group in cls.one_of if groups and group not in groups for name in group]
        return {**{name: None for name in others if cls.model_fields[name].default is not None}, **given}

    @model_validator(mode="after")
    def _refuse_contradictions(self, info: ValidationInfo) -> Self:
        problems = [] if info.context is FIELDS_ONLY else list(self.contradictions())
        if problems:
            raise ConfigError(problems)
        return self


C = TypeVar("C", bound=Settings)


@dataclass(frozen=True)
class SettingInfo:
    """What is known of one setting: where it lives, what it means, what it takes."""

    key: str
    section: type[Settings]
    doc: str
    default: object
    schema: Mapping[str, Any]

    @property
    def required(self) -> bool:
        return self.default is PydanticUndefined

    @property
    def resumable(self) -> bool:
        return bool(self.schema.get("resumable", False))

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(choice) for part in _parts(self.schema) for choice in part.get("enum", ()))

    @property
    def takes_text(self) -> bool:
        return any(part.get("type") == "string" and not part.get("enum") for part in _parts(self.schema))


def _parts(schema: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return cast(Sequence[Mapping[str, Any]], schema.get("anyOf", [schema]))


def section_of(annotation: object) -> type[Settings] | None:
    """Return the section class of a field that holds one, be it optional."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Settings):
            return candidate
    return None


@cache
def settings_of(cls: type[Settings], prefix: str = "") -> dict[str, SettingInfo]:
    """Return every knob of `cls` by its dotted key; an optional section is a knob too, that takes null."""
    properties = cls.model_json_schema()["properties"]
    found: dict[str, SettingInfo] = {}
    for name, field in cls.model_fields.items():
        section = section_of(field.annotation)
        if section is not field.annotation:
            doc = field.description or ""
            found[prefix + name] = SettingInfo(prefix + name, cls, doc, field.default, properties[name])
        if section:
            found |= settings_of(section, f"{prefix}{name}.")
    return found


def sections(cls: type[Settings]) -> list[str]:
    """Return the dotted names of the sections of `cls`."""
    return list(dict.fromkeys(key.rpartition(".")[0] for key in settings_of(cls) if "." in key))


def allowed(schema: Mapping[str, Any]) -> str:
    """Say in words what a knob with this JSON schema takes."""
    if "anyOf" in schema:
        return " or ".join(allowed(part) for part in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "prefixItems" in schema:
        items = [allowed(item) for item in schema["prefixItems"]]
        return f"a list of {len(items)}: " + (
            f"each {items[0]}" if len(set(items)) == 1 else ", ".join(items)
        )
    if schema.get("type") == "array":
        return f"a list, each {allowed(schema['items'])}"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "text"}
    name = words.get(schema.get("type", ""), "null" if schema.get("type") == "null" else "a section")
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f"{name} from {low} to {high}"
    bounds = {"above": above, "of at least": low, "of at most": high, "below": below}
    limits = [f"{word} {yaml.write(value)}" for word, value in bounds.items() if value is not None]
    return " ".join([name, " and ".join(limits)]).strip()


def get(config: Settings, key: str) -> object:
    """Return the value of a dotted key."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def given_keys(config: Settings) -> set[str]:
    """Return the dotted keys that the user gave, as opposed to defaults."""
    keys: set[str] = set()
    for name in config.model_fields_set:
        value = getattr(config, name)
        inside = {f"{name}.{key}" for key in given_keys(value)} if isinstance(value, Settings) else {name}
        keys |= inside
    return keys


def values(config: Settings) -> dict[str, object]:
    """Return all settings by dotted key; the knobs of an optional section that is null are left out."""
    found = {key: get(config, key) for key in settings_of(type(config))}
    inner = {key for key in found if any(found.get(part, 0) is None for part in parents(key))}
    return {k: v for k, v in found.items() if k not in inner and not isinstance(v, Settings)}


def result_changes(config: C, base: C) -> dict[str, tuple[object, object]]:
    """Return key: (old, new) of the settings that shape the result and differ from an earlier `base`."""
    new, old = values(config), values(base)
    fixed = [key for key, one in settings_of(type(config)).items() if not one.resumable]
    return {key: (old.get(key), new.get(key)) for key in fixed if old.get(key) != new.get(key)}


def parents(key: str) -> list[str]:
    """Return the dotted prefixes of `key`."""
    names = key.split(".")
    return [".".join(names[:n]) for n in range(1, len(names))]
