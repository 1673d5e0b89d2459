"""Segmentation by frozen patches: by their nearest neighbours, and by a linear head as published.

    python eval/dense.py val masks=val_masks train=train train_masks=train_masks weights=runs/pretrain

A mask is a PNG with a palette, or grey with 8 bits, and has the name of its image. Its values are classes;
255 and those in `ignored` are none. Images without a mask are left out.

The protocol of DINOv2 (Oquab et al., 2023) and DINOv3 (Siméoni et al., 2025). The shorter side of an image
becomes that of the crop. The head, a BatchNorm and a linear layer, reads the patches of the last block or of
the last four. It learns from crops of images at 0.5 to 2 times that size, flipped or not: 16 a step, AdamW.
An image is judged by windows two thirds of a side apart, whose scores are averaged and resized to its mask.
mIoU is that of all pixels of all images. As published: size=512 (518 with patches of 14), steps=40000 and
blocks=1 or 4. Not done here: distorted colours, and avoiding crops that one class fills. By k-NN a patch has
the class that its 20 nearest of about 50,000 patches vote for.

Published mIoU in % of DINOv2, by a linear head on the last block, without scales (its column "lin."):
                     ADE20k  Cityscapes  Pascal VOC
    ViT-S/14           44.3        66.6        81.1
    ViT-g/14           49.0        71.3        83.0

Arguments for ADE20k, Cityscapes and Pascal VOC as they are unpacked; VOC's lists of masks are made by
`for s in train val; do sed s/$/.png/ ImageSets/Segmentation/$s.txt > SegmentationClass/$s.txt; done`:
    images/validation masks=annotations/validation
        train=images/training train_masks=annotations/training ignored=0
    leftImg8bit/val masks=gtFine/val train=leftImg8bit/train train_masks=gtFine/train
        suffixes=[_leftImg8bit,_gtFine_labelIds] ignored=[0,1,2,3,4,5,6,9,10,14,15,16,18,29,30]
    JPEGImages masks=SegmentationClass/val.txt train=JPEGImages train_masks=SegmentationClass/train.txt

n images or windows, (H, W) pixels, (h, w) patches, D channels, C classes
"""

import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from dino_vit.cli import run_program
from dino_vit.commands import Written
from dino_vit.config.commands import RESULTS, BackboneConfig, JsonFile
from dino_vit.config.settings import Count, Few, setting
from dino_vit.core import Size, log
from dino_vit.core.process import in_batches, read_ahead
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.core.text import format_table, plural, progress
from dino_vit.data.images.decode import read_image
from dino_vit.data.open import open_source
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.results import evaluation, output_of
from dino_vit.eval.sets import refuse_same_images
from dino_vit.eval.statistics import PerImageMetric, summed
from dino_vit.features.frozen import FrozenBackbone, check_finite, frozen_backbone
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import resize, resize_mask
from dino_vit.views.sampler import Sampler
from supervised import initial_weight

IGNORED = CLASSES = 255  # the value of pixels without a class, and the number of values that are one
BATCH = 16  # images in memory at a time, and crops of a step
SCALES = 0.5, 2.0  # of images that random crops are of
RATE, WEIGHT_DECAY, WARMUP = 1e-3, 1e-4, 1500 / 40_000  # warm-up as a share of the steps
EPOCHS, FEWEST_STEPS, MOST_STEPS = 32, 500, 40_000  # ADE20k's 40,000 steps are 32 epochs
JUDGES = {"knn": "k-NN of patches", "linear": "linear head"}


