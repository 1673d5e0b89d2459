"""What a GPU does by itself: bandwidth, calls of the host, products, attention kernel by kernel."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_record import DEVICE, ON_GPU, Record, cores, milliseconds, seconds, size
from dino_vit.core.runtime import device_name, wait_for_device
from dino_vit.models.block import attend
from dino_vit.models.positions import interpolate_pos_embs
from dino_vit.models.stems import UnfoldedConv

PACKAGES = (
    "torch",
    "torchvision",
    "triton",
    "accelerate",
    "timm",
    "numpy",
    "pydantic",
    "simplejpeg",
    "pytest",
)
TOKENS = 64 * 690  # of a student's pass: 64 images, 2 views of 197 tokens and 8 of 37
PRODUCTS = {  # rows, summed over, columns
    "8192 squared": (8192, 8192, 8192),
    "ViT-S qkv": (TOKENS, 384, 1152),
    "ViT-S proj": (TOKENS, 384, 384),
    "ViT-S fc1": (TOKENS, 384, 1536),
    "ViT-S fc2": (TOKENS, 1536, 384),
    "ViT-S fc2, gradient of the weight": (384, TOKENS, 1536),
    "ViT-B qkv": (TOKENS, 768, 2304),
    "ViT-B fc1": (TOKENS, 768, 3072),
    "prototypes": (510, 256, 65_536),
}
ATTENTION = (  # sequences, heads, tokens, queries
    (128, 6, 197, 197),
    (512, 6, 37, 37),
    (128, 6, 197, 1),
    (128, 12, 197, 197),
    (512, 12, 37, 37),
)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
CHOICES = {int(backend.value): backend.name.lower() for backend in SDPBackend.__members__.values()}
HEAD = 64  # channels of a head
VIEW_BYTES = 33_423_360  # of the views of 64 images, uint8


def run(record: Record, _: float) -> None:
    """Measure all of it, what decides most first."""
    record.add("machine", device_name(DEVICE), **machine())
    with record.attempt("host", "calls"):
        host(record)
    for measure in (copies, products, attention, positions, patches, half_precision_products):
        with record.attempt("facts", measure.__name__):
            measure(record)


def machine() -> dict[str, object]:
    """Describe what is measured on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    found: dict[str, object] = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "cores": cores(),
        **versions,
    }
    found |= {"cpu": device_name(torch.device("cpu")), "compiler": shutil.which("gcc") or shutil.which("cc")}
    if ON_GPU:
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        found |= {"cuda": torch.version.cuda, "cudnn": cudnn}
    return found


def host(record: Record) -> None:
    """Measure what a kernel costs the host, and the GPU if it does nothing else."""
    x, calls = torch.zeros(8, device=DEVICE), size(1000, 100)
    for _ in range(200):
        x.add_(1)
    wait_for_device(DEVICE)
    start = time.perf_counter()
    for _ in range(calls):
        x.add_(1)
    alone = time.perf_counter() - start
    wait_for_device(DEVICE)
    both = time.perf_counter() - start
    record.add("host", "a kernel", us=round(1e6 * alone / calls, 2), us_with_gpu=round(1e6 * both / calls, 2))


def copies(record: Record) -> None:
    """Measure the memory's bandwidth, and the bus's from pinned memory."""
    source = torch.empty(size(2**28, 2**18), device=DEVICE).normal_()
    target = torch.empty_like(source)
    ms = milliseconds(lambda: target.copy_(source), calls=5)
    record.add("copy", "on the device", gb_s=round(8 * source.numel() / ms / 1e6, 1))
    views = torch.empty(size(VIEW_BYTES, 2**18), dtype=torch.uint8, pin_memory=ON_GPU)
    ms = milliseconds(lambda: views.to(DEVICE, non_blocking=True), calls=5)
    record.add("copy", "to the device", gb_s=round(views.numel() / ms / 1e6, 1), ms=round(ms, 3))


def products(record: Record) -> None:
    """Measure the products of a step in bf16."""
    for name, shape in PRODUCTS.items():
        m, k, n = shape if ON_GPU else (min(side, 128) for side in shape)
        x, w = (torch.randn(*sides, device=DEVICE, dtype=torch.bfloat16) for sides in ((m, k), (n, k)))
        ms = milliseconds(partial(F.linear, x, w), calls=10)
        record.add("product", name, ms=round(ms, 4), tflop_s=round(2 * m * k * n / ms / 1e9, 1))


