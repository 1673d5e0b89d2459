"""Judge the patches of a frozen backbone by masks: learn the classes of pixels from some images, test others.

n images, (H, W) pixels, (h, w) patches, C classes
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.commands import Result, format_table
from dino_vit.config.commands import IGNORED, DenseConfig
from dino_vit.core import Size, log
from dino_vit.core.distributed import all_gather, rank_slice
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.core.text import plural, progress
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.files import in_threads
from dino_vit.data.sources.masks import MaskedSource, open_masks
from dino_vit.data.sources.source import spread
from dino_vit.eval.accuracy import Interval, Measured
from dino_vit.eval.features import FrozenBackbone, check_finite, in_batches
from dino_vit.eval.frozen import frozen_backbone
from dino_vit.eval.knn import weighted_knn
from dino_vit.eval.labelled import refuse_same_images
from dino_vit.eval.linear import LinearHeads, LogisticFit, count_correct, sweep
from dino_vit.eval.results import evaluation
from dino_vit.models.positions import Grid
from dino_vit.models.tokens import FeatureSpec

JUDGES = {"knn": "k-NN of patches", "linear": "linear layer"}
CS = (0.01, 1.0, 100.0)  # inverse penalties of the linear layer


class PixelFigures(NamedTuple):
    """How well pixels are classified, in per cent."""

    mean_iou: Interval
    pixel_accuracy: Interval
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
    train, train_indices, queries, indices = _open(config)
    bank = patch_bank(frozen, train, train_indices, patches=config.patches)
    measured = judge(frozen, queries, indices, PixelClassifier(bank, k=config.k))
    images, classes, true = len(measured[0].images), queries.classes, measured[0].parts[2].sum(0)
    if not true.sum():
        raise ValueError(f"{config.source}: no pixel of a mask that could be read has a class")
    figures = {name: pixel_figures(of, classes) for name, of in zip(JUDGES, measured, strict=True)}
    largest, percent = classes[int(true.argmax())], float(100 * true.max() / true.sum())
    path = None if config.output is None else Path(config.output)
    results = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": images,
        "bank": len(bank.features),
        "largest_class": {"name": largest, "percent": percent},
        **{name: of._asdict() for name, of in figures.items()},
    }
    evaluation("dense", path, "linear mIoU", figures["linear"].mean_iou, results)
    rows = [[title, *map(str, figures[name][:2])] for name, title in JUDGES.items()]
    text = (
        f"pixels of {plural(images, 'image')}, learned from {len(bank.features):,} patches of others\n\n"
        f"{format_table(['', 'mIoU %', 'pixels %'], rows)}\n"
        f"{largest}, the largest class, has {percent:.1f} % of the pixels"
    )
    text += f"\n\n{path}" if path else ""
    return DenseResult(**figures, measured=measured, path=path, text=text)


def _open(config: DenseConfig) -> tuple[MaskedSource, Sequence[int], MaskedSource, Sequence[int]]:
    """Return the images to learn from and those to judge."""
    values: dict[str, Any] = {"class_names": config.class_names, "ignore_value": config.ignore_value}
    queries = open_masks(config.source, config.masks, **values)
    if config.train is None:
        if len(queries) < 2:
            raise ValueError(f"{config.source} has one image with a mask, which leaves none to evaluate on")
        return queries, range(0, len(queries), 2), queries, range(1, len(queries), 2)
    train = open_masks(config.train, config.train_masks, **values)
    refuse_same_images(config.source, queries, config.train, train)
    if list(train.classes) != list(queries.classes):
        raise ValueError(f"{config.train} has different classes from {config.source}")
    return train, range(len(train)), queries, range(len(queries))


class Batch(NamedTuple):
    """Patches of some images, and the class of each pixel."""

    features: Tensor  # (n, h, w, width)
    masks: Tensor  # uint8 (n, H, W)
    indices: list[int]


def read_patches(
    frozen: FrozenBackbone, source: MaskedSource, indices: Sequence[int], title: str
) -> Iterator[Batch]:
    """Yield batches of images in order, their masks cropped as the images are; name those left out."""
    model = frozen.model
    if not model.has_patches:
        path = frozen.describe_weights()["source"]
        raise ValueError(f"{path} has no patches: its features are made after pooling")
    height, _ = model.grid_of(*frozen.transform.size)

    def read_mask(index: int) -> Tensor | UnreadableImage:
        try:
            return frozen.transform.place_mask(source.mask(index))
        except UnreadableImage as error:
            return error

    batches = in_batches(indices, frozen.batch_size)
    with progress(title, len(indices)) as advance:
        for batch in frozen.features(source, batches, FeatureSpec(tokens="patches")):
            check_finite(batch.values, model)
            read = in_threads(read_mask, batch.indices.tolist())
            failures = [mask for mask in read if isinstance(mask, UnreadableImage)]
            for failure in (*batch.unreadable, *failures):
                log.warning("left out: %s", failure)
            masks = {row: mask for row, mask in enumerate(read) if isinstance(mask, Tensor)}
            if masks:
                yield Batch(
                    features=rearrange(batch.values[list(masks)], "n (h w) d -> n h w d", h=height),
                    masks=torch.stack(list(masks.values())).to(frozen.device),
                    indices=batch.indices[list(masks)].tolist(),
                )
            advance(len(read) + len(batch.unreadable))


def count_classes(pixels: Tensor, classes: int) -> Tensor:
    """Count the pixels of each class along the last dimension, and behind them the IGNORED ones."""
    pixels = pixels.long().masked_fill(pixels == IGNORED, classes)
    counts = torch.zeros(*pixels.shape[:-1], classes + 1, dtype=torch.long, device=pixels.device)
    return counts.scatter_add_(-1, pixels, torch.ones_like(pixels))


def patch_classes(masks: Tensor, grid: Grid, classes: int) -> Tensor:
    """Return the class of most pixels of each patch, (n, h, w); IGNORED where most have none."""
    pixels = rearrange(masks, "n (h y) (w x) -> n h w (y x)", h=grid[0], w=grid[1])
    most = count_classes(pixels, classes).argmax(dim=3)
    return most.masked_fill(most == classes, IGNORED).to(torch.uint8)


class Bank(NamedTuple):
    """Patches to learn from."""

    features: Tensor  # (patches, width)
    targets: Tensor  # index of the class of each in `classes`
    classes: Tensor  # those that occur


def patch_bank(frozen: FrozenBackbone, source: MaskedSource, indices: Sequence[int], *, patches: int) -> Bank:
    """Return up to so many patches with a class: as many of each image, drawn at random."""
    indices = [indices[position] for position in spread(len(indices), patches)]
    width, grid = frozen.model.width, frozen.model.grid_of(*frozen.transform.size)
    features = [torch.empty(0, width, device=frozen.device)]  # a process may have no image
    classes = [torch.empty(0, dtype=torch.uint8, device=frozen.device)]
    for batch in read_patches(frozen, source, rank_slice(indices), "patches to learn from"):
        of_patches = patch_classes(batch.masks, grid, len(source.classes)).flatten(1)
        keys = np.array(batch.indices)[:, None], np.arange(of_patches.shape[1])
        numbers = random_uniform(0, RngPurpose.EVALUATION, *keys)
        numbers += (of_patches == IGNORED).cpu().numpy()  # those come last
        drawn = np.argsort(numbers, axis=1)[:, : patches // len(indices)]
        chosen = torch.from_numpy(drawn).to(frozen.device)
        rows = batch.features.flatten(1, 2).gather(1, chosen[..., None].expand(-1, -1, width))
        of_rows = of_patches.gather(1, chosen)
        features.append(rows[of_rows != IGNORED])
        classes.append(of_rows[of_rows != IGNORED])
    occurring, targets = torch.unique(all_gather(torch.cat(classes)).long(), return_inverse=True)
    if len(occurring) < 2:
        content = f"only the class {source.classes[int(occurring[0])]}" if len(occurring) else "no class"
        raise ValueError(
            f"the patches to learn from have {content}, and telling classes apart takes two: look at the "
            "values of the masks and at ignore_value, which is none of them"
        )
    return Bank(all_gather(torch.cat(features)), targets, occurring)


class PixelClassifier:
    """Tell the class of every pixel from the features of patches, as a bank of others suggests."""

    def __init__(self, bank: Bank, *, k: int) -> None:
        self._bank, self._k, self._layer = bank, min(k, len(bank.targets)), linear_layer(bank)

    def predict(self, features: Tensor, size: Size) -> dict[str, Tensor]:
        """Return the classes (n, H, W) by neighbours and by the linear layer, from features (n, h, w, D)."""
        bank, k, (n, h, _, _), rows = self._bank, self._k, features.shape, features.flatten(0, 2)
        ranked = weighted_knn(bank.features, bank.targets, rows, k=[k])[k]
        scores = {
            "knn": F.one_hot(ranked[:, 0].to(rows.device), len(bank.classes)).float(),
            "linear": self._layer.scores(rows)[:, 0],
        }
        grids = {name: rearrange(score, "(n h w) c -> n c h w", n=n, h=h) for name, score in scores.items()}
        return {name: bank.classes[upsample(grid, size)] for name, grid in grids.items()}


def linear_layer(bank: Bank) -> LinearHeads:
    """Return the linear layer of all patches, with the C that is the best for a fifth of them."""
    # Neighbours in the bank are of one image: ten groups of them are held out, from all over the bank.
    held = torch.arange(len(bank.features), device=bank.targets.device) * 50 // len(bank.features) % 5 == 0
    fit = partial(sweep, classes=len(bank.classes), max_iterations=200)

    def right(trial: LogisticFit) -> int:
        return int(count_correct(trial.head, bank.features[held], bank.targets[held])[0])

    c = max(fit(bank.features[~held], bank.targets[~held], cs=CS), key=right).c
    (best,) = fit(bank.features, bank.targets, cs=[c])
    return best.head


def upsample(logits: Tensor, size: Size) -> Tensor:
    """Return the class (n, H, W) of every pixel by logits of patches (n, C, h, w), bilinearly resized."""
    # An image at a time: the scores of all classes and pixels of many would not fit in memory.
    resized = (F.interpolate(image, size=size, mode="bilinear") for image in torch.split(logits, 1))
    return torch.cat([image.argmax(1) for image in resized])


def count_pixels(predicted: Tensor, masks: Tensor, classes: int) -> Tensor:
    """Count the pixels of each image and class that are predicted rightly, predicted, and true: (n, 3, C)."""
    right = masks.masked_fill(masks != predicted, IGNORED)
    judged = predicted.masked_fill(masks == IGNORED, IGNORED)
    counts = [count_classes(pixels.flatten(1), classes) for pixels in (right, judged, masks)]
    return torch.stack(counts, dim=1)[..., :classes]


def mean_iou(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the mean over classes of intersection over union; classes that no mask has are left out."""
    shares = right / (predicted + true - right).clamp(min=1)
    return shares.masked_fill(true == 0, torch.nan).nanmean(dim=-1)


