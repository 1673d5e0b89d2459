"""What compiling adds to a training step: images a second as it is, and with the networks compiled.

    python -m benchmarks.compiled --repeats 5

The step of `benchmarks/step.py` in bf16. The first line is `run.compile=true`; the second, on CUDA, has the
compiled networks recorded as CUDA graphs besides, which `run.compile` leaves out. The minutes of compiling,
and the recording, are over before a round begins.
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import product

import torch
import torch._dynamo
from torch._dynamo.utils import counters

from benchmarks.measure import Row, Table, arguments, compare, here, report, where
from benchmarks.step import Case, Ours, usual_cases

ON_CUDA = "ViT-S/16 and ViT-B/16 with 64 images, compiled, and with CUDA graphs"
COMPILED = {"run.compile": True}


class Graphs(Ours):
    """A step whose networks are compiled to be recorded and replayed, where there is CUDA."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        for network in (self.state.student, self.state.teacher):
            network.compile(dynamic=False, mode="reduce-overhead")

    def __call__(self) -> None:
        # What the step before returned may be written over.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        super().__call__()


def measure(case: Case, repeats: int, *, graphs: bool) -> Row:
    """Measure one row."""
    how = "torch.compile, CUDA graphs" if graphs else "torch.compile"
    print(f"{how}, {case.name} ...", file=sys.stderr, flush=True)
    compiled = Graphs(case) if graphs else Ours(dataclasses.replace(case, changes=case.changes | COMPILED))
    for _ in range(3):  # compiled, recorded, replayed
        compiled()
    device = compiled.state.device.type
    works = {"compiled": compiled, "as it is": Ours(case)}
    return compare(f"{how}, {case.name}", works, items=case.batch, repeats=repeats, device=device)


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure every row."""
    torch.set_num_threads(threads)
    cuda = here().type == "cuda"
    ways = (False, True) if cuda else (False,)
    rows, left_out = [], 0
    for case, graphs in product(usual_cases(here().type), ways):
        torch._dynamo.reset()  # what it keeps of the row before counts to its limit
        counters.clear()
        rows.append(measure(case, repeats, graphs=graphs))
        left_out += counters["inductor"]["cudagraph_skips"]
    note = f"CUDA graphs were left out for {left_out} parts of the networks." if cuda else ""
    return [Table(f"Training step, compiled, {where(threads)}", "images a second", rows, note)]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)
