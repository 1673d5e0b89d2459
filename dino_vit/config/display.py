"""Show settings: commented YAML, a JSON schema for editors, and the arguments that every command has."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dino_vit.config import yaml
from dino_vit.config.loading import load
from dino_vit.config.settings import C, SettingInfo, Settings, section_of, settings_of, values

_COLUMN = 34
_LONGEST = 64  # a default in a help text; `dino-vit config` prints them whole


def to_yaml(config: Settings, comments: bool = True) -> str:
    """Return every setting as YAML that loads back to an equal config, each with its meaning."""
    shown, lines, section = values(config), [], ""
    for key, one in settings_of(type(config)).items():
        if key not in shown:
            continue
        prefix, _, name = key.rpartition(".")
        if prefix and prefix != section:
            lines += [*_heading(type(config), prefix, comments), f"{prefix}:"]
        elif section and not prefix and comments:
            lines.append("")
        section = prefix
        lines.append(_line(f"{'  ' if prefix else ''}{name}: {yaml.write(shown[key])}", one, comments))
    return "\n".join(lines) + "\n"


def _heading(cls: type[Settings], section: str, comments: bool) -> list[str]:
    inner = section_of(cls.model_fields[section].annotation)
    return ["", f"# {inner.__doc__}"] if comments and inner and inner.__doc__ else []


def _line(text: str, one: SettingInfo, comments: bool) -> str:
    return f"{text:<{_COLUMN - 2}}  # {_meaning(one)}" if comments else text


def _meaning(one: SettingInfo) -> str:
    return f"{one.doc} [{'|'.join(one.choices)}]" if one.choices else one.doc


def json_schema(cls: type[Settings]) -> dict[str, Any]:
    """Return the JSON schema with which an editor completes and checks a YAML file of `cls`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **cls.model_json_schema()}


def add_config_arguments(parser: argparse.ArgumentParser, cls: type[Settings]) -> None:
    """Give `parser` the two ways to set things, and a help that lists every setting."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of differences from the defaults"
    )
    for flag, name in cls.switches.items():
        parser.add_argument(f"--{flag}", dest=name, action="store_true", help=settings_of(cls)[name].doc)
    words = "".join(f"{name.upper()} " for name in cls.positional)
    parser.add_argument(
        "settings", nargs="*", metavar=f"{words}key=value", help="one setting each; they win over the file"
    )
    lines = [f"  {_shown(one):<{_COLUMN}}  {_meaning(one)}" for one in settings_of(cls).values()]
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "settings and their defaults:\n" + "\n".join(lines).replace("%", "%%")


def _shown(one: SettingInfo) -> str:
    default = "..." if one.required else yaml.write(one.default)
    return f"{one.key}={default if len(default) <= _LONGEST else f'{default[: _LONGEST - 4]} ...'}"


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse with `key=value` allowed between and after the options too, which argparse alone refuses."""
    args, rest = parser.parse_known_args(argv)
    options = [text for text in rest if text.startswith("-")]
    if options or (rest and not hasattr(args, "settings")):
        hint = f"; settings are written without dashes: {options[0].lstrip('-')}" if options else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    if rest:
        args.settings = [*args.settings, *rest]
    return args


def config_from(args: argparse.Namespace, cls: type[C]) -> C:
    """Return the config that the parsed arguments ask for."""
    words = [text for text in args.settings if _is_word(cls, text)]
    named = [text for text in args.settings if not _is_word(cls, text)]
    raised = [f"{name}=true" for name in cls.switches.values() if getattr(args, name)]
    return load(cls, args.config, [*_name(cls, words), *raised, *named])


def _is_word(cls: type[Settings], text: str) -> bool:
    key, equals, _ = text.partition("=")
    return not equals or (bool(cls.positional) and "/" in key)  # a path with an = in it


def _name(cls: type[Settings], words: Sequence[str]) -> list[str]:
    """Give words the names that they stand for, as far as there are any."""
    named = []
    for name in cls.positional:
        if not words:
            break
        one = settings_of(cls)[name]
        taken, words = (words[:1], words[1:]) if one.takes_text else (words, [])
        named.append(f"{name}={taken[0] if one.takes_text else yaml.write(taken)}")
    return [*named, *words]
