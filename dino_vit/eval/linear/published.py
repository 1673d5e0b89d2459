"""The linear evaluation of 2021: one head on augmented views, the frozen backbone run at every step.

SGD with momentum, a rate that falls by a cosine from epoch to epoch, random resized crops and flips. A head
is written after every epoch as the reference writes its own, and training goes on from there.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.config.settings import Count, CountOrZero, Positive, Problem, Settings, setting
from dino_vit.core.distributed import all_gather, all_reduce_mean
from dino_vit.core.progress import progress
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.sizes import Size
from dino_vit.core.storage import write_bytes
from dino_vit.eval.datasets import Labelled
from dino_vit.eval.features.extraction import FeatureSpec, evaluating
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.eval.linear.probes import INITIAL_STD, MOMENTUM, Heads, count_right
from dino_vit.eval.supervised_loader import SupervisedLoader
from dino_vit.method.schedules import warmup_cosine
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.geometry import View
from dino_vit.views.photometry import ViewPhotometry
from dino_vit.weights import WeightsError
from dino_vit.weights.reading import read_weights

log = logging.getLogger("dino_vit")


class Published(Settings):
    """method=dino2021: one head on augmented views, through the backbone at every step."""

    blocks: Count = setting(
        4, "the CLS tokens of how many last blocks are read; 4 for a ViT-S, 1 for a ViT-B"
    )
    mean: bool = setting(
        False, "read the mean patch token too, interleaved; with blocks=1 alone, for a ViT-B"
    )
    lr: Positive = setting(1e-3, "learning rate at a global batch of 256")
    epochs: Count = setting(100, "passes over the training images")
    workers: CountOrZero | None = setting(None, "loader processes; null: by the cores", resumable=True)
    probe: str | None = setting(
        None, "file of a trained head to try instead: the reference's, or one of ours"
    )

    def contradictions(self) -> Iterator[Problem]:
        """Yield what the published code cannot do either."""
        if self.mean and self.blocks != 1:
            text = f"dino2021.mean=true goes with dino2021.blocks=1, not {self.blocks}"
            yield Problem(text, ("dino2021.mean", "dino2021.blocks"))

    @property
    def kind(self) -> FeatureSpec:
        """What is read of a backbone."""
        return FeatureSpec(tokens="cls+mean" if self.mean else "cls", blocks=self.blocks)

    def width(self, model: VisionTransformer) -> int:
        """Return how many features a head reads."""
        return (self.blocks + self.mean) * model.width


def training_view(size: Size) -> View:
    """Return the random resized crop, flipped or not, that a head learns from."""
    photometry = ViewPhotometry(flip=0.5)
    return View(size=size, scale=(0.08, 1.0), photometry=photometry, interpolation="bilinear")


def interleave(features: Tensor, *, mean: bool) -> Tensor:
    """Return features as a published head reads them: CLS and mean patch by turns, c0, p0, c1, p1, ..."""
    return rearrange(features, "b (kind d) -> b (d kind)", kind=2) if mean else features


def read_probe(path: str, *, inputs: int) -> Heads:
    """Read a head: the reference's file, one of ours, or a bare state dict of a linear layer."""
    tensors = {name.removeprefix("linear."): t for name, t in read_weights(path, "teacher").tensors.items()}
    if tensors.keys() != {"weight", "bias"} or tensors["weight"].ndim != 2:
        raise WeightsError(f"{path} holds no linear head: {', '.join(sorted(tensors)[:6])}")
    if tensors["weight"].shape[1] != inputs:
        raise WeightsError(
            f"{path} reads {tensors['weight'].shape[1]} features, but dino2021.blocks and dino2021.mean give "
            f"{inputs} of this backbone"
        )
    return Heads(slice(None), tensors["weight"].float()[None], tensors["bias"].float()[None])


@dataclass(frozen=True)
class Trained:
    """A head after its last epoch, and how often it was right after each."""

    head: Heads
    percents: tuple[float, ...]