class DenseConfig(BackboneConfig):
    """Classify the pixels of images by the patches of a frozen backbone."""

    positional: ClassVar = ("source",)
    writes: ClassVar = "eval/dense"
    source: str = Field(description="images to judge: a folder, a list, archives, ...")
    masks: str = Field(description="their masks: a folder or a list of PNG files")
    train: str = Field(description="images to learn from")
    train_masks: str = Field(description="their masks")
    suffixes: tuple[str, str] = setting(("", ""), "ends of the names of images and of masks, without .png")
    ignored: tuple[Annotated[int, Field(ge=0, le=255)], ...] = setting(
        (), "values of pixels that belong to no class, beside 255"
    )
    blocks: Few = setting(1, "last blocks whose patches are joined; published: 1 or 4")
    k: Few = setting(20, "neighbours of a patch")
    patches: Count = setting(50_000, "patches to search neighbours among, about")
    steps: Count | None = setting(None, "of the linear head; null: 32 epochs, but from 500 to 40,000")
    output: JsonFile | None = RESULTS


class Windows(NamedTuple):
    """An image in windows, which cover it, and its mask."""

    number: int  # of the image
    size: Size  # of the resized image
    corners: list[tuple[int, int]]  # top and left of each window
    images: Tensor  # (n, channels, *window)
    mask: Tensor  # uint8 (H, W), as large as the image in its file


