"""Label propagation through the validation videos of DAVIS 2017 (Caron et al., 2021, table 5).

    python eval/davis.py DAVIS weights=dino_deitsmall16_pretrain.pth

DAVIS is the folder of the 480p set TrainVal: JPEGImages/480p, Annotations/480p, ImageSets/2017/val.txt.
Nothing is learned. The shorter side of a frame becomes 480 pixels, the longer is cut to a multiple of 64. A
patch takes the labels of the first frame and the 7 before: the mean of those of its 5 nearest patches within
12 rows and columns, weighted by exp(cosine / 0.1). `output` gets a folder of PNG masks for each video. J is
the overlap of an object with its true mask, F the accuracy of its boundary, both over all frames but the
first and the last, then over all objects.

Published J&F (J, F): ViT-S/16 61.8 (60.2, 63.4), ViT-B/16 62.3 (60.7, 63.9), ViT-S/8 69.9 (66.6, 73.1),
ViT-B/8 71.4 (67.9, 74.9). Frames are resized bicubically, where the 2021 code does it bilinearly; on the same
features labels equal those of that code to 5e-7.

C classes, (h, w) patches, d channels, n objects
"""

import math
import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from pydantic import Field
from torch import Tensor

from dino_vit.cli import run_program
from dino_vit.commands import Written
from dino_vit.config.commands import OVERWRITE
from dino_vit.config.outputs import check_outputs
from dino_vit.config.settings import Count, Dimension, FewOrZero, Positive, Settings, setting
from dino_vit.core import Size
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import format_table, progress
from dino_vit.eval.results import write_results
from dino_vit.models.backbone import Backbone, eval_mode
from dino_vit.views.eval_transform import eval_transform_of, resize
from dino_vit.views.pictures import save_png
from dino_vit.weights import load_backbone

BOUND = 0.008  # of the diagonal: how far a boundary may be from the true one
COSINES = 2**24  # in memory at a time


class DavisConfig(Settings):
    """Judge a frozen backbone by propagating the first mask of each video of DAVIS."""

    source: str = Field(description="folder of DAVIS 2017")
    weights: str = Field(description="run folder or weights file")
    size: Dimension = setting(480, "pixels of the shorter side of a frame")
    last_frames: Count = setting(7, "previous frames, beside the first, whose labels are passed on")
    radius: FewOrZero = setting(12, "rows and columns within which to search patches; 0: everywhere")
    k: Count = setting(5, "nearest patches whose labels are averaged")
    temperature: Positive = setting(0.1, "a patch weighs exp(cosine / temperature)")
    output: str = setting("davis", "folder for the masks and davis.json")
    overwrite: bool = OVERWRITE

    positional: ClassVar = ("source",)


