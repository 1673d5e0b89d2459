"""Show settings as text: commented YAML, or the lines of a help."""

from collections.abc import Collection

from dino_vit.config import yaml
from dino_vit.config.settings import SettingInfo, Settings, section_of, settings_of, values
from dino_vit.core.text import brief

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
        lines.append(f"{line:<{COLUMN - 2}}  # {_meaning(settings_of(cls)[key])}")
    return "\n".join(lines) + "\n"


def list_settings(cls: type[Settings], leave_out: Collection[str] = ()) -> str:
    """Return a line for each setting: its name, default and meaning."""
    lines = []
    for key, info in settings_of(cls).items():
        if key not in leave_out:
            default = "..." if info.required else brief(yaml.write(info.default))
            lines.append(f"  {f'{key}={default}':<{COLUMN}}  {_meaning(info)}")
    return "\n".join(lines)


def _meaning(info: SettingInfo) -> str:
    return f"{info.doc} [{'|'.join(info.choices)}]" if info.choices else info.doc
