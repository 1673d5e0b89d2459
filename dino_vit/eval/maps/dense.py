"""Judge the features of patches by masks: learn the class of every pixel from some images, tell it of others.

n images, (H, W) pixels, (h, w) patches, C classes
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core import Size, log
from dino_vit.core.distributed import all_gather, rank_slice
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.core.text import progress
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.files import in_threads
from dino_vit.data.sources.masks import IGNORED, MaskedSource
from dino_vit.data.sources.source import spread
from dino_vit.eval.accuracy import Interval, Measured, measured_share, with_confidence
from dino_vit.eval.features import FeatureSpec, FrozenBackbone, in_batches
from dino_vit.eval.knn import weighted_knn
from dino_vit.eval.linear import LinearHeads, LogisticFit, count_correct, sweep
from dino_vit.eval.maps.attention import MASS, attended_patches, mass_mask
from dino_vit.eval.maps.pictures import as_picture, colour_classes
from dino_vit.models.backbone import Backbone
from dino_vit.models.positions import Grid
from dino_vit.models.vit import VisionTransformer

JUDGES = {"knn": "k-NN of patches", "linear": "linear layer"}
_MAX_ITERATIONS = 200  # of the linear layer


class AttendedPatches(FeatureSpec):
    """Patch tokens and, behind the channels of each, the attention of the CLS token to it, by head.

    Models of timm have no heads to show.
    """

    def shape(self, model: Backbone, size: Size) -> tuple[int, ...]:
        height, width = model.grid_of(*size)
        return height * width, model.width + model.heads

    def of(self, model: Backbone, images: Tensor) -> Tensor:
        if not isinstance(model, VisionTransformer):
            return model.forward_features(images)[:, model.first_patch :]
        tokens, attention = attended_patches(model, images)
        return torch.cat([tokens, rearrange(attention, "n heads p -> n p heads")], dim=2)


class Batch(NamedTuple):
    """Patches of some images, and the class of each pixel."""

    features: Tensor  # (n, h, w, width)
    attention: Tensor  # of the CLS token in the last block (n, heads, h, w)
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
        for batch in frozen.features(source, batches, AttendedPatches()):
            read = in_threads(read_mask, batch.indices.tolist())
            failures = [mask for mask in read if isinstance(mask, UnreadableImage)]
            for failure in (*batch.unreadable, *failures):
                log.warning("left out: %s", failure)
            masks = {row: mask for row, mask in enumerate(read) if isinstance(mask, Tensor)}
            if masks:
                values = rearrange(batch.values[list(masks)], "n (h w) d -> n h w d", h=height)
                yield Batch(
                    features=values[..., : model.width],
                    attention=rearrange(values[..., model.width :], "n h w heads -> n heads h w"),
                    masks=torch.stack(list(masks.values())).to(frozen.device),
                    indices=batch.indices[list(masks)].tolist(),
                )
            advance(len(read) + len(batch.unreadable))


def patch_classes(masks: Tensor, grid: Grid, classes: int) -> Tensor:
    """Return the class of most pixels of each patch, (n, h, w); IGNORED where most have none.

    The masks (n, H, W) are of uint8, and H and W are multiples of h and w.
    """
    masks = masks.long().masked_fill(masks == IGNORED, classes)
    pixels = rearrange(masks, "n (h y) (w x) -> n h w (y x)", h=grid[0], w=grid[1])
    counts = torch.zeros(*pixels.shape[:3], classes + 1, dtype=torch.long, device=masks.device)
    counts.scatter_add_(3, pixels, torch.ones_like(pixels))
    most = counts.argmax(dim=3)
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

    def __init__(self, bank: Bank, *, k: int, temperature: float, cs: Sequence[float]) -> None:
        self._bank, self._k, self._temperature = bank, min(k, len(bank.targets)), temperature
        self._layer, self.c = linear_layer(bank, cs)

    def predict(self, features: Tensor, size: Size) -> dict[str, Tensor]:
        """Return the classes (n, H, W) by neighbours and by the linear layer, from features (n, h, w, D)."""
        bank, k, (n, h, _, _), rows = self._bank, self._k, features.shape, features.flatten(0, 2)
        ranked = weighted_knn(bank.features, bank.targets, rows, k=[k], temperature=self._temperature)[k]
        scores = {
            "knn": F.one_hot(ranked[:, 0].to(rows.device), len(bank.classes)).float(),
            "linear": self._layer.scores(rows)[:, 0],
        }
        grids = {name: rearrange(score, "(n h w) c -> n c h w", n=n, h=h) for name, score in scores.items()}
        return {name: bank.classes[upsample(grid, size)] for name, grid in grids.items()}


def linear_layer(bank: Bank, cs: Sequence[float]) -> tuple[LinearHeads, float]:
    """Return the linear layer of all patches, with the C that is the best for a fifth of them; and that C."""
    # Neighbours in the bank are of one image: ten groups of them are held out, from all over the bank.
    held = torch.arange(len(bank.features), device=bank.targets.device) * 50 // len(bank.features) % 5 == 0
    fit = partial(sweep, classes=len(bank.classes), max_iterations=_MAX_ITERATIONS)

    def right(trial: LogisticFit) -> int:
        return int(count_correct(trial.head, bank.features[held], bank.targets[held])[0])

    c = max(fit(bank.features[~held], bank.targets[~held], cs=cs), key=right).c if len(cs) > 1 else cs[0]
    (best,) = fit(bank.features, bank.targets, cs=[c])
    return best.head, c


def upsample(logits: Tensor, size: Size) -> Tensor:
    """Return the class (n, H, W) of every pixel by logits of patches (n, C, h, w), bilinearly resized."""
    # An image at a time: the scores of all classes and pixels of many would not fit in memory.
    resized = (F.interpolate(image, size=size, mode="bilinear") for image in torch.split(logits, 1))
    return torch.cat([image.argmax(1) for image in resized])


def count_pixels(predicted: Tensor, masks: Tensor, classes: int) -> Tensor:
    """Count the pixels of each image and class that are predicted rightly, predicted, and true: (n, 3, C)."""
    judged = masks != IGNORED

    def count(pixels: Tensor, chosen: Tensor) -> Tensor:
        pixels = pixels.long().masked_fill(~chosen, classes).flatten(1)
        counts = torch.zeros(len(pixels), classes + 1, dtype=torch.long, device=pixels.device)
        return counts.scatter_add_(1, pixels, torch.ones_like(pixels))[:, :classes]

    right = count(masks, judged & (predicted == masks))
    return torch.stack([right, count(predicted, judged), count(masks, judged)], dim=1)


def mean_iou(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the mean over classes of intersection over union; classes that no mask has are left out."""
    shares = right / (predicted + true - right).clamp(min=1)
    return shares.masked_fill(true == 0, torch.nan).nanmean(dim=-1)