def window_starts(length: int, window: int) -> list[int]:
    """Return where windows along a side begin: two thirds of a window apart, the last at the end."""
    stride = max(1, window * 2 // 3)
    return [min(start, length - window) for start in range(0, length - window + stride, stride)]


class MaskedImages:
    """Images with masks, of the same names, and the backbone that makes features of their patches."""

    def __init__(self, config: DenseConfig, source: str, masks: str, frozen: FrozenBackbone) -> None:
        images, files = (open_source(each, labels="none") for each in (source, masks))
        ours, theirs = config.suffixes
        names = [os.path.splitext(images.name(i))[0].removesuffix(ours) + theirs for i in range(len(images))]
        index_of = {os.path.splitext(files.name(i))[0]: i for i in range(len(files))}
        chosen = [i for i, name in enumerate(names) if name in index_of]
        if not chosen:
            raise ValueError(f"no image of {source} has a mask in {masks}, such as {names[0]}.png")
        if left_out := len(names) - len(chosen):
            log.info("left out: %s of %s without a mask in %s", plural(left_out, "image"), source, masks)
        self.images, self.masks = images.subset(chosen), files.subset([index_of[names[i]] for i in chosen])
        self.classes = torch.arange(256, dtype=torch.uint8)  # by the value of a pixel
        self.classes[[*config.ignored]] = IGNORED
        self.frozen, self.spec = frozen, FeatureSpec(tokens="patches", blocks=config.blocks)

    def read_mask(self, index: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W)."""
        name, data = self.masks.name(index), bytes(self.masks.read(index))
        try:
            with Image.open(io.BytesIO(data)) as file:
                # Byte 24 has the bits of a value; Pillow stretches fewer than 8 to 255.
                if file.format == "PNG" and (file.mode in ("P", "1") or (file.mode == "L" and data[24] == 8)):
                    return self.classes[torch.from_numpy(np.array(file)).long()]
                given = f"{file.format} {file.mode}"
        except OSError as error:
            raise ValueError(f"the mask {name} cannot be read as an image") from error
        raise ValueError(f"the mask {name} must be a PNG with a palette, or grey with 8 bits, not {given}")

    def read(self, index: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return an image whose shorter side is that of the crop, times a scale, and its mask.

        With resize_mode=whole both sides are.
        """
        transform, mask = self.frozen.transform, self.read_mask(index)
        image = read_image(self.images, index, transform.pixels)
        if mask.shape != image.shape[1:]:
            sizes = f"{mask.shape[1]} × {mask.shape[0]} pixels, its image {image.shape[2]} × {image.shape[1]}"
            raise ValueError(f"the mask {self.masks.name(index)} has {sizes}")
        y, x = (crop / side for crop, side in zip(transform.size, mask.shape, strict=True))
        y, x = (y, x) if transform.resize_mode == "whole" else (max(y, x), max(y, x))
        size = max(1, round(mask.shape[0] * y * scale)), max(1, round(mask.shape[1] * x * scale))
        return resize(image, size, transform.interpolation), mask

    def read_windows(self, index: int) -> Windows:
        """Read an image and its mask, and cut the resized image into windows."""
        (image, mask), (h, w) = self.read(index), self.frozen.transform.size
        size = image.shape[1], image.shape[2]
        corners = [(y, x) for y in window_starts(size[0], h) for x in window_starts(size[1], w)]
        windows = torch.stack([image[:, y : y + h, x : x + w] for y, x in corners])
        return Windows(index, size, corners, windows, mask)

    def read_crop(self, crop: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return a random crop (channels, *crop), normalised, and the classes of its pixels."""
        index, number = crop
        u = random_uniform(0, RngPurpose.EVALUATION, number, index, np.arange(4)).tolist()
        image, mask = self.read(index, SCALES[0] + (SCALES[1] - SCALES[0]) * u[0])
        (h, w), size = self.frozen.transform.size, (image.shape[1], image.shape[2])
        y, x = (math.floor(u[1 + i] * (max(0, size[i] - side) + 1)) for i, side in enumerate((h, w)))
        image = self.frozen.transform.normaliser(image.device)(image[:, y : y + h, x : x + w])
        classes = resize_mask(mask, size)[y : y + h, x : x + w]
        border = 0, w - image.shape[2], 0, h - image.shape[1]  # of an image that is smaller than the crop
        image, classes = F.pad(image, border), F.pad(classes, border, value=IGNORED)
        return (image.flip(-1), classes.flip(-1)) if u[3] < 0.5 else (image, classes)

    def maps(self, images: Tensor) -> Tensor:
        """Return the features of the patches of normalised images, (n, D, h, w)."""
        frozen, batches = self.frozen, torch.split(images, self.frozen.batch_size)
        features = torch.cat([frozen.compute(batch.to(frozen.device), self.spec) for batch in batches])
        check_finite(features, frozen.model)
        return rearrange(features, "n (h w) d -> n d h w", h=frozen.model.grid_of(*frozen.transform.size)[0])

    def read_all(self, title: str) -> Iterator[tuple[Windows, Tensor]]:
        """Yield all images, and the maps of their windows."""
        indices, normalise = range(len(self.images)), self.frozen.transform.normaliser(self.frozen.device)
        with progress(title, len(indices)) as advance:
            for block in read_ahead(self.read_windows, in_batches(indices, BATCH), self.frozen.threads):
                maps = self.maps(normalise(torch.cat([image.images for image in block])))
                yield from zip(block, torch.split(maps, [len(image.images) for image in block]), strict=True)
                advance(len(block))


def count_classes(pixels: Tensor) -> Tensor:
    """Count the pixels of each class along the last dimension, and behind them the IGNORED ones."""
    counts = torch.zeros(*pixels.shape[:-1], CLASSES + 1, dtype=torch.long, device=pixels.device)
    return counts.scatter_add_(-1, pixels.long(), torch.ones_like(pixels, dtype=torch.long))


def patch_classes(masks: Tensor, grid: Sequence[int]) -> Tensor:
    """Return the class of most pixels of each patch, (n, h, w); IGNORED where most have none."""
    pixels = rearrange(masks, "n (h y) (w x) -> n h w (y x)", h=grid[0], w=grid[1])
    return count_classes(pixels).argmax(dim=3).to(torch.uint8)


def count_pixels(predicted: Tensor, mask: Tensor) -> Tensor:
    """Count the pixels (H, W) of each class that are predicted rightly, predicted, and true: (3, C)."""
    right = mask.masked_fill(mask != predicted, IGNORED)
    judged = predicted.masked_fill(mask == IGNORED, IGNORED)
    return torch.stack([count_classes(pixels.flatten()) for pixels in (right, judged, mask)])[:, :CLASSES]


def mean_iou(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the mean over classes of intersection over union; what is neither true nor predicted is none."""
    union = predicted + true - right
    return (right / union).masked_fill(union == 0, torch.nan).nanmean(dim=-1)


def pixel_accuracy(right: Tensor, predicted: Tensor, true: Tensor) -> Tensor:
    """Return the share of pixels that are predicted rightly."""
    return right.sum(-1) / true.sum(-1).clamp(min=1)


class Bank(NamedTuple):
    """Patches to learn from."""

    features: Tensor  # (patches, D)
    targets: Tensor  # index of the class of each in `classes`
    classes: Tensor  # those of the pixels of the images


def patch_bank(source: MaskedImages, patches: int) -> Bank:
    """Return about so many patches with a class: as many of each image, drawn at random."""
    features, targets, (h, w) = list[Tensor](), list[Tensor](), source.frozen.transform.size
    present = torch.zeros(CLASSES + 1, dtype=torch.long)
    for image, maps in source.read_all("patches to learn from"):
        mask = resize_mask(image.mask, image.size)
        masks = torch.stack([mask[y : y + h, x : x + w] for y, x in image.corners])
        classes = patch_classes(masks, maps.shape[2:]).flatten()
        u = random_uniform(0, RngPurpose.EVALUATION, image.number, np.arange(1 + len(classes)))
        ignored = classes.numpy() == IGNORED  # those come last
        drawn = np.argsort(u[1:] + ignored)[: int(patches / len(source.images) + u[0])]
        rows = torch.from_numpy(drawn[~ignored[drawn]])
        features.append(rearrange(maps, "n d h w -> (n h w) d")[rows.to(maps.device)])
        targets.append(classes[rows].long())
        present += count_classes(image.mask.flatten())
    occurring, known = present[:CLASSES].nonzero().flatten(), torch.cat(targets)
    if len(occurring) < 2 or not len(known):
        given = f"only the class {occurring[0]}" if len(occurring) == 1 else "no class"
        raise ValueError(f"the patches to learn from have {given}: look at the values of the masks")
    bank = torch.cat(features)
    return Bank(bank, torch.searchsorted(occurring, known).to(bank.device), occurring.to(bank.device))


def train_head(source: MaskedImages, bank: Bank, steps: int) -> nn.Module:
    """Return a BatchNorm and a linear layer that tell the classes of the bank, trained on random crops."""
    width, count, device = bank.features.shape[1], len(bank.classes), bank.features.device
    norm, layer = nn.BatchNorm2d(width, device=device), nn.Conv2d(width, count, 1, device=device)
    start = {"weight": initial_weight(count, width, 0)[..., None, None], "bias": torch.zeros(count)}
    layer.load_state_dict(start)
    head = nn.Sequential(norm, layer)
    # Fewer steps than published need a higher rate: 500 gave 16.7 % mIoU with 0.01, and 13.2 % with 0.001.
    peak = RATE * math.sqrt(MOST_STEPS / steps)
    optimizer, n = torch.optim.AdamW(head.parameters(), weight_decay=WEIGHT_DECAY), len(source.images)
    index_of = torch.full((256,), IGNORED, device=device)
    index_of[bank.classes] = torch.arange(count, device=device)
    order, numbers = (
        cache(Sampler(length=n, global_batch=1, seed=0).order),
        in_batches(range(steps * BATCH), BATCH),
    )
    batches = ([(int(order(number // n)[number % n]), number) for number in step] for step in numbers)
    crops = read_ahead(source.read_crop, batches, source.frozen.threads)
    with progress("Training the linear head, steps", steps) as advance:
        for step, batch in enumerate(crops):
            images, masks = (torch.stack(parts) for parts in zip(*batch, strict=True))
            factor = min(1.0, (step + 1) / (WARMUP * steps)) * (1 - step / steps)
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.zero_grad()
            pixels = F.interpolate(head(source.maps(images)), masks.shape[1:], mode="bilinear")
            targets = index_of[masks.to(device).long()]
            loss = F.cross_entropy(pixels, targets, ignore_index=IGNORED, reduction="sum")
            torch.autograd.backward(loss / (targets != IGNORED).sum().clamp(min=1))
            optimizer.step()
            advance(1)
    return head.eval()


def neighbour_scores(bank: Bank, maps: Tensor, k: int) -> Tensor:
    """Return 1 for the class that the neighbours of a patch vote for, and 0 for others, (n, C, h, w)."""
    rows, k = rearrange(maps, "n d h w -> (n h w) d"), min(k, len(bank.targets))
    best = weighted_knn(bank.features, bank.targets, rows, k=[k])[k][:, 0].to(rows.device)
    votes = F.one_hot(best, len(bank.classes)).float()
    return rearrange(votes, "(n h w) c -> n c h w", n=len(maps), h=maps.shape[2])


def predict(scores: Tensor, image: Windows) -> Tensor:
    """Return the best class of every pixel (H, W) by scores of the patches of windows (n, C, h, w)."""
    h, w = image.images.shape[2:]
    total, count = scores.new_zeros(scores.shape[1], *image.size), scores.new_zeros(image.size)
    for (y, x), window in zip(image.corners, torch.split(scores, 1), strict=True):
        total[:, y : y + h, x : x + w] += F.interpolate(window, (h, w), mode="bilinear")[0]
        count[y : y + h, x : x + w] += 1
    return F.interpolate(total.div_(count)[None], image.mask.shape, mode="bilinear")[0].argmax(0)


@torch.no_grad()
def judge_pixels(source: MaskedImages, bank: Bank, head: nn.Module, k: int) -> list[PerImageMetric]:
    """Return the mIoU of all images by each of `JUDGES`."""
    counts, images = list[Tensor](), np.arange(len(source.images))
    for image, maps in source.read_all("images to judge"):
        scores, mask = (neighbour_scores(bank, maps, k), head(maps)), image.mask.to(maps.device)
        counted = [count_pixels(bank.classes[predict(each, image)], mask) for each in scores]
        counts.append(torch.stack(counted).cpu())
    return [
        PerImageMetric(title=f"mIoU, {title}", images=images, parts=parts.unbind(1), metric=summed(mean_iou))
        for title, parts in zip(JUDGES.values(), torch.stack(counts).unbind(1), strict=True)
    ]


def run(config: DenseConfig) -> Written:
    """Learn from the patches of some images, judge the pixels of others, and write the JSON."""
    frozen = frozen_backbone(config)
    if not frozen.model.has_patches:
        raise ValueError(f"{config.weights} has no patches: its features are made after pooling")
    output = output_of(config, frozen.model.provenance.source)
    judged = MaskedImages(config, config.source, config.masks, frozen)
    train = MaskedImages(config, config.train, config.train_masks, frozen)
    refuse_same_images(config.source, judged.images, f"train={config.train}", train.images)
    bank, learned = patch_bank(train, config.patches), len(train.images)
    steps = config.steps or min(max(EPOCHS * learned // BATCH, FEWEST_STEPS), MOST_STEPS)
    measured = judge_pixels(judged, bank, train_head(train, bank, steps), config.k)
    results, rows = {"weights": frozen.describe_weights(), "settings": config.model_dump(mode="json")}, []
    for name, each in zip(JUDGES, measured, strict=True):
        right, predicted, true = (part.sum(0) for part in each.parts)
        union, pixels = predicted + true - right, replace(each, metric=summed(pixel_accuracy)).figure
        iou = {value: float(100 * right[value] / union[value]) for value in union.nonzero()[:, 0].tolist()}
        results[name] = {"mean_iou": each.figure, "pixel_accuracy": pixels, "iou": iou}
        rows.append([JUDGES[name], str(each.figure), str(pixels)])
    counts = {"images": len(judged.images), "images_learned_from": learned, "steps": steps}
    evaluation("dense", output, "linear mIoU", measured[1].figure, {**results, **counts})
    largest = f"the largest class, {int(true.argmax())}, has {100 * true.max() / true.sum():.1f} %"
    table = format_table(["", "mIoU %", "pixels %"], rows)
    return Written(path=output, text=f"{table}\n{largest} of the pixels\n\n{output}")


if __name__ == "__main__":
    sys.exit(run_program(DenseConfig, run))
