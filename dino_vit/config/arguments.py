"""The arguments of a command: added to a parser with a help text, parsed, and turned into settings."""

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path

from dino_vit.config.loading import COLUMN, load, write_yaml
from dino_vit.config.settings import C, Settings, settings_of
from dino_vit.core.text import brief


def add_config_arguments(parser: argparse.ArgumentParser, cls: type[Settings]) -> None:
    """Add the arguments that change settings, and a help that lists every setting."""
    infos = settings_of(cls)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of differences from defaults")
    for name in cls.options:
        info = infos[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            nargs="+" if info.takes_list else None,
            metavar=f"{{{','.join(info.choices)}}}" if info.choices else name.upper(),
            help=info.doc + (f" (default: {info.default})" if info.default and not info.required else ""),
        )
    for switch, name in cls.switches.items():
        parser.add_argument(f"--{switch}", dest=name, action="store_true", help=infos[name].doc)
    names = "".join(f"{key.rpartition('.')[2].upper()} " for key in cls.positional)
    help = "settings; they override those in the file"
    parser.add_argument("settings", nargs="*", metavar=f"{names}key=value", help=help)
    if lines := list_settings(cls, leave_out={*cls.options, *cls.switches.values()}):
        parser.epilog = f"settings and their defaults:\n{lines}".replace("%", "%%")


def list_settings(cls: type[Settings], leave_out: Collection[str] = ()) -> str:
    """Return a line for each setting: its name, default and meaning."""
    lines = []
    for key, info in settings_of(cls).items():
        if key not in leave_out:
            default = "..." if info.required else brief(write_yaml(info.default))
            lines.append(f"  {f'{key}={default}':<{COLUMN}}  {info.meaning}")
    return "\n".join(lines)


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
    unset, named = list(cls.positional), []
    positional: list[str] = []
    listed: list[str] = []
    for name in cls.switches.values():
        named += [f"{name}=true"] if getattr(args, name, False) else []
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
        elif settings_of(cls)[unset[0]].is_list:
            listed.append(text)
        else:
            positional.append(f"{unset.pop(0)}={text}")
    if listed:
        positional.append(f"{unset[0]}={write_yaml(listed)}")
    return load(cls, args.config, [*positional, *named])