def propagate_labels(
    target: Tensor,
    frames: Sequence[Tensor],
    labels: Sequence[Tensor],
    *,
    radius: int,
    k: int,
    temperature: float,
) -> Tensor:
    """Return soft labels (C, h, w) for the patches of a frame, by those of earlier frames.

    Features (h, w, d) are L2-normalised. Patches as near as the k-th count as well.
    """
    height, width, _ = target.shape
    keys = torch.cat([frame.flatten(0, 1) for frame in frames])
    values = torch.cat([label.flatten(1) for label in labels], dim=1)  # (C, keys)
    patch = torch.arange(height * width, device=target.device)
    row, column = patch // width, patch % width
    parts = []
    for part in torch.split(patch, max(1, COSINES // len(keys))):
        rows, columns = (row[part, None] - row).abs(), (column[part, None] - column).abs()
        near = (rows.le(radius) & columns.le(radius)) | (radius == 0)  # as in 2021 the whole frame
        cosines = target.flatten(0, 1)[part] @ keys.T
        cosines.masked_fill_(~near.repeat(1, len(frames)), -torch.inf)
        kth = cosines.topk(min(k, len(keys)), dim=1).values[:, -1:]
        weights = cosines.masked_fill_(cosines < kth, -torch.inf).div_(temperature).softmax(1)
        parts.append(values @ weights.T)
    return rearrange(torch.cat(parts, dim=1), "c (h w) -> c h w", h=height)


def classes_of_pixels(labels: Tensor, resized: Size, size: Size) -> Tensor:
    """Return the class of every pixel (H, W) by labels of patches, each class scaled to 0 to 1."""
    scores = F.interpolate(labels[None], size=resized, mode="bilinear")[0]
    low, high = scores.amin((1, 2), keepdim=True), scores.amax((1, 2), keepdim=True)
    # A class that is everywhere or nowhere stays as it is: scaling would make its rounding errors count.
    best = torch.where(high - low > 1e-6, (scores - low) / (high - low), scores).argmax(0)
    return F.interpolate(best[None, None].float(), size=size, mode="nearest-exact")[0, 0].long()


def region_similarity(predicted: Tensor, true: Tensor) -> Tensor:
    """Return J, the intersection over union of masks (n, H, W) of bool; 1 where both are empty."""
    common, either = (predicted & true).sum((1, 2)), (predicted | true).sum((1, 2))
    return torch.where(either > 0, common / either.clamp_min(1), 1.0)


def boundary_accuracy(predicted: Tensor, true: Tensor) -> Tensor:
    """Return F, the harmonic mean of precision and recall of the boundaries of masks (n, H, W) of bool."""
    radius = math.ceil(BOUND * math.hypot(*true.shape[1:]))
    ours, theirs = boundaries(predicted), boundaries(true)
    precision = _share(ours & dilate(theirs, radius), ours)
    recall = _share(theirs & dilate(ours, radius), theirs)
    total = precision + recall
    return torch.where(total > 0, 2 * precision * recall / total.clamp_min(1e-12), 0.0)


def _share(right: Tensor, marked: Tensor) -> Tensor:
    # DAVIS' value where a boundary is missing: nothing predicted is precise, nothing true is recalled.
    count = marked.sum((1, 2))
    return torch.where(count > 0, right.sum((1, 2)) / count.clamp_min(1), 1.0)


def boundaries(masks: Tensor) -> Tensor:
    """Mark the pixels of masks (n, H, W) that differ from the next one to the right, below or across."""
    # The last row and column are repeated, so that nothing differs beyond the image.
    padded = F.pad(masks[:, None].float(), (0, 1, 0, 1), mode="replicate")[:, 0].bool()
    right, below, across = padded[:, :-1, 1:], padded[:, 1:, :-1], padded[:, 1:, 1:]
    return (masks ^ right) | (masks ^ below) | (masks ^ across)


def dilate(masks: Tensor, radius: int) -> Tensor:
    """Mark the pixels of masks (n, H, W) that are at most `radius` from a marked one."""
    offsets = torch.arange(-radius, radius + 1, device=masks.device)
    disk = (offsets[:, None] ** 2 + offsets**2 <= radius**2).float()
    return F.conv2d(masks[:, None].float(), disk[None, None], padding=radius)[:, 0] > 0.5


def measure(predicted: Tensor, true: Tensor, objects: Tensor) -> Tensor:
    """Return J and F (n, 2) of the objects in a frame, by the values (H, W) of its pixels."""
    ours, theirs = (values == objects[:, None, None] for values in (predicted, true))
    return torch.stack([region_similarity(ours, theirs), boundary_accuracy(ours, theirs)], dim=1)


def read_mask(path: Path) -> Tensor:
    """Return the objects of the pixels of a frame (H, W); 0 is the background."""
    with Image.open(path) as image:
        return torch.from_numpy(np.array(image)).long()


def resized_to(size: Size, shorter: int, patch: Size) -> Size:
    """Return the size that a frame is resized to: 480 x 854 becomes 480 x 832."""
    sides = []
    for side, cell in zip(size, patch, strict=True):
        wanted = round(side * shorter / min(size))
        step = 64 if wanted > shorter and 64 % cell == 0 else cell
        sides.append(max(step, wanted // step * step))
    return sides[0], sides[1]


@torch.no_grad()
def patch_features(model: Backbone, path: Path, shorter: int) -> tuple[Tensor, Size]:
    """Return the L2-normalised features (h, w, d) of the patches of a frame, and the size that it had."""
    transform = eval_transform_of(model)
    with Image.open(path) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB"))).movedim(2, 0)
    height, width = resized_to((pixels.shape[1], pixels.shape[2]), shorter, model.patch_size)
    frame = resize(transform.pixels.conform(pixels), (height, width))
    tokens = model.forward_features(transform.normaliser(model.device)(frame[None]))[0, model.first_patch :]
    rows = model.grid_of(height, width)[0]
    return F.normalize(rearrange(tokens.float(), "(h w) d -> h w d", h=rows), dim=2), (height, width)


def follow(config: DavisConfig, name: str, model: Backbone) -> Tensor:
    """Write the masks of a video; return J and F (frames, n, 2) of its objects where they are judged."""
    images, masks = (Path(config.source) / kind / "480p" / name for kind in ("JPEGImages", "Annotations"))
    frames = sorted(images.glob("*.jpg"))
    if len(frames) < 3:
        raise ValueError(f"{images} has {len(frames)} frames, but the first and the last are not judged")
    truth = [masks / f"{frame.stem}.png" for frame in frames]
    mask, (features, resized) = read_mask(truth[0]), patch_features(model, frames[0], config.size)
    size, values = (mask.shape[0], mask.shape[1]), torch.unique(mask)
    nearest = F.interpolate(mask[None, None].float(), size=features.shape[:2], mode="nearest-exact")[0, 0]
    first = features, (nearest == values[:, None, None]).float().to(features.device)
    last, measured = deque[tuple[Tensor, Tensor]](maxlen=config.last_frames), []
    propagate = partial(propagate_labels, radius=config.radius, k=config.k, temperature=config.temperature)
    for index, frame in enumerate(frames):
        if index:
            features, _ = patch_features(model, frame, config.size)
            labels = propagate(features, *zip(first, *last, strict=True))
            last.append((features, labels))
            mask = values[classes_of_pixels(labels, resized, size).cpu()]
        write_mask(mask, Path(config.output) / name / truth[index].name, palette_of=truth[0])
        if 0 < index < len(frames) - 1:
            measured.append(measure(mask, read_mask(truth[index]), values[values > 0]))
    return torch.stack(measured)


def write_mask(mask: Tensor, path: Path, *, palette_of: Path) -> None:
    """Write a mask (H, W) with the palette of another file."""
    image = Image.fromarray(mask.byte().numpy())
    with Image.open(palette_of) as true:
        if palette := true.getpalette():
            image.putpalette(palette)
    save_png(image, path)


def run(config: DavisConfig) -> Written:
    """Propagate the masks of all videos, judge and write them."""
    folder = Path(config.output)
    names = (Path(config.source) / "ImageSets" / "2017" / "val.txt").read_text().split()
    annotations = Path(config.source) / "Annotations" / "480p"
    masks = (folder / name / mask.name for name in names for mask in (annotations / name).glob("*.png"))
    check_outputs(config, folder / "davis.json", *masks)
    model = load_backbone(config.weights).to(start_processes().device)
    if not model.has_patches:
        raise ValueError(f"{config.weights} has no patches: its features are made after pooling")
    videos = dict[str, list[tuple[float, float]]]()
    with eval_mode(model), progress("videos", len(names)) as advance:
        for name in names:
            measured = follow(config, name, model).mean(0)
            videos[name] = [(100 * j, 100 * f) for j, f in measured.tolist()]
            advance(1)
    objects = np.array([figures for video in videos.values() for figures in video])
    j, f = objects.mean(axis=0).tolist()
    path = folder / "davis.json"
    results = {"settings": config.model_dump(mode="json"), "J&F": (j + f) / 2, "J": j, "F": f}
    write_results(path, {**results, "videos": videos})
    rows = [
        [name, *(f"{value:.1f}" for value in np.mean(figures, axis=0))] for name, figures in videos.items()
    ]
    rows.append(["mean over objects", f"{j:.1f}", f"{f:.1f}"])
    text = f"{format_table(['%', 'J', 'F'], rows)}\nJ&F {(j + f) / 2:.1f} %\n\n{folder}/*/*.png\n{path}"
    return Written(path=path, text=text)


if __name__ == "__main__":
    sys.exit(run_program(DavisConfig, run))
