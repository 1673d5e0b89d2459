"""The console command `dino-vit`: one subcommand a job, each importing only what it needs."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from dino_vit import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is a sentence on stderr and exit code 2, not a traceback."""
    parser = build_parser()
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        code: int = args.run(args)
    except (ValueError, OSError) as error:
        if args.traceback:
            raise
        print(f"dino-vit {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dino-vit {args.command}: interrupted", file=sys.stderr)
        return 130
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dino-vit", description="Self-supervised pretraining of vision transformers with DINO."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error arose")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_inspect_weights(commands)
    _add_export(commands)
    return parser


Commands = argparse._SubParsersAction  # the type that add_subparsers returns has no public name


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


def _inspect_weights(args: argparse.Namespace) -> int:
    from dino_vit.weights.description import describe, format_description

    description = describe(_load(args))
    print(format_description(description, as_json=args.json))
    return 0


def _export(args: argparse.Namespace) -> int:
    from dino_vit.weights import export_backbone

    export_backbone(_load(args), args.out, args.format, overwrite=args.overwrite)
    return 0
