"""A grid of linear probes on frozen features, trained side by side: one for each learning rate and input.

All see the same images in the same order, so heads that read the same columns differ only in their learning
rate, and one matrix product computes all of them. The gradient is written out: for the cross-entropy of a
softmax it is the probabilities minus the one-hot targets. With 26 heads of 100 classes, a step of 1,024
images takes 0.14 s on one CPU core; a layer, a loss and autograd for each head take 0.20 s. Where images have
several labels, each is learned for itself, by a sigmoid.

n images, d columns that a head reads, r heads (one per learning rate), c classes
"""

from collections.abc import Iterator, Sequence

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn import functional as F

from dino_vit.config.settings import Task
from dino_vit.core import log
from dino_vit.core.device import to_device
from dino_vit.core.distributed import all_gather, rank_slice
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.text import progress
from dino_vit.eval.figures import TOP_K
from dino_vit.method.optim import warmup_cosine
from dino_vit.models.classifiers import LinearHeads
from dino_vit.views.sampler import Sampler

MOMENTUM = 0.9
BATCH = 1024  # images per step of a grid
_INITIAL_STD = 0.01
_MAX_SCORES = 1 << 24  # in memory at a time


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
    may be on another device: classes from 0 on, or a 0 or 1 for each of several labels, (images, classes).
    All heads that read the same columns start from the same weights. The processes share the rates; each
    returns all heads.
    """
    batch_size = min(batch_size, len(features))
    steps = steps or grid_steps(len(features), batch_size)
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


def grid_steps(images: int, batch_size: int) -> int:
    """Return the steps of ten epochs, within bounds; DINOv2's 12,500 of 1,024 images are ten of ImageNet."""
    return min(max(10 * images // batch_size, 1250), 12_500)


def initial_weight(classes: int, inputs: int, seed: int) -> Tensor:
    """Return the weight that every head starts from, (c, d)."""
    generator = torch.Generator().manual_seed(derive_seed(seed, RngPurpose.EVALUATION))
    return _INITIAL_STD * torch.randn(classes, inputs, generator=generator)


def _take_step(
    heads: LinearHeads, momenta: tuple[Tensor, Tensor], x: Tensor, y: Tensor, rate: Tensor
) -> None:
    """Update every head by the gradient of its mean cross-entropy."""
    # Contiguous, because a CPU multiplies a transposed slice of the columns by plain loops.
    x = x[:, heads.columns].float().contiguous()
    scores = heads.scores(x)
    if y.ndim == 2:
        errors = scores.sigmoid() - y[:, None]
    else:
        errors = scores.softmax(dim=-1)
        errors[torch.arange(len(x), device=x.device), :, y] -= 1
    errors /= len(x)
    gradient = F.linear(rearrange(errors, "n r c -> (r c) n"), x.t())  # (r·c, d)
    gradients = gradient.view_as(heads.weight), errors.sum(dim=0)
    for parameter, momentum, slope in zip((heads.weight, heads.bias), momenta, gradients, strict=True):
        momentum.mul_(MOMENTUM).add_(slope)
        parameter.addcmul_(momentum, rate.view(-1, *[1] * (momentum.ndim - 1)), value=-1)


@torch.no_grad()
def count_correct(heads: LinearHeads, features: Tensor, targets: Tensor) -> Tensor:
    """Return how many images each head classifies correctly, (r,)."""
    correct = torch.zeros(len(heads.bias), dtype=torch.long, device=heads.bias.device)
    for rows, scores in _scores_in_blocks(heads, features):
        correct += (scores.argmax(dim=-1) == targets[rows, None].to(correct.device)).sum(dim=0)
    return correct


@torch.no_grad()
def top_classes(heads: LinearHeads, features: Tensor, *, head: int = 0, k: int = TOP_K) -> Tensor:
    """Return the k classes that one head scores highest, best first; all classes if they are fewer."""
    k = min(k, heads.bias.shape[1])
    return torch.cat([scores[:, head].topk(k).indices for _, scores in _scores_in_blocks(heads, features)])


@torch.no_grad()
def head_scores(heads: LinearHeads, features: Tensor) -> Tensor:
    """Return the logits of all heads: (n, r, c)."""
    return torch.cat([scores for _, scores in _scores_in_blocks(heads, features)])


@torch.no_grad()
def head_losses(heads: LinearHeads, features: Tensor, targets: Tensor, task: Task) -> Tensor:
    """Return the mean cross-entropy of each head, (r,)."""
    total = torch.zeros(len(heads.bias), dtype=torch.double, device=heads.bias.device)
    for rows, scores in _scores_in_blocks(heads, features):
        y = repeat(targets[rows].to(scores.device), "n ... -> n r ...", r=scores.shape[1])
        if task == "multiclass":
            losses = F.cross_entropy(rearrange(scores, "n r c -> n c r"), y, reduction="none")
        else:
            y = y.to(scores.dtype)
            losses = F.binary_cross_entropy_with_logits(scores, y, reduction="none").mean(dim=2)
        total += losses.double().sum(dim=0)
    return total / len(features)


def _scores_in_blocks(heads: LinearHeads, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    size = max(1, _MAX_SCORES // heads.bias.numel())
    for start in range(0, len(features), size):
        rows = slice(start, start + size)
        yield rows, heads.scores(features[rows, heads.columns].to(heads.weight.device, heads.weight.dtype))