def pixel_accuracy(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the share of pixels that are predicted rightly."""
    return right.sum(-1) / true.sum(-1).clamp(min=1)


def best_head_overlap(attention: Tensor, masks: Tensor, background: int | None = None) -> Tensor:
    """Return Jaccard's index of the object in each image and the best head's mask of attention, (n,).

    A head's mask holds the fewest patches with 60 % of the attention (n, heads, h, w) of the CLS token. The
    object is all that is not background; without `background`, each class of the image is one, and the mean
    over them is taken. An image without an object has NaN. As in the paper (its figure 4), where on PASCAL
    VOC a ViT-S/16 of DINO reaches 45.9 %, a supervised one 27.3 % and an untrained one 22.0 %.
    """
    overlaps = torch.full((len(masks),), torch.nan)
    if not attention.shape[1]:
        return overlaps.to(masks.device)
    for image, (mask, heads) in enumerate(zip(masks.cpu(), mass_mask(attention.cpu(), MASS), strict=True)):
        marked = F.interpolate(heads[None].float(), size=mask.shape)[0].bool()  # (heads, H, W)
        judged = mask != IGNORED
        if background is None:
            objects = [mask == kind for kind in mask[judged].unique()]
        else:
            objects = [judged & (mask != background)]
        best = [
            ((marked & thing).sum((1, 2)) / (marked & judged | thing).sum((1, 2))).max()
            for thing in objects
            if thing.any()
        ]
        if best:
            overlaps[image] = torch.stack(best).mean()
    return overlaps.to(masks.device)


class PixelFigures(NamedTuple):
    """How well pixels are classified, in per cent."""

    mean_iou: Interval
    pixel_accuracy: Interval
    iou: dict[str, float]  # by class


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What was counted in the images of all processes."""

    indices: Tensor  # of the images, in the source (n,)
    counts: dict[str, Tensor]  # by judge: pixels that are right, predicted and true, by class (n, 3, C)
    overlaps: Tensor  # of the best head with the object in each image (n,)
    rows: list[list[Tensor]]  # pictures of this process's first images

    def figures(self, judge: str, classes: Sequence[str]) -> PixelFigures:
        """Return the figures of a judge."""
        counts = self.counts[judge]
        right, predicted, true = counts.sum(0)
        iou = 100 * right / (predicted + true - right).clamp(min=1)
        return PixelFigures(
            mean_iou=with_confidence(counts.unbind(1), mean_iou),
            pixel_accuracy=with_confidence(counts.unbind(1), pixel_accuracy),
            iou={name: float(iou[i]) for i, name in enumerate(classes) if true[i] > 0},
        )

    def measured(self) -> list[Measured]:
        """Return mIoU by judge, and attention if any image has an object, with each image's part."""
        images, with_object = self.indices.cpu().numpy(), ~self.overlaps.isnan()
        measured = [
            Measured(
                title=f"mIoU, {title}", images=images, parts=self.counts[name].unbind(1), figure=mean_iou
            )
            for name, title in JUDGES.items()
        ]
        if with_object.any():
            overlaps = self.overlaps[with_object]
            measured.append(measured_share("attention", images[with_object.cpu().numpy()], overlaps))
        return measured


def judge(
    frozen: FrozenBackbone,
    source: MaskedSource,
    indices: Sequence[int],
    classifier: PixelClassifier,
    *,
    background: int | None,
    pictures: int,
) -> Judged:
    """Judge this process's share of the images, and return what all processes counted."""
    # A process may have no image.
    no_counts = torch.zeros(0, 3, len(source.classes), dtype=torch.long, device=frozen.device)
    counts = {name: [no_counts] for name in JUDGES}
    overlaps = [torch.zeros(0, device=frozen.device)]
    judged = [torch.zeros(0, dtype=torch.long, device=frozen.device)]
    rows: list[list[Tensor]] = []
    for batch in read_patches(frozen, source, rank_slice(indices), "images to judge"):
        predicted = classifier.predict(batch.features, (batch.masks.shape[1], batch.masks.shape[2]))
        for name, pixels in predicted.items():
            counts[name].append(count_pixels(pixels, batch.masks, len(source.classes)))
        overlaps.append(best_head_overlap(batch.attention, batch.masks, background))
        judged.append(torch.as_tensor(batch.indices, device=frozen.device))
        for row, index in enumerate(batch.indices[: max(0, pictures - len(rows))]):
            image = as_picture(frozen.transform.read(source, index))
            maps = [batch.masks[row], *(pixels[row] for pixels in predicted.values())]
            rows.append([image, *(colour_classes(pixels.cpu(), image) for pixels in maps)])
    return Judged(
        indices=all_gather(torch.cat(judged)),
        counts={name: all_gather(torch.cat(of_judge)) for name, of_judge in counts.items()},
        overlaps=all_gather(torch.cat(overlaps)),
        rows=rows,
    )