def attention(record: Record) -> None:
    """Measure each kernel of attention for the shapes of a step, and say which PyTorch chooses."""
    for sequences, heads, tokens, queries in ATTENTION:
        shape = (size(sequences, 1), tokens, 3, heads, HEAD)
        qkv = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        forward = partial(attended, qkv, queries)
        both = partial(with_gradient, qkv, forward)
        name = f"{sequences} × {heads} heads × {tokens} tokens, {queries} queries"
        with torch.no_grad():
            q, k, v = parts(qkv, queries)
            chosen = CHOICES[torch._fused_sdp_choice(q, k, v)] if ON_GPU else "explicit"
        times = {"chosen": timed_attention(forward, both)}
        for backend in BACKENDS if ON_GPU else ():
            with record.attempt("attention", f"{backend}, {name}"), sdpa_kernel(BACKENDS[backend]):
                times[backend] = timed_attention(forward, both)
        names = [backend for backend in times if backend != "chosen"] or ["chosen"]
        fastest = min(names, key=lambda backend: times[backend]["both_us"])
        record.add("attention", name, chosen_is=chosen, fastest=fastest, **times)


def parts(qkv: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # as a block lays them out
    return q[:, :, :queries], k, v


def attended(qkv: Tensor, queries: int) -> Tensor:
    """Attend as a block does."""
    return attend(*parts(qkv, queries), scale=HEAD**-0.5).transpose(1, 2).flatten(2)


def with_gradient(qkv: Tensor, forward: Callable[[], Tensor]) -> None:
    qkv.grad = None
    out = forward()
    torch.autograd.backward(out, torch.ones_like(out))


def timed_attention(forward: Callable[[], Tensor], both: Callable[[], None]) -> dict[str, float]:
    """Return the microseconds of a kernel, and the seconds of its first call."""
    first = seconds(both)
    with torch.no_grad():
        ahead = milliseconds(forward, calls=10, rounds=3)
    all_of_it = milliseconds(both, calls=10, rounds=3)
    us = {"forward_us": 1e3 * ahead, "both_us": 1e3 * all_of_it}
    return {key: round(value, 1) for key, value in us.items()} | {"first_s": round(first, 2)}


def positions(record: Record) -> None:
    """Measure the positions of the local views, by bicubic interpolation and as a model computes them."""
    embs = torch.randn(1, 197, 384, device=DEVICE, requires_grad=True)
    upstream = torch.ones(1, 37, 384, device=DEVICE)
    matrices: dict[object, Tensor] = {}

    def resampled(kept: dict[object, Tensor] | None) -> Tensor:
        out = interpolate_pos_embs(embs, (6, 6), trained_grid=(14, 14), matrices=kept)
        return torch.autograd.grad(out, embs, upstream)[0]

    for name, kept in (("bicubic", None), ("as a matrix", matrices)):
        ms = milliseconds(partial(resampled, kept), calls=10)
        first = resampled(kept)
        same = all(torch.equal(resampled(kept), first) for _ in range(size(20, 2)))
        record.add("positions", name, us=round(1e3 * ms, 1), same_gradient_each_time=same)


def patches(record: Record) -> None:
    """Measure the patch embedding of global views, as a convolution and as a model computes it."""
    images = torch.randn(size(128, 1), 3, 224, 224, device=DEVICE)
    for name, kind in (("convolution", nn.Conv2d), ("product", UnfoldedConv)):
        stem = kind(3, 384, kernel_size=16, stride=16).to(DEVICE)

        def both(stem: nn.Module = stem) -> None:
            stem.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16):
                out: Tensor = stem(images)
            torch.autograd.backward(out.float().sum())

        record.add("patches", name, ms=round(milliseconds(both, calls=5), 3))


def half_precision_products(record: Record) -> None:
    """Measure products of bf16 with results in float32, as the loss and the teacher's logits use them."""
    if not ON_GPU:  # CPUs lack them
        return
    features, prototypes = (
        torch.randn(rows, 256, device=DEVICE, dtype=torch.bfloat16) for rows in (510, 65_536)
    )
    exact = features.float() @ prototypes.float().T
    product = partial(torch.mm, features, prototypes.T, out_dtype=torch.float32)
    off = float((product() - exact).norm() / exact.norm())
    record.add("product", "prototypes, result in float32", ms=round(milliseconds(product), 4), off=off)
    gradient = torch.randn(510, 65_536, device=DEVICE, dtype=torch.bfloat16)
    back = partial(torch.mm, gradient.T, features, out_dtype=torch.float32)
    record.add("product", "their gradient, result in float32", ms=round(milliseconds(back), 4))
