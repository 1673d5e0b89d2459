"""The linear evaluation of 2021: one head on augmented views, the frozen backbone run at every step.

SGD with momentum, a learning rate that follows a cosine from epoch to epoch, random resized crops and flips.
After every epoch the head is written in the reference's format, and training resumes from there.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.config.settings import Count, Few, FewOrZero, Positive, Problem, Settings, setting
from dino_vit.core import log
from dino_vit.core.distributed import all_equal, all_reduce_mean, is_main_process
from dino_vit.core.progress import progress
from dino_vit.core.storage import pickled, write_bytes
from dino_vit.eval.classification.datasets import (
    LabelledFeatures,
    LabelledSets,
    LabelledSubset,
    SupervisedLoader,
    labelled_features,
)
from dino_vit.eval.classification.linear import MOMENTUM, LinearHeads, count_correct, initial_weight
from dino_vit.eval.features.extraction import FeatureSpec, evaluating
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.method.schedules import warmup_cosine
from dino_vit.views.geometry import View
from dino_vit.views.photometry import ViewPhotometry
from dino_vit.weights import WeightsError
from dino_vit.weights.reading import check_finite, read_weights


class Dino2021(Settings):
    """method=dino2021: one head on augmented views, through the backbone at every step."""

    blocks: Few = setting(4, "read the CLS tokens of this many last blocks; 4 for a ViT-S, 1 for a ViT-B")
    mean: bool = setting(False, "also read the mean patch token, interleaved; needs blocks=1; for a ViT-B")
    lr: Positive = setting(1e-3, "learning rate at a global batch of 256")
    epochs: Count = setting(100, "passes over the training images")
    workers: FewOrZero | None = setting(None, "loader processes; null: by the cores", resumable=True)
    probe: str | None = setting(None, "evaluate the head in this file instead, ours or the reference's")

    def contradictions(self) -> Iterator[Problem]:
        """Yield what the published code cannot do either."""
        if self.mean and self.blocks != 1:
            text = f"dino2021.mean=true needs dino2021.blocks=1, not {self.blocks}"
            yield Problem(text, ("dino2021.mean", "dino2021.blocks"))

    @property
    def spec(self) -> FeatureSpec:
        return FeatureSpec(tokens="cls+mean" if self.mean else "cls", blocks=self.blocks)

    def arrange(self, features: Tensor) -> Tensor:
        """Interleave CLS and mean patch token as the reference's heads read them: c0, p0, c1, p1, ..."""
        return rearrange(features, "b (kind d) -> b (d kind)", kind=2) if self.mean else features


def probe_features(frozen: FrozenBackbone, images: LabelledSubset, settings: Dino2021) -> LabelledFeatures:
    """Return what a head reads of some images."""
    labelled = labelled_features(frozen, images, settings.spec, "evaluation features")
    return replace(labelled, features=settings.arrange(labelled.features))


def read_probe(path: str, frozen: FrozenBackbone, settings: Dino2021) -> LinearHeads:
    """Read a head: the reference's file, one of ours, or a bare state dict of a linear layer."""
    tensors = {name.removeprefix("linear."): t for name, t in read_weights(path, "teacher").tensors.items()}
    if tensors.keys() != {"weight", "bias"} or tensors["weight"].ndim != 2:
        raise WeightsError(f"{path} holds no linear head, but {', '.join(sorted(tensors)[:6])}")
    weight, bias = (tensors[name].to(frozen.device, torch.float32) for name in ("weight", "bias"))
    check_finite({"weight": weight, "bias": bias}, path)
    (inputs,) = settings.spec.shape(frozen.model, frozen.preparation.size)
    if weight.shape[1] != inputs:
        raise WeightsError(
            f"{path} reads {weight.shape[1]} features, but dino2021.blocks and dino2021.mean give {inputs} "
            "of this backbone"
        )
    return LinearHeads(weight[None], bias[None])


