"""The console command `dino-vit`, whose commands are in `dino_vit.commands.COMMANDS`."""

import argparse
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from difflib import get_close_matches
from typing import Any, NoReturn

import dino_vit
from dino_vit.commands import COMMANDS
from dino_vit.config.loading import add_config_arguments, config_from, load, parse_arguments, to_yaml
from dino_vit.config.settings import Settings, values
from dino_vit.core.process import (
    REQUEUE,
    Interruption,
    drop_output,
    is_foreseen,
    is_rank_0,
    keep_freed_memory,
    open_closed_streams,
)
from dino_vit.core.text import PrintableFormatter, Result, did_you_mean, printable_lines, unfailing

GREETING = """\
Start here, with your own folder of images in place of photos:

  dino-vit demo --quick            # generated images: see in 90 seconds what pretraining does
  dino-vit inspect-data photos     # how many images, of which sizes, and which cannot be read
  dino-vit pretrain photos runs/photos recipe=auto budget.minutes=60
  dino-vit report runs/photos      # one page about the run, also while it runs
  dino-vit label photos runs/photos  # a page to label a few photos by: it saves few.csv
  dino-vit predict photos runs/photos labels=few.csv  # labels for the rest, by a few

`dino-vit --help` lists all commands, `dino-vit COMMAND --help` the settings of one."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are printable."""

    def error(self, message: str) -> NoReturn:
        super().error(printable_lines(message))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command of `dino-vit`."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(f"{dino_vit.__doc__}\n\n{GREETING}")
        return 0
    parser, names = build_parser(argv), (*COMMANDS, "config")
    given = next((text for text in argv if not text.startswith("-")), "")
    if given not in names and (similar := get_close_matches(given, names, n=1)):
        parser.error(f"there is no command {given}; did you mean {similar[0]}?")
    args = parse_arguments(parser, argv)
    with reported(f"dino-vit {args.command}", show_traceback=args.traceback) as ending:
        if args.command == "config":
            config = config_from(args, COMMANDS[args.shown].config_class)
            print(to_yaml(config, given=True).rstrip("\n"), flush=True)
        else:
            command = COMMANDS[args.command]
            config = config_from(args, command.config_class)
            # The function is imported after the config is validated: its imports may take seconds.
            run_command(command.run, config)
    return ending.code


def run_program(cls: type[Settings], run: Callable[[Any], Result]) -> int:
    """Run a program of `eval/`, whose docstring is its help, with the settings on its command line."""
    parser = Parser()
    add_config_arguments(parser, cls)
    parser.description = sys.modules[run.__module__].__doc__
    args = parse_arguments(parser)
    with reported(parser.prog) as ending:
        run_command(run, config_from(args, cls))
    return ending.code


