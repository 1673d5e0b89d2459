"""Judge the patches of a frozen backbone by masks: by their neighbours, and by a linear head as published.

The protocol of DINOv2 (Oquab et al., 2023) and DINOv3 (Siméoni et al., 2025). The shorter side of an image
becomes that of the crop. The head, a BatchNorm and a linear layer, reads the patches of the last block or of
the last four. It learns from crops of images at 0.5 to 2 times that size, flipped or not: 16 a step, AdamW.
An image is judged by windows two thirds of a side apart, whose scores are averaged and resized to its mask.
mIoU is that of all pixels of all images. As published: crops of 512 pixels (518 with patches of 14) and
40,000 steps. Not done here: distorted colours, and avoiding crops that one class fills.

DINOv2 publishes these mIoU in %, by a linear head on the last block, without scales (its column "lin."):
                     ADE20k  Cityscapes  Pascal VOC
    ViT-S/14           44.3        66.6        81.1
    ViT-g/14           49.0        71.3        83.0

n images or windows, (H, W) pixels, (h, w) patches, D channels, C classes
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.config.commands import IGNORED, DenseConfig
from dino_vit.core.blocks import choose_half
from dino_vit.core.distributed import agree, all_gather, rank_slice
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.core.text import Result, format_table, plural, progress, public
from dino_vit.data.image_set import ImageSet
from dino_vit.data.sources.masks import PUBLISHED, open_masks
from dino_vit.eval.classification.probes import initial_weight
from dino_vit.eval.features import FrozenBackbone, frozen_backbone
from dino_vit.eval.figures import Figure, Measured, summed
from dino_vit.eval.maps.windows import (
    BLOCK,
    Windows,
    best_class,
    count_classes,
    count_pixels,
    crop_batches,
    mean_iou,
    patch_classes,
    patch_maps,
    pixel_accuracy,
    random_crops,
    slide,
    window_maps,
)
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.reading import warn_of_unreadable
from dino_vit.eval.results import asked_output, evaluation
from dino_vit.eval.sets import refuse_same_images
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import resize_mask

JUDGES = {"knn": "k-NN of patches", "linear": "linear head"}
RATE, WEIGHT_DECAY, WARMUP = 1e-3, 1e-4, 1500 / 40_000  # warm-up as a share of the steps
EPOCHS, FEWEST_STEPS, MOST_STEPS = 32, 500, 40_000  # ADE20k's 40,000 steps are 32 epochs


class PixelFigures(NamedTuple):
    """How well pixels are classified, in per cent."""

    mean_iou: Figure
    pixel_accuracy: Figure
    iou: dict[str, float]  # by class


@dataclass(frozen=True, kw_only=True)
class DenseResult(Result):
    """How well patches tell the class of each pixel."""

    knn: PixelFigures
    linear: PixelFigures
    measured: list[Measured] = field(repr=False)  # mIoU of both judges, with each image's part
    path: Path | None  # of the JSON file, if one was written


def run(config: DenseConfig) -> DenseResult:
    """Learn from the patches of some images and judge the pixels of others; with an output, write JSON."""
    return evaluate(config, frozen_backbone(config))


def evaluate(config: DenseConfig, frozen: FrozenBackbone) -> DenseResult:
    """Do the same with a backbone that is loaded already."""
    spec = FeatureSpec(tokens="patches", blocks=config.blocks)
    if not frozen.model.has_patches:
        path = frozen.describe_weights()["source"]
        raise ValueError(f"{path} has no patches: its features are made after pooling")
    frozen.check_all_equal()
    output = asked_output(config, frozen.model.provenance.source)
    train, train_indices, queries, indices = agree("images with masks", lambda: _open(config), _describe)
    bank = patch_bank(frozen, train, train_indices, spec, patches=config.patches)
    steps = config.steps or choose_steps(len(bank.images))
    head = train_head(frozen, train, bank, spec, steps)
    measured = judge_pixels(frozen, queries, indices, bank, head, spec, k=config.k)
    warn_of_unreadable(train, train_indices, bank.images)
    warn_of_unreadable(queries, indices, measured[0].images)
    images, classes, true = len(measured[0].images), queries.classes, measured[0].parts[2].sum(0)
    if not true.sum():
        raise ValueError(f"{public(config.source)}: no pixel of a mask that could be read has a class")
    figures = {name: pixel_figures(each, classes) for name, each in zip(JUDGES, measured, strict=True)}
    largest, percent = classes[int(true.argmax())], float(100 * true.max() / true.sum())
    results = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": images,
        "bank": len(bank.features),
        "bank_images": len(bank.images),
        "steps": steps,
        "largest_class": {"name": largest, "percent": percent},
        **{name: pixels._asdict() for name, pixels in figures.items()},
    }
    evaluation("dense", output, "linear mIoU", figures["linear"].mean_iou, results)
    rows = [[title, *map(str, figures[name][:2])] for name, title in JUDGES.items()]
    text = (
        f"pixels of {plural(images, 'image')}; learned from {plural(len(bank.images), 'other')}: k-NN from "
        f"{len(bank.features):,} patches, the linear head in {plural(steps, 'step')}\n\n"
        f"{format_table(['', 'mIoU %', 'pixels %'], rows)}\n"
        f"{largest}, the largest class, has {percent:.1f} % of the pixels"
    )
    text += f"\n\n{output}" if output else ""
    return DenseResult(**figures, measured=measured, path=output, text=text)


def _open(config: DenseConfig) -> tuple[ImageSet, Sequence[int], ImageSet, Sequence[int]]:
    """Return the images to learn from and those to judge."""
    values: dict[str, Any] = {"class_names": config.class_names, "ignore_value": config.ignore_value}
    queries = open_masks(config.source, config.masks, **values)
    published = config.masks if config.masks in PUBLISHED else None
    train_spec = config.train or (config.source if published else None)
    if train_spec is None:
        if len(queries) < 2:
            raise ValueError(
                f"{public(config.source)} has one image with a mask, which leaves none to evaluate on"
            )
        judged = choose_half(queries.name, range(len(queries)))
        return queries, np.flatnonzero(~judged).tolist(), queries, np.flatnonzero(judged).tolist()
    train = open_masks(train_spec, config.train_masks or published, training=True, **values)
    refuse_same_images(config.source, queries, f"train={public(train_spec)}", train)
    if list(train.classes) != list(queries.classes):
        raise ValueError(f"{public(train_spec)} has different classes from {public(config.source)}")
    return train, range(len(train)), queries, range(len(queries))


def _describe(opened: tuple[ImageSet, Sequence[int], ImageSet, Sequence[int]]) -> str:
    train, train_indices, queries, indices = opened
    learned, judged = train.describe(), queries.describe()
    return f"{len(indices):,} of {judged} to judge, {len(train_indices):,} of {learned} to learn from"


def pixel_figures(measured: Measured, classes: Sequence[str]) -> PixelFigures:
    """Return the figures of the pixels that were counted for mIoU."""
    right, predicted, true = (part.sum(0) for part in measured.parts)
    union = predicted + true - right
    iou = 100 * right / union.clamp(min=1)
    return PixelFigures(
        mean_iou=measured.figure,
        pixel_accuracy=replace(measured, metric=summed(pixel_accuracy)).figure,
        iou={name: float(iou[i]) for i, name in enumerate(classes) if union[i] > 0},
    )


class Bank(NamedTuple):
    """Patches to learn from, and the images that they are of."""

    features: Tensor  # (patches, D)
    targets: Tensor  # index of the class of each in `classes`
    classes: Tensor  # those of the pixels of the images
    images: list[int]


def patch_bank(
    frozen: FrozenBackbone, source: ImageSet, indices: Sequence[int], spec: FeatureSpec, *, patches: int
) -> Bank:
    """Return about so many patches with a class: as many of each image, drawn at random."""
    classes, images, share = len(source.classes), list[int](), patches / len(indices)
    present = torch.zeros(classes + 1, dtype=torch.long)
    # One tensor for all: many small ones between the maps of images would fragment the memory.
    mine, filled = rank_slice(indices), 0
    empty = frozen.empty(spec)
    features = empty.new_empty(len(mine) * math.ceil(share), empty.shape[-1])
    targets = torch.empty(len(features), dtype=torch.long)
    for block, maps in window_maps(frozen, source, mine, spec, "patches to learn from"):
        windows = torch.split(maps, [len(image.images) for image in block])
        for image, image_maps in zip(block, windows, strict=True):
            rows, row_classes = draw_patches(image, image_maps.shape[2:], classes, share)
            drawn = slice(filled, filled := filled + len(rows))
            features[drawn] = rearrange(image_maps, "n d h w -> (n h w) d")[rows.to(frozen.device)]
            targets[drawn] = row_classes
            present += count_classes(image.mask.flatten(), classes)
            images.append(image.number)
    present = all_gather(present[None, :classes]).sum(0)
    occurring = present.nonzero().flatten()
    targets_of_all = torch.searchsorted(occurring, all_gather(targets[:filled]))
    if len(occurring) < 2 or not len(targets_of_all):
        content = f"only the class {source.classes[int(occurring[0])]}" if len(occurring) == 1 else "no class"
        text = f"the patches to learn from have {content}, and telling classes apart takes two"
        raise ValueError(f"{text}: look at the values of the masks and at ignore_value")
    device, read = frozen.device, all_gather(torch.tensor(images, dtype=torch.long)).tolist()
    return Bank(all_gather(features[:filled]), targets_of_all.to(device), occurring.to(device), read)


def draw_patches(image: Windows, grid: Sequence[int], classes: int, share: float) -> tuple[Tensor, Tensor]:
    """Draw about so many patches with a class of the windows of an image; return their rows and classes."""
    mask, (h, w) = resize_mask(image.mask, image.size), image.images.shape[2:]
    masks = torch.stack([mask[y : y + h, x : x + w] for y, x in image.corners])
    targets = patch_classes(masks, grid, classes).flatten()
    u = random_uniform(0, RngPurpose.EVALUATION, image.number, np.arange(1 + len(targets)))
    ignored = targets.numpy() == IGNORED  # those come last
    drawn = np.argsort(u[1:] + ignored)[: int(share + u[0])]
    rows = torch.from_numpy(drawn[~ignored[drawn]])
    return rows, targets[rows].long()


def choose_steps(images: int) -> int:
    """Return the steps of as many epochs as published, within bounds."""
    return min(max(EPOCHS * images // BLOCK, FEWEST_STEPS), MOST_STEPS)


def train_head(
    frozen: FrozenBackbone, source: ImageSet, bank: Bank, spec: FeatureSpec, steps: int
) -> nn.Module:
    """Return a BatchNorm and a linear layer that tell the classes of the bank, trained on random crops."""
    width, count, device = bank.features.shape[1], len(bank.classes), frozen.device
    norm, layer = nn.BatchNorm2d(width, device=device), nn.Conv2d(width, count, 1, device=device)
    start = {"weight": initial_weight(count, width, 0)[..., None, None], "bias": torch.zeros(count)}
    layer.load_state_dict(start)
    head = nn.Sequential(norm, layer)
    # Fewer steps than published need a higher rate: 500 gave 16.7 % mIoU with 0.01, and 13.2 % with 0.001.
    peak = RATE * math.sqrt(MOST_STEPS / steps)
    optimizer = torch.optim.AdamW(head.parameters(), weight_decay=WEIGHT_DECAY)
    index_of = torch.full((256,), IGNORED, device=device)
    index_of[bank.classes] = torch.arange(count, device=device)
    batches = crop_batches(bank.images, steps)
    with progress("Training the linear head, steps", steps) as advance:
        for step, (images, masks) in enumerate(random_crops(frozen, source, batches)):
            maps, targets = patch_maps(frozen, images, spec), index_of[masks.to(device).long()]
            factor = min(1.0, (step + 1) / (WARMUP * steps)) * (1 - step / steps)
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad()
            backward(head(all_gather(maps)), all_gather(targets))
            optimizer.step()
            advance(1)
    return head.eval()


def backward(logits: Tensor, targets: Tensor) -> None:
    """Backpropagate the mean cross-entropy of logits of patches (n, C, h, w), resized to pixels (n, H, W)."""
    labelled, slopes = (targets != IGNORED).sum().clamp(min=1), list[Tensor]()
    # An image at a time: the scores of all classes and pixels of many would not fit in memory.
    for scores, classes in zip(torch.split(logits.detach(), 1), torch.split(targets, 1), strict=True):
        pixels = F.interpolate(scores.requires_grad_(), classes.shape[1:], mode="bilinear")
        loss = F.cross_entropy(pixels, classes, ignore_index=IGNORED, reduction="sum") / labelled
        slopes += torch.autograd.grad(loss, scores)
    torch.autograd.backward(logits, torch.cat(slopes))


def neighbour_scores(bank: Bank, maps: Tensor, k: int) -> Tensor:
    """Return 1 for the class that the neighbours of a patch vote for, and 0 for others, (n, C, h, w)."""
    (n, _, h, _), rows = maps.shape, rearrange(maps, "n d h w -> (n h w) d")
    k = min(k, len(bank.targets))
    best = weighted_knn(bank.features, bank.targets, rows, k=[k])[k][:, 0]
    votes = F.one_hot(best.to(rows.device), len(bank.classes)).float()
    return rearrange(votes, "(n h w) c -> n c h w", n=n, h=h)


@torch.no_grad()
def judge_pixels(
    frozen: FrozenBackbone,
    source: ImageSet,
    indices: Sequence[int],
    bank: Bank,
    head: nn.Module,
    spec: FeatureSpec,
    *,
    k: int,
) -> list[Measured]:
    """Return the mIoU of images by each of `JUDGES`; every process judges a share of the images."""
    classes, device, judged = len(source.classes), frozen.device, list[int]()
    counts = [torch.zeros(0, len(JUDGES), 3, classes, dtype=torch.long)]  # a process may have no image
    for block, maps in window_maps(frozen, source, rank_slice(indices), spec, "images to judge"):
        windows = [len(image.images) for image in block]
        scores = [torch.split(each, windows) for each in (neighbour_scores(bank, maps, k), head(maps))]
        for image, *by_judge in zip(block, *scores, strict=True):
            mask, size = image.mask.to(device), (image.mask.shape[0], image.mask.shape[1])
            predicted = [bank.classes[best_class(slide(each, image), size)] for each in by_judge]
            counts.append(torch.stack([count_pixels(each, mask, classes) for each in predicted])[None].cpu())
            judged.append(image.number)
    pixels, images = all_gather(torch.cat(counts)), all_gather(torch.tensor(judged, dtype=torch.long))
    return [
        Measured(
            title=f"mIoU, {title}",
            images=images.numpy(),
            parts=pixels[:, row].unbind(1),
            metric=summed(mean_iou),
        )
        for row, title in enumerate(JUDGES.values())
    ]