def train_probe(
    feed: SupervisedLoader,
    frozen: FrozenBackbone,
    settings: Published,
    *,
    val: Labelled,
    classes: int,
    seed: int,
    path: Path,
    metadata: str,
) -> Trained:
    """Train a head, going on after the last epoch that `path` holds; all processes take part."""
    model, device = frozen.model, frozen.device
    probe = _initial(val.features.shape[1], classes, seed).to(device)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.0, momentum=MOMENTUM)
    percents = _restore(path, probe, optimizer, metadata)
    done, steps = len(percents), feed.steps_per_epoch
    with (
        progress("Training a head, steps", (settings.epochs - done) * steps) as advance,
        closing(feed.batches(done * steps)) as batches,
    ):
        for epoch in range(done, settings.epochs):
            rate = warmup_cosine(epoch, base=settings.lr, final=0.0, total=settings.epochs)
            optimizer.param_groups[0]["lr"] = rate * feed.global_batch / 256
            for images, targets in islice(batches, steps):
                _take_step(probe, optimizer, _read(model, images, settings, frozen.autocast), targets)
                advance(1, f"epoch {epoch + 1}  {f'top-1 {percents[-1]:.1f} %' if percents else ''}")
            right = int(count_right(_head(probe), val.features, val.targets))
            percents.append(100 * right / len(val))
            if frozen.main:
                _save(path, probe, optimizer, percents, metadata)
    return Trained(_head(probe), tuple(percents))


def _initial(inputs: int, classes: int, seed: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(derive_seed(seed, RngPurpose.EVALUATION))
    with torch.device("meta"):  # draws nothing
        probe = nn.Linear(inputs, classes)
    probe.to_empty(device="cpu")
    nn.init.normal_(probe.weight, std=INITIAL_STD, generator=generator)
    nn.init.zeros_(probe.bias)
    return probe


def _read(
    model: VisionTransformer, images: Tensor, settings: Published, autocast: torch.dtype | None
) -> Tensor:
    """Return what the head reads of normalised images."""
    kind = images.device.type
    with evaluating(model), torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
        return interleave(settings.kind.of(model, images).float(), mean=settings.mean)


def _take_step(probe: nn.Linear, optimizer: torch.optim.SGD, features: Tensor, targets: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(F.cross_entropy(probe(features), targets))
    for parameter in probe.parameters():
        assert parameter.grad is not None
        parameter.grad = all_reduce_mean(parameter.grad)
    optimizer.step()


def _head(probe: nn.Linear) -> Heads:
    return Heads(slice(None), probe.weight.detach().clone()[None], probe.bias.detach().clone()[None])


def _save(
    path: Path, probe: nn.Linear, optimizer: torch.optim.SGD, percents: list[float], metadata: str
) -> None:
    """Write a head as the reference does, whose code can go on from it too."""
    content = {
        "epoch": len(percents),
        "state_dict": {f"module.linear.{name}": tensor for name, tensor in probe.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "best_acc": max(percents),
        "percents": percents,
        "about": metadata,
    }
    written = io.BytesIO()
    torch.save(content, written)
    write_bytes(path, written.getvalue())


def _restore(path: Path, probe: nn.Linear, optimizer: torch.optim.SGD, metadata: str) -> list[float]:
    """Go on from a file of the same training, and return the accuracies of the epochs it had."""
    found: dict[str, Any] | None = None
    if path.exists():
        read_probe(str(path), inputs=probe.in_features)  # what is no head is refused here, in words
        found = torch.load(path, map_location="cpu", weights_only=True)
        if found.get("about") != metadata:
            raise ValueError(
                f"{path} holds a head that was trained with other settings, images or weights; move it away "
                "or give another output"
            )
        state = {name: found["state_dict"][f"module.linear.{name}"] for name in ("weight", "bias")}
        probe.load_state_dict(state)
        optimizer.load_state_dict(found["optimizer"])
        log.info("%s: going on after epoch %d", path, found["epoch"])
    percents: list[float] = found["percents"] if found else []
    device = probe.weight.device
    epochs = all_gather(torch.tensor([len(percents)], device=device)).tolist()
    if len(set(epochs)) > 1:
        raise ValueError(f"the processes found {path} at different epochs: it must be one file that all see")
    return percents
