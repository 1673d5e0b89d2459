"""What `dino_vit.models.layers` picks beside PyTorch's own linear layer: rows a second.

    python -m benchmarks.linear --repeats 20

The four projections of a ViT-S block and the head's prototypes, on the rows of a few images.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import Row, Table, Work, arguments, compare, report
from dino_vit.models.layers import linear

SHAPES = ((384, 1152), (384, 384), (384, 1536), (1536, 384), (256, 16384))  # inputs, outputs
ROWS = (32, 800)


def build_work(function: Callable[..., Tensor], shape: tuple[int, int], rows: int, train: bool) -> Work:
    """Return one product, with its three gradients in training."""
    sizes = ((rows, shape[0]), (shape[1], shape[0]), (shape[1],))
    x, weight, bias = (torch.randn(size, requires_grad=train) for size in sizes)
    grad = torch.randn(rows, shape[1])

    def backward() -> None:
        torch.autograd.grad(function(x, weight, bias), (x, weight, bias), grad)

    return backward if train else lambda: function(x, weight, bias)


def measure(shape: tuple[int, int], rows: int, train: bool, repeats: int) -> Row:
    """Measure one row."""
    contenders = {"dino_vit": linear, "torch": F.linear}
    works = {name: build_work(function, shape, rows, train) for name, function in contenders.items()}
    mode = "forward + backward" if train else "forward"
    return compare(f"{mode}, {rows} × {shape[0]} → {shape[1]}", works, items=rows, repeats=repeats)


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure every row in float32 on the CPU; everywhere else both are the same."""
    torch.set_num_threads(threads)
    rows = [measure(*row, repeats) for row in product(SHAPES, ROWS, (False, True))]
    return [Table(f"Linear layer, float32, CPU, threads: {threads}", "rows a second", rows)]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)