def tune_process() -> None:
    """Set what makes steps on a CPU faster, for a process that is all ours and has not imported torch yet."""
    # Threads that spin while they wait slow a busy CPU down several times.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Linux clears each page that it hands out: use large pages, and let glibc keep those of freed tensors. A
    # step takes a tenth less time, with DINOv2's loss a third. The peak of memory grows by up to 13 %.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    keep_freed_memory()


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the arguments of those that are in `argv`."""
    epilog = "`dino-vit COMMAND --help` lists the settings of a command; `dino-vit` alone, first commands."
    parser = Parser(prog="dino-vit", description=dino_vit.__doc__, epilog=epilog)
    parser.add_argument("--version", action="version", version=f"%(prog)s {dino_vit.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error occurred")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        if name in argv:  # to list the settings of all would take longer
            cls = command.config_class
            subparser.description = "\n  dino-vit ".join([f"{cls.__doc__}\n", *cls.examples])
            add_config_arguments(subparser, cls)
    show = commands.add_parser("config", help="print all settings of a command as YAML, with their meaning")
    show.description = "Print every setting with its meaning, as YAML that loads again; defaults as comments."
    show.add_argument("shown", choices=COMMANDS, metavar="COMMAND", help="the command")
    shown = next((name for name in argv if name in COMMANDS), None) if "config" in argv else None
    add_config_arguments(show, COMMANDS[shown].config_class if shown else Settings)
    return parser


def run_command(run: Callable[[Any], Any], config: Settings) -> None:
    """Run a command; one that can resume stops at a signal with the exit code that asks for a new start."""
    from dino_vit.core.invocation import invoked  # imports torch

    with Interruption() if config.resumes else nullcontext(), invoked(on_console=True):
        result = run(_with_output(config))
        if result is not None and is_rank_0():
            print(printable_lines(str(result)), flush=True)


def _with_output(config: Settings) -> Settings:
    """Return the settings with an output; one in eval/ is named later, after the weights that are loaded."""
    has_none = config.writes and "/" not in config.writes and values(config)["output"] is None
    return load(type(config), config, {"output": config.writes}) if has_none else config


class Ending:
    """How a program ends."""

    code = 0


@contextmanager
def reported(program: str, *, show_traceback: bool = False) -> Iterator[Ending]:
    """Do the work of a process; a user's mistake is a message on stderr and exit code 2, not a traceback."""
    tune_process()
    open_closed_streams()
    ending, stderr = Ending(), sys.stderr
    with redirect_stderr(unfailing(stderr)):
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter())
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        for library in ("faiss", "timm", "matplotlib", "torch"):  # which log what they load
            logging.getLogger(library).setLevel(logging.WARNING)
        try:
            yield ending
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            text, ending.code = _explain(error)
            if text is None or (show_traceback and text and isinstance(error, Exception)):
                text, ending.code = "".join(traceback.format_exception(error)).rstrip("\n"), 1
            elif text:
                text = f"{program}: {text}"
            if text:
                print(printable_lines(text), file=sys.stderr)
    for stream in (sys.stdout, stderr):
        drop_output(stream)
    distributed = sys.modules.get("dino_vit.core.distributed")
    if distributed and distributed.world_size() > 1:
        # The others may wait for this one in a collective, and it for them at its end; the launcher ends all.
        os._exit(ending.code)


def _explain(error: BaseException) -> tuple[str | None, int]:
    """Return what is to be said of an error, None if nobody foresaw it, and the exit code."""
    text = str(error)
    if isinstance(error, BrokenPipeError):  # such as when `head` has read enough
        return "", 128 + 13
    if isinstance(error, SystemExit):  # by a signal
        return "stopped; run the same command again" if is_rank_0() else "", int(error.code or 0)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted" if is_rank_0() else "", 130
    distributed = sys.modules.get("dino_vit.core.distributed")
    if distributed and distributed.unanswered(error):
        return (
            "Timed out waiting for another rank (compute.peer_timeout); run the same command again",
            REQUEUE,
        )
    if distributed and distributed.lost_process(error):
        return "another process of this run has ended; see its error message", 1
    if isinstance(error, RuntimeError) and (
        line := re.search(".*(Bus error|allocate shared memory).*", text)
    ):
        advice = "Give more shared memory (docker run --shm-size=16g) or set data.workers=0"
        return f"{line[0].strip(' .')}. {advice}", 2
    is_full = isinstance(error, RuntimeError) and re.search(".*(allocate memory|out of memory).*", text)
    if is_full or isinstance(error, MemoryError):
        advice = "use a smaller batch, smaller images or a smaller network"
        return f"out of memory: {advice}. {is_full[0] if is_full else text}", 2
    if isinstance(error, RuntimeError) and text.startswith("DataLoader worker"):
        advice = "If memory ran out, use fewer workers or smaller batches. Run the same command again"
        return f"{text.strip(' .')}. {advice}", REQUEUE
    if isinstance(error, OSError) and error.strerror and isinstance(error.filename, str):
        text = f"{error.filename}: {error.strerror}{did_you_mean(error.filename)}"
    return text if text and is_foreseen(error) else None, getattr(error, "exit_code", 2)
