"""The console command `dino-vit`: one table of commands, each of which imports only what it needs."""

import argparse
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pkgutil import resolve_name
from typing import NamedTuple

import dino_vit
from dino_vit.commands import Result
from dino_vit.config import arguments, display
from dino_vit.config.settings import Settings
from dino_vit.core.native import separate_stderr, set_torch_environment
from dino_vit.core.signals import REQUEUE, Interruption
from dino_vit.core.text import PrintableFormatter, printable_lines


class Command(NamedTuple):
    """A command: its line in `dino-vit --help`, its settings and the function that takes them."""

    help: str
    config: str  # module:class
    run: str = ""  # module:function; the function `run` in the module of the settings if empty
    examples: tuple[str, ...] = ()
    resumes: bool = False  # whether the same command, given again, goes on with what a signal stopped


COMMANDS = {
    "demo": Command(
        "see a transformer learn without labels, in minutes", "commands.demo:DemoConfig", resumes=True
    ),
    "inspect-data": Command("show what is in a source of images", "commands.inspect_data:InspectConfig"),
    "pack": Command("write a source of images as tar shards", "commands.pack:PackConfig"),
    "pretrain": Command(
        "train a vision transformer on images without labels",
        "config.pretrain:PretrainConfig",
        "training.loop:pretrain",
        ("pretrain data.source=photos", "pretrain --config configs/pretrain/vits16.yaml data.source=photos"),
        resumes=True,
    ),
    "report": Command(
        "write an HTML page about a run, or serve it while the run goes on",
        "commands.report:ReportConfig",
        examples=("report runs/pretrain", "report runs/pretrain --serve"),
    ),
    "knn": Command(
        "classify images by their nearest neighbours",
        "commands.classification.knn:KnnConfig",
        examples=("knn photos weights=runs/demo", "knn val train=train weights=runs/demo"),
    ),
    "linear": Command(
        "train linear classifiers on a frozen backbone",
        "commands.classification.linear:LinearConfig",
        examples=(
            "linear photos/val train=photos/train weights=runs/pretrain",
            "linear photos weights=runs/pretrain method=logistic",
        ),
    ),
    "finetune": Command(
        "train a backbone and a classifier on labelled images",
        "commands.classification.finetune:FinetuneConfig",
        examples=(
            "finetune photos/val train=photos/train weights=runs/pretrain",
            "finetune photos arch=vit_small",
        ),
        resumes=True,
    ),
    "dense": Command(
        "classify the pixels of images that have masks",
        "commands.maps.dense:DenseConfig",
        examples=("dense synthetic:scenes:1000 weights=runs/pretrain",),
    ),
    "compare": Command(
        "measure several weights on the same images, and say which is best",
        "commands.compare:CompareConfig",
        examples=(
            "compare photos 'weights=[runs/a, runs/b]'",
            "compare photos weights=runs/a untrained=true",
        ),
    ),
    "attention": Command(
        "draw the attention of the CLS token to the patches", "commands.maps.attention:AttentionConfig"
    ),
    "propagate": Command(
        "follow the objects of a video's first frame through the others",
        "commands.maps.propagate:PropagateConfig",
        examples=("propagate clip.mp4 mask=first.png weights=runs/pretrain",),
    ),
    "embed": Command(
        "write the embeddings of images to a file",
        "commands.embeddings.embed:EmbedConfig",
        examples=("embed photos weights=runs/pretrain output=photos.parquet",),
    ),
    "search": Command(
        "find the embedded images nearest to given ones",
        "commands.embeddings.search:SearchConfig",
        examples=("search photos.parquet cat.jpg dog.jpg output=found.png",),
    ),
    "duplicates": Command(
        "list embedded images that are nearly the same",
        "commands.embeddings.duplicates:DuplicatesConfig",
        examples=("duplicates photos.parquet threshold=0.97 output=duplicates.csv",),
    ),
    "copies": Command(
        "find the originals of copies, and which change of a photo hides it",
        "commands.embeddings.copies:CopiesConfig",
        examples=(
            "copies photos weights=runs/pretrain",
            "copies originals=photos queries=copies distractors=others weights=runs/pretrain",
        ),
    ),
    "retrieval": Command(
        "judge how early images of the same class are found",
        "commands.embeddings.retrieval:RetrievalConfig",
        examples=(
            "retrieval photos weights=runs/pretrain",
            "retrieval photos queries=others weights=runs/pretrain tokens=gem whitening=photos",
        ),
    ),
    "inspect-weights": Command(
        "show what is in a weights file or run folder",
        "commands.weights:InspectWeightsConfig",
        "commands.weights:inspect",
        ("inspect-weights runs/pretrain",),
    ),
    "export": Command(
        "write a backbone for timm, torchvision, Hugging Face or the DINO repository",
        "commands.weights:ExportConfig",
        "commands.weights:export",
        ("export runs/pretrain vits16.pth --format timm",),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake is a message on stderr and exit code 2, not a traceback."""
    set_torch_environment()
    argv = sys.argv[1:] if argv is None else argv
    args = arguments.parse_arguments(build_parser(argv), argv)
    _log_to_stderr()
    try:
        if args.command == "config":
            return _print_config(args)
        config = arguments.config_from(args, config_class(args.command))
        # The function is imported after the config is validated: its imports may take seconds.
        interruptible = Interruption() if COMMANDS[args.command].resumes else nullcontext()
        with interruptible:
            result = run_function(args.command)(config)
        if result is not None and is_rank_0():
            print(printable_lines(str(result)))
    except BrokenPipeError:  # such as when `head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _leave(128 + 13)
    except Exception as error:
        return _fail(error, args)
    except SystemExit as stop:  # by a signal, or without a loader process
        _say(f"dino-vit {args.command}: stopped; run the same command again")
        return _leave(int(stop.code or 0))
    except KeyboardInterrupt:
        _say(f"dino-vit {args.command}: interrupted")
        return _leave(130)
    return 0


def _fail(error: Exception, args: argparse.Namespace) -> int:
    """Say what went wrong, or where if nobody foresaw it, and return the exit code."""
    distributed = sys.modules.get("dino_vit.core.distributed")
    lost = bool(distributed and distributed.lost_process(error))
    full = isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and re.search("allocate memory|out of memory", str(error)) is not None
    )
    foreseen = isinstance(error, ValueError | OSError) or hasattr(error, "exit_code")
    if args.traceback or not (lost or full or foreseen):
        traceback.print_exception(error)
        return _leave(1)
    text, code = str(error), getattr(error, "exit_code", 2)
    if lost and distributed and distributed.unanswered(error):
        text, code = "another process of this run does not answer: it was stopped, or its machine", REQUEUE
        text += ", a disk or the network failed; run the same command again (see run.peer_timeout)"
    elif lost:
        text, code = "another process of this run has ended; see its error message", 1
    if full:
        first = text.partition("\n")[0]
        text = f"out of memory: use a smaller batch, smaller images or a smaller network. {first}"
    print(printable_lines(f"dino-vit {args.command}: {text}"), file=sys.stderr)
    return _leave(code)


def is_rank_0() -> bool:
    """Tell whether this process prints, also after the process group has ended."""
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if is_rank_0():
        print(text, file=sys.stderr)


def _leave(code: int) -> int:
    """Return the exit code, or in a launch of several processes end this one at once.

    The others may wait for it in a collective, and it for them when it exits: the launcher ends them.
    """
    distributed = sys.modules.get("dino_vit.core.distributed")
    if distributed and distributed.world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _log_to_stderr() -> None:
    separate_stderr()
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it logs which of its builds it loads


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the arguments of those that are in `argv`."""
    parser = argparse.ArgumentParser(prog="dino-vit", description=dino_vit.__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {dino_vit.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error occurred")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.help)
        if name in argv:  # its settings may be declared next to code that imports torch
            cls = config_class(name)
            one.description = "\n  dino-vit ".join([f"{cls.__doc__}\n", *command.examples])
            arguments.add_config_arguments(one, cls)
    one = commands.add_parser("config", help="print the settings of a command as YAML or as a JSON schema")
    one.description = "Print every setting of a command with its meaning, as YAML that loads again."
    one.add_argument("of", choices=COMMANDS, metavar="COMMAND", help="the command")
    one.add_argument("--schema", action="store_true", help="print a JSON schema, for editors, instead")
    arguments.add_config_arguments(one, Settings)
    return parser


def config_class(name: str) -> type[Settings]:
    """Return the settings of a command."""
    cls: type[Settings] = resolve_name(f"dino_vit.{COMMANDS[name].config}")
    return cls


def run_function(name: str) -> Callable[[Settings], Result | None]:
    """Return the function of a command."""
    command = COMMANDS[name]
    path = command.run or f"{command.config.partition(':')[0]}:run"
    run: Callable[[Settings], Result | None] = resolve_name(f"dino_vit.{path}")
    return run


def _print_config(args: argparse.Namespace) -> int:
    cls = config_class(args.of)
    if args.schema:
        print(json.dumps(display.json_schema(cls), indent=2))
    else:
        print(display.to_yaml(arguments.config_from(args, cls)), end="")
    return 0
