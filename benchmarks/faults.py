"""Two machines, one of which fails: what each side says, how long it takes, and what a new start gives.

    python -m benchmarks faults

The machines are two network namespaces of this one (root on Linux, `ip` of iproute2) with an address and a
launcher each; they share the disk. A run over both is hurt in the middle, ends, and is started again by the
same command, or by torchrun itself. In the end its readings and all tensors of its last checkpoint must be
those of a run that nothing happened to, bit for bit. A wall clock of its own comes from a
small library in C, for which `cc` is needed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torchvision.io import write_png

from benchmarks.machines import VARIABLES, Machine, accelerate, restarting, torchrun, two_machines
from benchmarks.measure import Row, Table, arguments, report
from benchmarks.soak import ROOT, compared
from dino_vit.data.sources.synthetic import make_textures
from dino_vit.reports.metrics import METRICS, MetricsRecord, read_records

LIMIT = 12.0  # seconds of run.peer_timeout
STEPS, EVERY, HURT = 240, 40, 100  # of a run, between checkpoints, and when something happens
DAY = 86_400
PATIENCE = 120.0  # seconds until a run that neither goes on nor ends is a failure
IMAGES = 64
SETTINGS = (
    *("data.batch_size=8", "data.workers=1", "data.augment_on=device", "views.global_size=32"),
    *("views.local_size=16", "views.local_count=2", "model.arch=null", "model.width=192", "model.depth=2"),
    *("model.heads=3", "model.patch_size=8", "head.prototypes=256", "head.hidden_dim=64"),
    *(
        "optim.lr=0.005",
        "optim.warmup_epochs=1",
        "budget.epochs=null",
        f"budget.steps={STEPS}",
        "run.precision=no",
    ),
    *("run.log_every=1", "run.eval_every=null", f"run.checkpoint_every={EVERY}", "run.trackers=[]"),
    f"run.peer_timeout={LIMIT / 60}",
)
Launcher = Callable[[int], list[str]]


@dataclass
class Trial:
    """A run over two machines, to which something happens."""

    machines: list[Machine]
    folder: Path
    images: Path
    launcher: Launcher

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def start(self) -> None:
        """Start both sides by the same command, or go on."""
        self.folder.mkdir(exist_ok=True)
        settings = [*SETTINGS, f"data.source={self.images}", f"output={self.output}"]
        for machine in self.machines:
            command = [*self.launcher(machine.number), str(ROOT / "launch" / "pretrain.py"), *settings]
            machine.start(command, self.folder / f"{machine.number}.log")

    @property
    def step(self) -> int:
        """Return the step that was reported last."""
        return max(
            (reading.step for reading in read_records(self.output / "metrics.jsonl", METRICS)), default=0
        )

    def passed(self, step: int) -> bool:
        """Tell whether it has gone on from a step."""
        return self.step > step + 1

    def wait(self, condition: Callable[[], bool]) -> float:
        """Return the seconds until something is so."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > PATIENCE:
                said = "\n".join(machine.log.read_text()[-3000:] for machine in self.machines)
                raise RuntimeError(f"{self.folder.name}: waited for {PATIENCE:.0f} s\n{said}")
            time.sleep(0.05)
        return time.monotonic() - began

    def hurt(self, fault: Callable[[], object]) -> None:
        """Start the run, and let something happen to it in the middle."""
        self.start()
        self.wait(lambda: self.step >= HURT or any(self.ended(machine) for machine in self.machines))
        fault()

    @staticmethod
    def ended(machine: Machine) -> bool:
        return machine.process.poll() is not None

    def ends(self, order: Sequence[Machine], revive: Callable[[], object]) -> dict[str, float]:
        """Return the seconds until each side has ended; revive what was stopped after the other's end."""
        seconds, began = {}, time.monotonic()
        first, second = order
        self.wait(lambda: self.ended(first))
        seconds[first.number] = time.monotonic() - began
        if not self.ended(second):
            began = began if revive is nothing else time.monotonic()
            revive()
        self.wait(lambda: self.ended(second))
        seconds[second.number] = time.monotonic() - began
        return {f"machine {number}": seconds[number] for number in sorted(seconds)}

    def finish(self, whole: Path) -> str:
        """Wait for the end of the run; return whether it is that of a run that nothing happened to."""
        self.wait(lambda: all(map(self.ended, self.machines)))
        if any(machine.process.returncode for machine in self.machines):
            raise RuntimeError(f"{self.folder.name}: {[machine.sentence for machine in self.machines]}")
        if readings(self.output) != readings(whole):
            return "Its readings DIFFER."
        return f"{compared(self.output, whole)}."


def readings(output: Path) -> list[MetricsRecord]:
    """Return the readings of a run, without what depends on the clock."""
    found = read_records(output / "metrics.jsonl", METRICS)
    return [replace(reading, images_per_second=0.0, data_wait=0.0) for reading in found]


def nothing() -> None:
    """Leave all as it is."""


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=0)
    options = parser.parse_args()
    options.repeats = 0  # each is done once
    with TemporaryDirectory() as folder:
        try:
            with two_machines() as machines:
                tables = all_trials(machines, Path(folder))
        except OSError as error:
            sys.exit(f"two machines cannot be made here, which takes root on Linux and iproute2: {error}")
    report(tables, options)


