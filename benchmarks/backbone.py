"""ViT-S/16 beside timm's and torchvision's, and its stems: images a second and peak memory.

    python -m benchmarks.backbone --repeats 10

Every contender maps the same images to the 384 CLS features, without a head and with nothing dropped, and
takes its own short cuts: torchvision has a fast path for evaluation, ours leaves out what the last block
would do to the patch tokens. "forward" is evaluation without gradients; "forward + backward" is training, up
to the gradient of every parameter. "bf16" is a float32 model under autocast, as one trains; "bf16 weights" is
a model converted to bfloat16. Views of 96 pixels interpolate the positions of a model made for 224
(torchvision cannot: it gets a model made for 96). Of the stems alone, "product" is what `stem="patch"`
computes and "convolution" the patch convolution that has the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import timm
import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer as TorchvisionViT

from benchmarks.measure import Row, Table, Work, arguments, compare, here, peak_memory, report
from dino_vit.models.vit import vit_small

ON_CUDA = "the same rows with 128 images"
STEMS = ("product", "convolution", "conv", "hybrid")
CONTENDERS = ("dino_vit", "timm", "torchvision")
LOCAL_VIEWS = 4  # a batch of local views has as many more images, as multi-crop batches do


@dataclass(frozen=True)
class Case:
    """What is done to how many images of which size, and in which precision."""

    size: int
    batch: int
    train: bool
    precision: Literal["float32", "bf16", "bf16 weights"]
    device: str

    @property
    def name(self) -> str:
        mode = "forward + backward" if self.train else "forward"
        return f"{mode}, {self.precision}, {self.batch} × {self.size} px"


def cases(where: str, batch: int) -> Iterator[Case]:
    """Name all rows of a device; weights in bfloat16 are for evaluation only."""
    for size, train in product((224, 96), (False, True)):
        images = batch if size == 224 else LOCAL_VIEWS * batch
        yield Case(size, images, train, "float32", where)
        yield Case(size, images, train, "bf16", where)
        if not train:
            yield Case(size, images, train, "bf16 weights", where)


def build_model(contender: str, size: int) -> nn.Module:
    """Build a ViT-S/16 without a head that takes images of this size."""
    if contender == "dino_vit":
        return vit_small()
    if contender == "timm":
        model = timm.create_model("vit_small_patch16_224", num_classes=0, dynamic_img_size=size != 224)
        assert isinstance(model, nn.Module)
        return model
    peer = TorchvisionViT(
        image_size=size, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    peer.heads = nn.Identity()
    return peer


def build_work(contender: str, case: Case) -> Work:
    """Return one call's worth of work on a model and images that are ready."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if case.precision == "bf16 weights" else torch.float32
    model = build_model(contender, case.size).to(case.device, dtype).train(case.train)
    images = torch.randn(case.batch, 3, case.size, case.size, device=case.device, dtype=dtype)

    def forward() -> Tensor:
        with torch.autocast(case.device, torch.bfloat16, enabled=case.precision == "bf16"):
            return model(images)

    def train() -> None:
        model.zero_grad()
        torch.autograd.backward(forward().float().square().sum())

    return train if case.train else torch.no_grad()(forward)


def measure(case: Case, repeats: int) -> Row:
    """Measure one row."""
    memory = {name: peak_memory(build_work, name, case, device=case.device) for name in CONTENDERS}
    works = {name: build_work(name, case) for name in CONTENDERS}
    return compare(case.name, works, items=case.batch, repeats=repeats, device=case.device, memory=memory)


def stem_work(contender: str, case: Case) -> Work:
    """Return forward and backward passes of a stem."""
    torch.manual_seed(0)
    name: Any = {"product": "patch", "convolution": "patch"}.get(contender, contender)
    stem: nn.Module = vit_small(stem=name, depth=1).patch_embed
    if contender == "convolution":
        stem = nn.Conv2d(3, 384, kernel_size=16, stride=16)
    stem.to(case.device)
    images = torch.randn(case.batch, 3, case.size, case.size, device=case.device)

    def work() -> None:
        stem.zero_grad()
        with torch.autocast(case.device, torch.bfloat16, enabled=case.precision == "bf16"):
            out = stem(images)
        torch.autograd.backward(out.float().square().sum())

    return work


def measure_stems(case: Case, names: Sequence[str], repeats: int) -> Row:
    """Measure one row of stems."""
    works = {name: stem_work(name, case) for name in names}
    return compare(case.name, works, items=case.batch, repeats=repeats, device=case.device)


def run(*, repeats: int, threads: int, batch: int | None = None) -> list[Table]:
    """Measure every row."""
    torch.set_num_threads(threads)
    where = here().type
    images = batch or (128 if where == "cuda" else 8)
    rows = [measure(case, repeats) for case in cases(where, images)]
    trained = [case for case in cases(where, images) if case.train]
    patches = [measure_stems(case, STEMS[:2], repeats) for case in trained]
    # The convolutions of a ResNet in bfloat16 take minutes on a CPU without AVX-512.
    stems = [measure_stems(case, STEMS, repeats) for case in trained if case.precision == "float32"]
    device = "CUDA" if where == "cuda" else f"CPU, threads: {threads}"
    ratio = {"ratio": "product / fastest other"}
    return [
        Table(f"Backbone, {device}", "images a second", rows),
        Table(f"Patches of width 384, {device}", "images a second", patches, **ratio),
        Table(f"Stems of width 384, {device}", "images a second", stems, **ratio),
    ]


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, help="images of 224 px (default: 8 on a CPU, 128 on CUDA)")
    options = parser.parse_args()
    report(run(repeats=options.repeats, threads=options.threads, batch=options.batch), options)
