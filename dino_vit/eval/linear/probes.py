"""Linear classifiers on frozen features: a grid of learning rates and inputs, all trained side by side.

All heads see the same images in the same order, so those that read the same columns differ in their rate
alone and are one matrix product. The gradient is written out: of softmax and cross-entropy together it is the
probabilities less the truth.

n images, d columns that a head reads, r learning rates, c classes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from torch import Tensor

from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.method.schedules import warmup_cosine
from dino_vit.models.onednn import linear
from dino_vit.views.sampler import Sampler

MOMENTUM = 0.9
INITIAL_STD = 0.01
_SCORES = 1 << 24  # held at a time when classifying


@dataclass(frozen=True)
class Heads:
    """Linear classifiers that read the same columns, one a learning rate."""

    columns: slice
    weight: Tensor  # (r, c, d)
    bias: Tensor  # (r, c)

    def scores(self, features: Tensor) -> Tensor:
        """Return what all heads say of all classes, (n, r, c)."""
        return self.score(features[:, self.columns].to(self.weight.device, self.weight.dtype))

    def score(self, x: Tensor) -> Tensor:
        """Return the same of the columns alone."""
        joined = linear(x, self.weight.flatten(0, 1), self.bias.flatten())
        return rearrange(joined, "n (r c) -> n r c", r=len(self.bias))

    def to(self, device: torch.device) -> Heads:
        """Return the same heads on a device."""
        return Heads(self.columns, self.weight.to(device), self.bias.to(device))

    def only(self, head: int) -> Heads:
        """Return one head alone."""
        return Heads(self.columns, self.weight[[head]], self.bias[[head]])


@torch.no_grad()
def train_heads(
    features: Tensor,
    targets: Tensor,
    *,
    columns: Sequence[slice],
    rates: Sequence[float],
    classes: int,
    steps: int,
    batch_size: int,
    seed: int,
    device: torch.device,
    advance: Callable[[], object] = lambda: None,
) -> list[Heads]:
    """Train a head for every rate on every choice of columns, by SGD with momentum and a cosine to zero.

    `features` (images, width) and `targets`, from 0 to classes - 1, may lie elsewhere than on `device`. All
    heads of a choice start alike; `advance` is called after each step.
    """
    heads = [_initial(each, features.shape[1], len(rates), classes, seed, device) for each in columns]
    momenta = [(torch.zeros_like(each.weight), torch.zeros_like(each.bias)) for each in heads]
    rate = torch.tensor(rates, device=device)
    sampler = Sampler(length=len(features), batch_size=batch_size, seed=seed)
    for step, spec in zip(range(steps if rates else 0), sampler.batch_specs(), strict=False):
        chosen = torch.from_numpy(spec.samples)
        x, truth = (
            values[chosen.to(values.device)].to(device, non_blocking=True) for values in (features, targets)
        )
        decay = warmup_cosine(step, base=1.0, final=0.0, total=steps)
        for each, momentum in zip(heads, momenta, strict=True):
            _take_step(each, momentum, x, truth, rate * decay)
        advance()
    return heads


def _initial(columns: slice, width: int, rates: int, classes: int, seed: int, device: torch.device) -> Heads:
    generator = torch.Generator().manual_seed(derive_seed(seed, RngPurpose.EVALUATION))
    read = len(range(width)[columns])
    weight = INITIAL_STD * torch.randn(classes, read, generator=generator)
    return Heads(
        columns,
        repeat(weight, "c d -> r c d", r=rates).contiguous().to(device),
        torch.zeros(rates, classes, device=device),
    )


def _take_step(heads: Heads, momentum: tuple[Tensor, Tensor], x: Tensor, truth: Tensor, rate: Tensor) -> None:
    """Move every head down the gradient of its mean cross-entropy."""
    # Contiguous, as oneDNN falls back to plain loops for columns of something wider that is transposed.
    x = x[:, heads.columns].float().contiguous()
    errors = heads.score(x).softmax(dim=-1)
    errors[torch.arange(len(x), device=x.device), :, truth] -= 1
    errors /= len(x)
    gradient = linear(rearrange(errors, "n r c -> (r c) n"), x.t())  # (r·c, d)
    for parameter, speed, slope in (
        (heads.weight, momentum[0], gradient.view_as(heads.weight)),
        (heads.bias, momentum[1], errors.sum(dim=0)),
    ):
        speed.mul_(MOMENTUM).add_(slope)
        parameter.addcmul_(speed, rate.view(-1, *[1] * (speed.ndim - 1)), value=-1)


@torch.no_grad()
def count_right(heads: Heads, features: Tensor, targets: Tensor) -> Tensor:
    """Return how many images each head classifies rightly, (r,)."""
    right = torch.zeros(len(heads.bias), dtype=torch.long, device=heads.bias.device)
    for rows in _blocks(heads, len(features)):
        truth = targets[rows].to(right.device)
        right += (heads.scores(features[rows]).argmax(dim=-1) == truth[:, None]).sum(dim=0)
    return right


@torch.no_grad()
def rank_classes(head: Heads, features: Tensor, *, best: int = 5) -> Tensor:
    """Return the classes with the highest scores by a head alone, best first: (n, at most `best`)."""
    (alone,) = head.bias
    best = min(best, len(alone))
    ranked = [head.scores(features[rows])[:, 0].topk(best).indices for rows in _blocks(head, len(features))]
    return torch.cat(ranked)


def _blocks(heads: Heads, images: int) -> Iterator[slice]:
    if not heads.bias.numel():  # there are more processes than rates
        images = 0
    size = max(1, _SCORES // max(1, heads.bias.numel()))
    return (slice(start, start + size) for start in range(0, images, size))
