"""The arguments of a command: added to a parser with a help text, parsed, and turned into settings."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dino_vit.config import yaml
from dino_vit.config.display import COLUMN, meaning
from dino_vit.config.loading import load
from dino_vit.config.settings import C, SettingInfo, Settings, settings_of
from dino_vit.core.text import brief


def add_config_arguments(parser: argparse.ArgumentParser, cls: type[Settings]) -> None:
    """Add the arguments that change settings, and a help that lists every setting."""
    known = dict(settings_of(cls))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of differences from defaults")
    for name in cls.options:
        info = known.pop(name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            nargs="+" if info.takes_list else None,
            metavar=f"{{{','.join(info.choices)}}}" if info.choices else name.upper(),
            help=info.doc + (f" (default: {info.default})" if info.default and not info.required else ""),
        )
    for switch, name in cls.switches.items():
        parser.add_argument(f"--{switch}", dest=name, action="store_true", help=known.pop(name).doc)
    names = "".join(f"{name.upper()} " for name in cls.positional)
    help = "settings; they override those in the file"
    parser.add_argument("settings", nargs="*", metavar=f"{names}key=value", help=help)
    if known:
        lines = [f"  {_default(info):<{COLUMN}}  {meaning(info)}" for info in known.values()]
        parser.epilog = "\n".join(["settings and their defaults:", *lines]).replace("%", "%%")


def _default(info: SettingInfo) -> str:
    default = "..." if info.required else yaml.write(info.default)
    return f"{info.key}={brief(default)}"


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse with `key=value` allowed between and after the options too, which argparse alone rejects."""
    args, rest = parser.parse_known_args(argv)
    for text in rest:
        if text.startswith("-"):
            name, _, value = text.lstrip("-").partition("=")
            hint = f"settings are written without dashes: {name.replace('-', '_')}={value or '...'}"
            parser.error(f"unrecognized option {text}; {hint}")
    args.settings = [*args.settings, *rest]
    return args


def config_from(args: argparse.Namespace, cls: type[C]) -> C:
    """Return the config for parsed arguments."""
    known, unset = settings_of(cls), list(cls.positional)
    positional: list[str] = []
    listed: list[str] = []
    named = [f"{name}=true" for name in cls.switches.values() if getattr(args, name, False)]
    for name in cls.options:
        given = getattr(args, name, None)
        if isinstance(given, list):
            given = given[0] if len(given) == 1 else f"[{', '.join(given)}]"
        named += [] if given is None else [f"{name}={given}"]
    for text in args.settings:
        key, equals, _ = text.partition("=")
        is_path = bool(unset) and "/" in key  # with an = in it
        if not unset or (equals and not is_path):
            named.append(text)
        elif known[unset[0]].takes_text:
            positional.append(f"{unset.pop(0)}={text}")
        else:
            listed.append(text)
    if listed:
        positional.append(f"{unset[0]}={yaml.write(listed)}")
    return load(cls, args.config, [*positional, *named])
