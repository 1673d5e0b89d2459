"""Linear classification of frozen features by DINOv2's grid of heads (Oquab et al., 2023, table 4).

    python eval/linear_grid.py imagenet/val train=imagenet/train weights=runs/vits16
    accelerate launch eval/linear_grid.py ...

A head for each of 13 rates and each input (the CLS tokens of the last 1 or 4 blocks, with the mean patch
token and without), by SGD: 12,500 steps of 1,024 images of the centre crop, of smaller sets ten epochs, but
at least 1,250 steps. As published, the best head is the one that is best on the images that it is judged by,
which is optimistic with few images. The grid learns little from untrained features, and so exaggerates what
training gained; `dino-vit linear` does neither.

`method=logistic` is DINOv2's other protocol: the optimum of scikit-learn's logistic regression on the CLS
token for each of 45 values of C.

Published top-1 on ImageNet in %, by the grid: DINOv2's ViT-S/14 81.1, B/14 84.5, L/14 86.3, g/14 86.5.
"""

import sys
from collections.abc import Sequence
from itertools import product
from typing import ClassVar, Literal

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from dino_vit.cli import run_program
from dino_vit.config.commands import RESULTS, CachedConfig, JsonFile, SupervisedConfig
from dino_vit.config.settings import Count, NonEmpty, Positive, setting
from dino_vit.core import log
from dino_vit.core.distributed import all_gather, rank_slice, to_device
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, plural, progress
from dino_vit.eval.linear import best_head, judge_head, nth_head
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.results import EvaluationResult, conclude, describe_inputs, output_of
from dino_vit.eval.sets import LabelledFeatures, features_of_sets, open_sets
from dino_vit.features.frozen import FrozenBackbone, frozen_backbone
from dino_vit.method.optim import warmup_cosine
from dino_vit.models.backbone import CLS, FeatureSpec, simple_specs
from dino_vit.models.classifiers import LinearHeads
from dino_vit.views.sampler import Sampler
from supervised import MOMENTUM, initial_weight, require_one_class

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1)
CS = tuple(10 ** (-6 + step / 4) for step in range(45))
BATCH = 1024


class LinearGridConfig(SupervisedConfig, CachedConfig):
    """Judge a frozen backbone by the best of many linear heads, as published."""

    writes: ClassVar = "eval/linear_grid"
    method: Literal["grid", "logistic"] = setting("grid", "heads by SGD, or logistic regressions")
    rates: NonEmpty[Positive] = setting(RATES, "of method=grid: learning rates at a batch of 256")
    steps: Count | None = setting(None, "of method=grid; null: ten epochs, from 1,250 to 12,500 steps")
    output: JsonFile | None = RESULTS


def run(config: LinearGridConfig) -> EvaluationResult:
    """Train all heads and write the JSON; the figures are those of the best."""
    start_processes()
    sets = open_sets(config)  # a mistake in labels is found before weights are loaded
    require_one_class(sets[0], "eval/linear_grid.py")
    frozen = frozen_backbone(config)
    output = output_of(config, frozen.model.provenance.source)
    is_grid = config.method == "grid"
    inputs = sorted(simple_specs(frozen.model), key=lambda spec: spec.blocks) if is_grid else [CLS]
    train, val = features_of_sets(frozen, sets, inputs[-1])
    heads = _train(config, train, inputs, frozen)
    best, percents = best_head(heads, val)
    judged = judge_head(nth_head(heads, best), val)
    name, values = ("rate", config.rates) if is_grid else ("C", CS)
    table = [
        {name: value, "blocks": spec.blocks, "mean": spec.with_mean, "top-1": round(percent, 4)}
        for (value, spec), percent in zip(product(values, inputs), percents, strict=True)
    ]
    details = describe_inputs(config, frozen, train, val) | {"table": table}
    cells = [f"{percent:.2f}{'*' if number == best else ' '}" for number, percent in enumerate(percents)]
    starts = range(0, len(cells), len(inputs))
    rows = [[f"{x:.3g}", *cells[n : n + len(inputs)]] for x, n in zip(values, starts, strict=True)]
    text = [
        f"Accuracy (%), on {plural(len(val), 'image')}, trained on {len(train):,}",
        format_table([name, *(spec.title for spec in inputs)], rows),
        f"* best, chosen on the images that it is evaluated on, as published: {judged.summary}",
    ]
    return conclude("linear_grid", output, "linear top-1", judged, details, text)