def all_trials(machines: list[Machine], folder: Path) -> list[Table]:
    """Run a whole run, then those to which something happens."""
    images = folder / "images"
    images.mkdir()
    for index in range(IMAGES):
        write_png(make_textures(length=IMAGES).read(index), str(images / f"{index:03d}.png"))
    whole = Trial(machines, folder / "whole", images, torchrun)
    whole.start()
    whole.finish(whole.output)
    tried = Trials(machines, folder, images, whole.output)
    return [tried.restarting(), tried.jumping(), tried.ending()]


@dataclass
class Trials:
    """What is done to runs, and compared with a whole one."""

    machines: list[Machine]
    folder: Path
    images: Path
    whole: Path

    def trial(self, name: str, launcher: Launcher) -> Trial:
        print(f"{name}, {launcher.__name__}", file=sys.stderr, flush=True)
        return Trial(self.machines, self.folder / f"{name}, {launcher.__name__}", self.images, launcher)

    def ending(self) -> Table:
        """Let happen what ends both sides, and start the same command again."""
        first, second = self.machines
        cut, stop, go_on = second.cut, signal.SIGSTOP, signal.SIGCONT
        rows, notes = [], []
        for name, launcher, fault, order, revive in (
            ("link cut", accelerate, cut, (first, second), nothing),
            ("link cut", torchrun, cut, (first, second), nothing),
            ("0 stopped", accelerate, lambda: first.send(stop), (second, first), lambda: first.send(go_on)),
            ("1 stopped", torchrun, lambda: second.send(stop), (first, second), lambda: second.send(go_on)),
            ("1 loses the images", torchrun, self.lose_images, (first, second), nothing),
            ("0 cannot write", torchrun, self.lose_output, (first, second), nothing),
        ):
            trial = self.trial(name, launcher)
            trial.hurt(fault)
            seconds = trial.ends(order, revive)
            rows.append(Row(f"{name}, {launcher.__name__}", seconds, max(seconds.values()) / LIMIT))
            said = [f"{m.name[-1]} ended with {m.process.returncode}: “{m.sentence}”" for m in self.machines]
            second.cut("up")
            trial.start()
            told = "; ".join(said).replace(f"{trial.folder}/", "")
            notes.append(f"{rows[-1].name}: {told}. {trial.finish(self.whole)}")
        title = f"Seconds until both sides had ended, run.peer_timeout of {LIMIT:.0f} s"
        note = "A machine that was stopped goes on when the other has ended; its seconds count from there. "
        note += "The last row counts to the end of the run, which goes on. Then both were started again. "
        return Table(title, "seconds", rows, note + " ".join(notes), ratio="longest / limit")

    def lose_images(self) -> None:
        self.machines[1].mount("-t", "tmpfs", "none", str(self.images))

    def lose_output(self) -> None:
        output = str(self.folder / "0 cannot write, torchrun" / "run")
        self.machines[0].mount("--bind", output, output)
        self.machines[0].mount("-o", "remount,bind,ro", output)

    def restarting(self) -> Table:
        """Let happen what `torchrun --max-restarts` gets over, on both machines."""
        first, second = self.machines
        rows, notes = [], []
        for name, fault in (
            ("process of 0 killed", first.kill_process),
            ("process of 1 killed", second.kill_process),
            (f"link cut for {2 * LIMIT:.0f} s", self.cut_for_a_while),
        ):
            trial = self.trial(name, restarting)
            trial.hurt(fault)
            seconds = trial.wait(partial(trial.passed, trial.step))
            rows.append(Row(name, {"seconds": seconds}, seconds / LIMIT))
            notes.append(f"{name}: {trial.finish(self.whole)}")
        title = "Seconds until it is beyond where it was hurt, torchrun --rdzv-backend c10d --max-restarts 3"
        return Table(title, "seconds", rows, " ".join(notes), ratio="seconds / limit")

    def jumping(self) -> Table:
        """Let the wall clock of one machine jump by a day."""
        first, second = self.machines
        rows, notes = [], []
        for machine in self.machines:
            machine.give_clock(self.folder)
        for name, launcher, fault in (
            ("1 a day ahead", accelerate, lambda: second.jump(DAY)),
            ("0 a day behind", torchrun, lambda: first.jump(-DAY)),
            ("1 a day ahead", restarting, lambda: second.jump(DAY)),
            ("0 a day behind", restarting, lambda: first.jump(-DAY)),
        ):
            for machine in self.machines:
                machine.jump(0)
            trial = self.trial(name, launcher)
            trial.hurt(fault)
            if not all(machine.has_clock for machine in self.machines):
                raise RuntimeError("the library that moves the clock was not loaded")
            seconds = trial.wait(partial(trial.passed, trial.step))
            rows.append(Row(f"{name}, {launcher.__name__}", {"seconds": seconds}, seconds / LIMIT))
            notes.append(f"{rows[-1].name}: {trial.finish(self.whole)}")
        for machine in self.machines:
            machine.variables = dict(VARIABLES)
        title = "Seconds until it goes on after the wall clock of one machine has jumped"
        return Table(title, "seconds", rows, " ".join(notes), ratio="seconds / limit")

    def cut_for_a_while(self) -> None:
        self.machines[1].cut()
        time.sleep(2 * LIMIT)
        self.machines[1].cut("up")


if __name__ == "__main__":
    main()
