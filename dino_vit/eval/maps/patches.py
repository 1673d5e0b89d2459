"""Patches of images with masks: read them, and learn from some to tell the classes of others."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.core import log
from dino_vit.core.distributed import all_gather, share
from dino_vit.core.progress import progress
from dino_vit.core.randomness import RngPurpose, random_uniform
from dino_vit.core.sizes import Size
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.files import in_threads
from dino_vit.data.sources.masks import IGNORED, MaskedSource
from dino_vit.data.sources.source import spread
from dino_vit.eval.classification.knn import weighted_knn
from dino_vit.eval.classification.linear import LinearHeads, sweep
from dino_vit.eval.features.extraction import FeatureSpec, in_batches
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.eval.maps.attention import attended_patches
from dino_vit.eval.maps.dense import patch_classes, upsample
from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer

MOST_ITERATIONS = 200  # of the linear layer


class AttendedPatches(FeatureSpec):
    """Patch tokens, and behind the channels of each the attention that the heads of the CLS token pay it.

    Models of timm have no such heads.
    """

    def shape(self, model: Backbone, size: Size) -> tuple[int, ...]:
        height, width = model.grid_of(*size)
        return height * width, model.width + model.heads

    def of(self, model: Backbone, images: Tensor) -> Tensor:
        if not isinstance(model, VisionTransformer):
            return model.forward_features(images)[:, model.first_patch :]
        tokens, attention = attended_patches(model, images)
        return torch.cat([tokens, rearrange(attention, "b h n -> b n h")], dim=2)


class Batch(NamedTuple):
    """Patches of some images, and the class of each pixel."""

    features: Tensor  # (images, h, w, width)
    attention: Tensor  # of the CLS token in the last block (images, heads, h, w)
    masks: Tensor  # uint8 (images, H, W)
    indices: list[int]


def read_patches(
    frozen: FrozenBackbone, source: MaskedSource, places: Sequence[int], title: str
) -> Iterator[Batch]:
    """Yield batches of images in order, their masks cropped as the images are; name those left out."""
    grid = frozen.model.grid_of(*frozen.preparation.size)
    if not frozen.model.has_patches:
        raise ValueError(f"{frozen.config.weights} has no patches: its features are made after pooling")

    def read_mask(index: int) -> Tensor | UnreadableImage:
        try:
            return frozen.preparation.place_mask(source.mask(index))
        except UnreadableImage as error:
            return error

    with progress(title, len(places)) as advance:
        extraction = frozen.extraction(source, AttendedPatches())
        for found in extraction(in_batches(places, frozen.config.batch_size)):
            indices: list[int] = found.indices.tolist()
            read = in_threads(read_mask, indices)
            for error in (*found.unreadable, *(mask for mask in read if isinstance(mask, UnreadableImage))):
                log.warning("left out: %s", error)
            masks = {row: mask for row, mask in enumerate(read) if isinstance(mask, Tensor)}
            if masks:
                rows = list(masks)
                values = rearrange(found.values[rows], "b (h w) d -> b h w d", h=grid[0])
                features, attention = torch.split(values, [frozen.model.width, frozen.model.heads], dim=3)
                yield Batch(
                    features,
                    rearrange(attention, "b h w d -> b d h w"),
                    torch.stack(list(masks.values())).to(frozen.device),
                    [indices[row] for row in rows],
                )
            advance(len(indices) + len(found.unreadable))


class Bank(NamedTuple):
    """Patches to learn from."""

    features: Tensor  # (patches, width)
    targets: Tensor  # index of the class of each in `classes`
    classes: Tensor  # those that occur


def patch_bank(frozen: FrozenBackbone, source: MaskedSource, places: Sequence[int], *, patches: int) -> Bank:
    """Return up to so many patches with a class: as many of each image, drawn at random."""
    places = [places[place] for place in spread(len(places), patches)]
    each, grid = patches // len(places), frozen.model.grid_of(*frozen.preparation.size)
    features = [torch.empty(0, frozen.model.width, device=frozen.device)]
    classes = [torch.empty(0, dtype=torch.uint8, device=frozen.device)]
    for batch in read_patches(frozen, source, share(places), "patches to learn from"):
        of_patches = patch_classes(batch.masks, grid, len(source.classes)).flatten(1)
        keys = np.array(batch.indices)[:, None], np.arange(of_patches.shape[1])
        numbers = random_uniform(0, RngPurpose.EVALUATION, *keys)
        numbers += (of_patches == IGNORED).cpu().numpy()  # those come last
        chosen = torch.from_numpy(np.argsort(numbers, axis=1)[:, :each]).to(frozen.device)
        rows = batch.features.flatten(1, 2).gather(1, chosen[..., None].expand(-1, -1, frozen.model.width))
        known = of_patches.gather(1, chosen)
        features.append(rows[known != IGNORED])
        classes.append(known[known != IGNORED])
    known = all_gather(torch.cat(classes))
    occurring, targets = torch.unique(known.long(), return_inverse=True)
    if len(occurring) < 2:
        found = f"only the class {source.classes[int(occurring[0])]}" if len(occurring) else "no class"
        raise ValueError(
            f"the patches to learn from have {found}, and telling classes apart takes two: look at the "
            "values of the masks and at ignore_value, which is none of them"
        )
    return Bank(all_gather(torch.cat(features)), targets, occurring)


class PixelClassifier:
    """Tell the class of every pixel from the features of patches, as a bank of others suggests."""

    def __init__(self, bank: Bank, *, k: int, temperature: float, cs: Sequence[float]) -> None:
        self._bank, self._k, self._temperature = bank, k, temperature
        self._layer, self.c = linear_layer(bank, cs)

    def predict(self, features: Tensor, size: Size) -> dict[str, Tensor]:
        """Return the classes (n, H, W) by neighbours and by the linear layer, from features (n, h, w, D)."""
        bank, (n, h, w, _) = self._bank, features.shape
        rows = features.flatten(0, 2)
        k = min(self._k, len(bank.targets))
        ranked = weighted_knn(bank.features, bank.targets, rows, k=[k], temperature=self._temperature)
        nearest = ranked[k][:, 0].to(rows.device)
        scores = {
            "knn": F.one_hot(nearest, len(bank.classes)).float(),
            "linear": self._layer.scores(rows)[:, 0],
        }
        shape = {"b": n, "h": h, "w": w}
        return {
            name: bank.classes[upsample(rearrange(score, "(b h w) c -> b c h w", **shape), size)]
            for name, score in scores.items()
        }


def linear_layer(bank: Bank, cs: Sequence[float]) -> tuple[LinearHeads, float]:
    """Return the linear layer of all patches, with the penalty that is the best for a fifth of them."""
    # Neighbours in the bank are of one image: ten groups of them are held out, from all over the bank.
    held = torch.arange(len(bank.features), device=bank.targets.device) * 50 // len(bank.features) % 5 == 0
    fit = partial(sweep, classes=len(bank.classes), max_iterations=MOST_ITERATIONS)

    def right(head: LinearHeads) -> int:
        best = head.scores(bank.features[held])[:, 0].argmax(1)
        return int((best == bank.targets[held]).sum())

    trials = fit(bank.features[~held], bank.targets[~held], cs=cs) if len(cs) > 1 else ()
    c = max(trials, key=lambda trial: right(trial.head)).c if len(cs) > 1 else cs[0]
    (chosen,) = fit(bank.features, bank.targets, cs=[c])
    return chosen.head, c
