"""What `dino_vit.models.block.attend` picks, beside each kernel it could pick: sequences a second.

    python -m benchmarks.attention --repeats 20

Six heads of 64 channels as in ViT-S, from the fused projection's output to what enters the next projection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from benchmarks.measure import Row, Table, Work, arguments, compare, here, report
from dino_vit.models.block import attend

ON_CUDA = "the same rows"
HEADS, CHANNELS = 6, 64
TOKENS = (10, 17, 37, 65, 101, 145, 197, 257, 401, 785)
CALLS = 50  # in a row on CUDA, where one is over sooner than it is begun
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend by PyTorch's kernel."""
    return F.scaled_dot_product_attention(q, k, v)


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend as it is written."""
    return (q @ k.transpose(-2, -1) * CHANNELS**-0.5).softmax(dim=-1) @ v


KERNELS: dict[str, Kernel] = {
    "attend": partial(attend, scale=CHANNELS**-0.5),
    "fused": fused,
    "explicit": explicit,
}


def build_work(kernel: Kernel, qkv: Tensor, train: bool) -> Work:
    """Return one pass through the kernel, with its backward in training."""
    grad = torch.randn_like(qkv[..., : HEADS * CHANNELS])

    def forward() -> Tensor:
        parts = rearrange(qkv, "b n (three h d) -> b n three h d", three=3, h=HEADS).unbind(2)
        q, k, v = (rearrange(part, "b n h d -> b h n d") for part in parts)
        return rearrange(kernel(q, k, v), "b h n d -> b n (h d)")

    def backward() -> None:
        qkv.grad = None
        torch.autograd.backward(forward(), grad)

    return backward if train else torch.no_grad()(forward)


def measure(where: str, dtype: torch.dtype, train: bool, tokens: int, repeats: int) -> Row:
    """Measure one row, on a batch of about a thousand tokens on a CPU and of a hundred thousand elsewhere."""
    batch = max(1, (1_000 if where == "cpu" else 100_000) // tokens)
    shape = (batch, tokens, 3 * HEADS * CHANNELS)
    qkv = torch.randn(shape, device=where, dtype=dtype, requires_grad=train)
    works = {name: build_work(kernel, qkv, train) for name, kernel in KERNELS.items()}
    mode = "forward + backward" if train else "forward"
    name = f"{mode}, {str(dtype).removeprefix('torch.')}, {tokens} tokens"
    return compare(name, works, items=batch, repeats=repeats, device=where, queued=CALLS)


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure every row."""
    torch.set_num_threads(threads)
    where = here().type
    cases = product((torch.float32, torch.bfloat16), (False, True), TOKENS)
    rows = [measure(where, *case, repeats) for case in cases]
    title = "Attention, CUDA" if where == "cuda" else f"Attention, CPU, threads: {threads}"
    return [Table(title, "sequences a second", rows)]


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0]).parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)
