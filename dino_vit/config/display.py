"""Show settings as commented YAML or as a JSON schema."""

from typing import Any

from dino_vit.config import yaml
from dino_vit.config.settings import SettingInfo, Settings, section_of, settings_of, values

COLUMN = 34  # where the meaning of a setting begins


def to_yaml(config: Settings) -> str:
    """Return every setting as YAML that loads back to an equal config, each with its meaning."""
    cls = type(config)
    lines: list[str] = []
    section = ""
    for key, value in values(config).items():
        prefix, _, name = key.rpartition(".")
        if prefix != section:
            lines.append("")
        if prefix and prefix != section:
            inner = section_of(cls.model_fields[prefix].annotation)
            lines += [f"# {inner.__doc__}" if inner else "", f"{prefix}:"]
        section = prefix
        line = f"{'  ' if prefix else ''}{name}: {yaml.write(value)}"
        lines.append(f"{line:<{COLUMN - 2}}  # {meaning(settings_of(cls)[key])}")
    return "\n".join(lines) + "\n"


def meaning(info: SettingInfo) -> str:
    """Return what a setting means, with its choices."""
    return f"{info.doc} [{'|'.join(info.choices)}]" if info.choices else info.doc


def json_schema(cls: type[Settings]) -> dict[str, Any]:
    """Return the JSON schema with which an editor completes and checks a YAML file of `cls`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema()}