def pixel_accuracy(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the share of pixels that are predicted rightly."""
    return right.sum(-1) / true.sum(-1).clamp(min=1)


def pixel_figures(measured: Measured, classes: Sequence[str]) -> PixelFigures:
    """Return the figures of the pixels that were counted for mIoU."""
    right, predicted, true = (part.sum(0) for part in measured.parts)
    iou = 100 * right / (predicted + true - right).clamp(min=1)
    return PixelFigures(
        mean_iou=measured.interval,
        pixel_accuracy=replace(measured, figure=pixel_accuracy).interval,
        iou={name: float(iou[i]) for i, name in enumerate(classes) if true[i] > 0},
    )


def judge(
    frozen: FrozenBackbone, source: MaskedSource, indices: Sequence[int], classifier: PixelClassifier
) -> list[Measured]:
    """Return the mIoU of images by each of `JUDGES`; every process judges a share of the images."""
    classes = len(source.classes)
    judged = [torch.zeros(0, dtype=torch.long, device=frozen.device)]  # a process may have no image
    counts = [torch.zeros(0, len(JUDGES), 3, classes, dtype=torch.long, device=frozen.device)]
    for batch in read_patches(frozen, source, rank_slice(indices), "images to judge"):
        predicted = classifier.predict(batch.features, (batch.masks.shape[1], batch.masks.shape[2]))
        counts.append(torch.stack([count_pixels(of, batch.masks, classes) for of in predicted.values()], 1))
        judged.append(torch.as_tensor(batch.indices, device=frozen.device))
    images, pixels = all_gather(torch.cat(judged)).cpu().numpy(), all_gather(torch.cat(counts)).cpu()
    return [
        Measured(title=f"mIoU, {title}", images=images, parts=pixels[:, number].unbind(1), figure=mean_iou)
        for number, title in enumerate(JUDGES.values())
    ]