def train_probe(
    sets: LabelledSets,
    val: LabelledFeatures,
    frozen: FrozenBackbone,
    settings: Dino2021,
    *,
    seed: int,
    path: Path,
) -> tuple[LinearHeads, list[float]]:
    """Return a trained head, and its top-1 in per cent after every epoch; all processes call it.

    The head is kept in `path`, from which training resumes.
    """
    device = frozen.device
    autocast = torch.autocast(device.type, frozen.autocast, enabled=frozen.autocast is not None)
    flip = ViewPhotometry(flip=0.5)
    loader = SupervisedLoader(
        sets.train,
        view=View(size=frozen.preparation.size, scale=(0.08, 1.0), photometry=flip, interpolation="bilinear"),
        preparation=frozen.preparation,
        batch_size=frozen.config.batch_size,
        seed=seed,
        workers=settings.workers,
        device=device,
    )
    inputs, classes, steps = val.features.shape[1], len(sets.classes), loader.steps_per_epoch
    probe = nn.Linear(inputs, classes, device=device)
    probe.load_state_dict({"weight": initial_weight(classes, inputs, seed), "bias": torch.zeros(classes)})
    parameters = tuple(probe.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=MOMENTUM)
    facts = _facts(sets, frozen, settings, global_batch=loader.global_batch, seed=seed)
    percents: list[float] = []
    if path.exists():
        percents = _restore(path, probe, optimizer, facts, read_probe(str(path), frozen, settings))
    if not all_equal(len(percents)):
        raise ValueError(f"the processes found {path} at different epochs: all nodes must share one folder")
    head = LinearHeads(probe.weight.detach()[None], probe.bias.detach()[None])  # a view of the probe
    done = len(percents)
    with (
        progress("Training a head, steps", (settings.epochs - done) * steps) as advance,
        closing(loader.batches(done * steps)) as batches,
    ):
        for epoch in range(done, settings.epochs):
            # The published code changes the rate once per epoch.
            rate = warmup_cosine(epoch, base=settings.lr, final=0.0, total=settings.epochs)
            optimizer.param_groups[0]["lr"] = rate * loader.global_batch / 256
            for images, targets in islice(batches, steps):
                with evaluating(frozen.model), autocast:
                    features = settings.arrange(settings.spec.of(frozen.model, images).float())
                loss = F.cross_entropy(probe(features), targets)
                gradients = torch.autograd.grad(loss, parameters)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = all_reduce_mean(gradient)
                optimizer.step()
                advance(1, f"epoch {epoch + 1}" + (f", top-1 {percents[-1]:.1f} %" if percents else ""))
            correct = int(count_correct(head, val.features, val.targets))
            percents.append(100 * correct / len(val))
            if is_main_process():
                _save(path, probe, optimizer, percents, facts)
    return head, percents


def _facts(
    sets: LabelledSets, frozen: FrozenBackbone, settings: Dino2021, *, global_batch: int, seed: int
) -> str:
    """Return all that the training depends on, as JSON."""
    weights = frozen.describe_weights()
    facts = {
        "weights": weights["sha256"],
        "network": weights["network"],
        "sets": [subset.images.fingerprint for subset in (sets.train, sets.val)],
        "classes": sets.classes,
        "settings": settings.model_dump(exclude={"workers", "probe"}),
        "preparation": asdict(frozen.preparation),
        "global_batch": global_batch,
        "seed": seed,
    }
    return json.dumps(facts, sort_keys=True)


def _save(
    path: Path, probe: nn.Linear, optimizer: torch.optim.SGD, percents: list[float], facts: str
) -> None:
    """Write a head in the reference's format, from which the reference can resume too."""
    content = {
        "epoch": len(percents),
        "state_dict": {f"module.linear.{name}": tensor for name, tensor in probe.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "best_acc": max(percents),
        "percents": percents,
        "about": facts,
    }
    write_bytes(path, pickled(content))


def _restore(
    path: Path, probe: nn.Linear, optimizer: torch.optim.SGD, facts: str, head: LinearHeads
) -> list[float]:
    """Restore the head and the optimiser of the same training, and return the accuracies so far."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    if content.get("about") != facts:
        raise ValueError(
            f"{path} holds a head that was trained with other settings, images or weights; move it away "
            "or give another output"
        )
    probe.load_state_dict({"weight": head.weight[0], "bias": head.bias[0]})
    optimizer.load_state_dict(content["optimizer"])
    percents: list[float] = content["percents"]
    log.info("%s: resuming after epoch %d", path, len(percents))
    return percents