def _train(
    config: LinearGridConfig, train: LabelledFeatures, inputs: Sequence[FeatureSpec], frozen: FrozenBackbone
) -> list[LinearHeads]:
    """Return for each input the heads of all rates, or of all C."""
    classes, device = len(train.classes), frozen.device
    if config.method == "logistic":
        features, targets = train.features.to(device), train.targets.to(device)
        return [train_logistic(features, targets, cs=CS, classes=classes)]
    return train_heads(
        train.features,
        train.targets,
        columns=[spec.columns_in(inputs[-1], frozen.model.width) for spec in inputs],
        rates=config.rates,
        classes=classes,
        steps=config.steps,
        seed=config.seed,
        device=device,
    )


@torch.no_grad()
def train_heads(
    features: Tensor,
    targets: Tensor,
    *,
    columns: Sequence[slice],
    rates: Sequence[float],
    classes: int,
    steps: int | None,
    batch_size: int = BATCH,
    seed: int,
    device: torch.device,
) -> list[LinearHeads]:
    """Train a head for every rate on every choice of columns, by SGD with momentum and a cosine to zero.

    Rates are for batches of 256 images, and scale with the batch. `features` (images, width) and `targets`
    may be on another device. All heads see the same images in the same order, and those that read the same
    columns start from the same weights. The processes share the rates; each returns all heads.
    """
    batch_size = min(batch_size, len(features))
    # DINOv2's 12,500 steps of 1,024 images are ten epochs of ImageNet.
    steps = steps or min(max(10 * len(features) // batch_size, 1250), 12_500)
    log.info("%d steps of %d images; rates are for 256 images and scale with the batch", steps, batch_size)
    local_rates = [rate * batch_size / 256 for rate in rank_slice(rates)]
    heads = []
    for read in columns:
        start = initial_weight(classes, len(range(features.shape[1])[read]), seed)
        weight = repeat(start, "c d -> r c d", r=len(local_rates)).contiguous().to(device)
        heads.append(LinearHeads(weight, torch.zeros(weight.shape[:2], device=device), read))
    momenta = [(torch.zeros_like(each.weight), torch.zeros_like(each.bias)) for each in heads]
    rate = torch.tensor(local_rates, device=device)
    batches = Sampler(length=len(features), global_batch=batch_size, seed=seed).batch_specs()
    if not local_rates:  # more processes than rates
        steps = 0
    with progress("Training probes, steps", steps) as advance:
        for step, batch in zip(range(steps), batches, strict=False):
            indices = torch.from_numpy(batch.samples)
            x, y = (
                to_device(tensor[to_device(indices, tensor.device)], device) for tensor in (features, targets)
            )
            decay = warmup_cosine(step, base=1.0, final=0.0, total=steps)
            for each, momentum in zip(heads, momenta, strict=True):
                _take_step(each, momentum, x, y, rate * decay)
            advance(1)
    return [LinearHeads(all_gather(each.weight), all_gather(each.bias), each.columns) for each in heads]


def _take_step(
    heads: LinearHeads, momenta: tuple[Tensor, Tensor], x: Tensor, y: Tensor, rate: Tensor
) -> None:
    """Update every head by the gradient of its mean cross-entropy.

    It is written out, so that one matrix product computes all heads: with 26 heads of 100 classes a step
    takes 0.14 s on a CPU core, by autograd for each of them 0.20 s.
    """
    # Contiguous, because a CPU multiplies a transposed slice of the columns by plain loops.
    x = x[:, heads.columns].float().contiguous()
    errors = heads.scores(x).softmax(dim=-1)
    errors[torch.arange(len(x), device=x.device), :, y] -= 1
    errors /= len(x)
    gradient = F.linear(rearrange(errors, "n r c -> (r c) n"), x.t())  # (r·c, d)
    gradients = gradient.view_as(heads.weight), errors.sum(dim=0)
    for parameter, momentum, slope in zip((heads.weight, heads.bias), momenta, gradients, strict=True):
        momentum.mul_(MOMENTUM).add_(slope)
        parameter.addcmul_(momentum, rate.view(-1, *[1] * (momentum.ndim - 1)), value=-1)


if __name__ == "__main__":
    sys.exit(run_program(LinearGridConfig, run))
