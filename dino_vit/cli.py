"""The console command `dino-vit`: one subcommand a job, each importing only what it needs."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dino_vit import __version__
from dino_vit.jobs import JOBS

if TYPE_CHECKING:
    from dino_vit.config.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is a sentence on stderr and exit code 2, not a traceback."""
    from dino_vit.config.display import parse_arguments

    argv = sys.argv[1:] if argv is None else argv
    args = parse_arguments(build_parser(argv), argv)
    # Both are read once, by torch. Threads that spin while they wait slow a busy CPU down several times;
    # large tensors on small pages (Linux) cost a step on a CPU a tenth of its time in page faults.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it tells which of its builds it loads
    try:
        code: int = args.run(args)
    except BrokenPipeError:  # whoever read our output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        print(f"dino-vit {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dino-vit {args.command}: interrupted", file=sys.stderr)
        return 130
    return code


def build_parser(asked: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands, with all details of those that are asked for."""
    parser = argparse.ArgumentParser(
        prog="dino-vit", description="Self-supervised pretraining of vision transformers with DINO."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in JOBS:
        _add_job(commands, name, asked)
    _add_config(commands)
    _add_inspect_weights(commands)
    _add_export(commands)
    return parser


Commands = argparse._SubParsersAction  # the type that add_subparsers returns has no public name


def _config_class(name: str) -> type[Settings]:
    module, _, cls = JOBS[name].config.partition(":")
    found: type[Settings] = getattr(import_module(module), cls)
    return found


def _add_job(commands: Commands[argparse.ArgumentParser], name: str, asked: Sequence[str]) -> None:
    from dino_vit.config.display import add_config_arguments

    job = JOBS[name]
    parser = commands.add_parser(name, help=job.help, description=job.description)
    if name in asked:  # its settings may stand beside code that imports torch
        add_config_arguments(parser, _config_class(name))
    parser.set_defaults(run=_run_job)


def _run_job(args: argparse.Namespace) -> int:
    from dino_vit.config.display import config_from

    job = JOBS[args.command]
    config = config_from(args, _config_class(args.command))
    # The function after the config is known to be good: what it needs may take seconds to import.
    code: int = getattr(import_module(job.module), job.run)(config)
    return code


def _add_config(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "config",
        help="print the settings of a command",
        description="Print the settings of a command with their meaning, as YAML that loads again.",
    )
    parser.add_argument("of", choices=JOBS, metavar="COMMAND", help=f"one of {', '.join(JOBS)}")
    parser.add_argument("--schema", action="store_true", help="print a JSON schema, for editors, instead")
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of differences")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="one setting each")
    parser.set_defaults(run=_config)


def _add_inspect_weights(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect-weights",
        help="say what a weights file holds",
        description="Say what a weights file, a run folder or a hub folder holds: whose format, which "
        "architecture, how the images were normalised, which network at which step.",
    )
    _add_source(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_inspect_weights)


def _add_export(commands: Commands[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="write a backbone for timm, torchvision, Hugging Face or DINO's code",
        description="Write a backbone as another library stores its own, and check that its features agree.",
    )
    _add_source(parser)
    parser.add_argument(
        "out", help="the file (.pth, .pt, .safetensors) or, for huggingface, the folder to write"
    )
    parser.add_argument(
        "--format",
        required=True,
        choices=("reference", "timm", "torchvision", "huggingface"),
        help="whose layout to write",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what stands at OUT")
    parser.set_defaults(run=_export)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="weights file (.pth, .pt, .safetensors), run folder or hub folder")
    parser.add_argument(
        "--network", default="teacher", choices=("teacher", "student"), help="of a checkpoint"
    )
    parser.add_argument(
        "--source-format",
        metavar="FORMAT",
        help="whose format the source is in, where files look alike: reference, timm, dino-vit, ...",
    )
    parser.add_argument("--heads", type=int, help="attention heads, for a width that does not imply them")
    parser.add_argument(
        "--image-size",
        type=int,
        nargs="+",
        metavar="PIXELS",
        help="resample the positions to this size, or height and width",
    )


def _load(args: argparse.Namespace):  # type: ignore[no-untyped-def]  # its type would import torch
    from dino_vit.weights import load_backbone

    overrides = {}
    if args.heads:
        overrides["heads"] = args.heads
    if args.image_size:
        if len(args.image_size) > 2:
            raise ValueError(f"--image-size takes one number or height and width, not {args.image_size}")
        overrides["image_size"] = (args.image_size[0], args.image_size[-1])
    return load_backbone(args.source, network=args.network, format=args.source_format, **overrides)


def _config(args: argparse.Namespace) -> int:
    import json

    from dino_vit.config.display import json_schema, to_yaml
    from dino_vit.config.loading import load

    cls = _config_class(args.of)
    if args.schema:
        print(json.dumps(json_schema(cls), indent=2))
    else:
        print(to_yaml(load(cls, args.config, args.settings)), end="")
    return 0


def _inspect_weights(args: argparse.Namespace) -> int:
    from dino_vit.weights.description import describe, format_description

    description = describe(_load(args))
    print(format_description(description, as_json=args.json))
    return 0


def _export(args: argparse.Namespace) -> int:
    from dino_vit.weights import export_backbone

    export_backbone(_load(args), args.out, args.format, overwrite=args.overwrite)
    return 0
