"""The map of a run's images: their positions, neighbours, clusters, thumbnails and attention.

n images, k neighbours, c channels, y x rows and columns
"""

import base64
import io
import math
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.core.progress import progress
from dino_vit.core.sizes import Size
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.open import Source
from dino_vit.eval.features.extraction import evaluating, in_batches
from dino_vit.eval.maps.attention import cls_attention, pad, with_attention
from dino_vit.eval.maps.pictures import as_picture, resize, shorten
from dino_vit.eval.neighbours import nearest
from dino_vit.models.backbone import Backbone
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import fit, preparation_of
from dino_vit.weights import load_backbone
from dino_vit.weights.heads import has_heads, load_teacher

BATCH = 64
NEIGHBOURS = 12
MAX_IMAGES = 6000
# The page should stay below 5 MB. Of these, the names of all images, the thumbnails in base64, and the
# attention maps before base64 (which makes them a third longer) take at most:
NAME_BYTES, THUMBNAIL_BYTES, ATTENTION_BYTES = 350_000, 2_200_000, 400_000
MAX_NAME = 120  # characters
MAX_ATTENTION_ROWS = 16
# Side and WebP quality of the thumbnails, best first; the first that fits is used.
THUMBNAILS = ((64, 80), (64, 65), (48, 65), (40, 60), (32, 60), (32, 40), (24, 40), (16, 40))

PERPLEXITY = 30  # of t-SNE: about how many neighbours of an image it tries to keep
MIN_IMAGES, MIN_TSNE_IMAGES = 3, 8
TINY = 1e-30

Positions = NDArray[np.float32]  # (n, 2)


class LoadedTeacher:
    """The teacher of a checkpoint, on a device."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self.head, self.center = None, torch.zeros(())
        if has_heads(checkpoint):
            found = load_teacher(checkpoint)
            assert found.network
            self.backbone, self.head = found.network.to(device).backbone, found.network.head
            self.center = found.centers["loss.center"].to(device)
        else:
            self.backbone = load_backbone(checkpoint.path).to(device)
        self.preparation = preparation_of(self.backbone)
        self.normalise = self.preparation.normaliser(device)

    @property
    def has_attention(self) -> bool:
        return isinstance(self.backbone, VisionTransformer)

    def attention(self, images: Tensor) -> Tensor:
        """Return the attention of the CLS token in the last block, by head: (n, heads, y, x)."""
        padded = pad(self.normalise(images), self.backbone.patch_size)
        return cls_attention(with_attention(self.backbone), padded).float().cpu()

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the CLS features of images and, of each, the prototype with the highest centred score.

        Without a head, as of a student that imitates features, that is always the first.
        """
        with evaluating(self.backbone):
            features = self.backbone.forward_cls(self.normalise(images)).float()
            scores = self.head(features) - self.center if self.head else features.new_zeros(len(features), 1)
            prototypes = scores.argmax(dim=-1)
        return features.cpu(), prototypes.cpu()


@dataclass(frozen=True, kw_only=True)
class ImageMap:
    """Images of a source and what a teacher makes of them, in one order."""

    indices: list[int]
    names: list[str]
    labels: list[str | None]
    prototypes: Tensor  # (n,)
    neighbours: Tensor  # (n, k) positions in this map, the nearest first
    cosines: Tensor  # (n, k)
    positions: dict[str, Positions]  # by the name of the method
    thumbnails: Tensor  # uint8 (n, 3, y, x)
    attention: Tensor | None  # (n, y, x); None of a network without heads to show
    notes: list[str]  # what is missing, and why


def build_map(teacher: LoadedTeacher, source: Source, indices: list[int]) -> ImageMap:
    """Compute the map of some images of a source."""
    kept, outputs = _outputs(teacher, source, indices)
    if len(kept) < MIN_IMAGES:
        raise ValueError(
            f"{len(kept)} of {len(indices)} images could be read; a map needs at least {MIN_IMAGES}"
        )
    features, prototypes, thumbnails, *attention = outputs
    features = F.normalize(features, dim=-1)
    cosines, neighbours = nearest(features, features, k=min(NEIGHBOURS, len(kept) - 1), own=0)
    positions, notes = {"PCA": pca(features)}, []
    if len(kept) < MIN_TSNE_IMAGES:
        notes.append(f"The map has no t-SNE layout, which needs at least {MIN_TSNE_IMAGES} images.")
    elif find_spec("sklearn") is None:
        notes.append("For a t-SNE layout of the map, run `pip install scikit-learn` and repeat the report.")
    else:
        log.info("computing the t-SNE of %d images ...", len(kept))
        positions = {"t-SNE": tsne(features), **positions}
    if len(kept) < len(indices):
        notes.append(f"Unreadable images, left out of the map: {len(indices) - len(kept)}.")
    labels = [source.label(index) for index in kept]
    return ImageMap(
        indices=kept,
        names=[shorten(source.name(index), min(MAX_NAME, NAME_BYTES // len(kept))) for index in kept],
        labels=[None if label is None else source.classes[label] for label in labels],
        prototypes=prototypes,
        neighbours=neighbours,
        cosines=cosines,
        positions=positions,
        thumbnails=thumbnails,
        attention=attention[0] if attention else None,
        notes=notes,
    )


def _outputs(teacher: LoadedTeacher, source: Source, indices: list[int]) -> tuple[list[int], list[Tensor]]:
    """Return the readable indices and, of each, its features, prototype, thumbnail and attention."""
    size = large = teacher.preparation.size
    if teacher.has_attention:
        large = _attention_size(teacher.backbone, len(indices))
    kept: list[int] = []
    parts: list[tuple[Tensor, ...]] = []
    with progress("Computing features and attention", len(indices)) as advance:
        for batch in in_batches(indices, BATCH):
            images, larger = [], []
            for index in batch:
                with suppress(UnreadableImage):
                    image = read_image(source, index, teacher.preparation.pixels)
                    images.append(fit(image, size))
                    larger.append(fit(image, large))
                    kept.append(index)
            if images:
                attention = []
                if teacher.has_attention:
                    attention.append(teacher.attention(torch.stack(larger)).mean(dim=1))
                pictures = [resize(as_picture(image), None, THUMBNAILS[0][0]) for image in larger]
                parts.append((*teacher.embed(torch.stack(images)), torch.stack(pictures), *attention))
            advance(len(batch))
    return kept, [torch.cat(part) for part in zip(*parts, strict=True)]


def _attention_size(backbone: Backbone, images: int) -> Size:
    """Return the input size whose patch grid fits the page, at least the training size."""
    (h, w), patch = backbone.grid_of(*backbone.image_size), backbone.patch_size
    factor = max(1.0, _attention_rows(images) / min(h, w))
    return round(h * factor) * patch[0], round(w * factor) * patch[1]


def _attention_rows(images: int) -> int:
    return min(MAX_ATTENTION_ROWS, math.isqrt(ATTENTION_BYTES // images))


def pca(features: Tensor) -> Positions:
    """Return the first two principal components of features (n, d), with the same signs on every machine."""
    centred = features.double() - features.double().mean(dim=0)
    _, directions = torch.linalg.eigh(centred.T @ centred)
    positions = centred @ directions[:, -2:].flip(1)
    signs = positions.gather(0, positions.abs().argmax(dim=0, keepdim=True)).sign()
    return (positions * signs).float().numpy()


def tsne(features: Tensor) -> Positions:
    """Return the t-SNE of features (n, d) of unit length."""
    from sklearn.manifold import TSNE

    # Like init="pca", which divides by zero where a collapse has made all features equal.
    start = pca(features)
    start *= 1e-4 / max(float(start.std()), TINY)
    perplexity = min(PERPLEXITY, (len(features) - 1) / 3)
    positions: Positions = TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(
        features.numpy()
    )
    return positions


def data_uri(picture: Tensor, *, quality: int = 80) -> str:
    """Return a picture (3, y, x) as a WebP inside a `data:` address."""
    buffer = io.BytesIO()
    pixels = rearrange(picture, "c y x -> y x c").contiguous().numpy()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=quality, method=4)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def build_atlas(images: Tensor, budget: int) -> dict[str, Any]:
    """Join pictures (n, 3, y, x), row by row, into one of at most `budget` bytes, coarser if necessary."""
    columns = math.ceil(math.sqrt(len(images)))
    cells = torch.cat([images, images.new_zeros(-len(images) % columns, *images.shape[1:])])
    for side, quality in THUMBNAILS:
        small = torch.stack([resize(cell, None, side) for cell in cells])
        picture = rearrange(small, "(row column) c y x -> c (row y) (column x)", column=columns)
        uri = data_uri(picture, quality=quality)
        if len(uri) <= budget:
            return {"uri": uri, "columns": columns, "size": list(small.shape[-2:])}
    raise ValueError(f"{len(images):,} images do not fit into the page; use fewer, such as images=3000")


def to_json(found: ImageMap) -> dict[str, Any]:
    """Return a map as `explorer.js` reads it."""
    classes = sorted({label for label in found.labels if label is not None})
    layouts = []
    for name, positions in found.positions.items():
        # A grid of 65536 x 65536 that keeps the aspect of the map.
        low, high = positions.min(axis=0), positions.max(axis=0)
        span = max(float((high - low).max()), TINY)
        centred = (positions - (low + high) / 2) / span + 0.5
        grid = np.rint(np.clip(centred, 0, 1) * 65535).astype(np.uint16)
        layouts.append({"name": name, "positions": packed(grid)})
    return {
        "count": len(found.indices),
        "names": found.names,
        "classes": classes,
        "labels": [-1 if label is None else classes.index(label) for label in found.labels],
        "clusters": found.prototypes.tolist(),
        "layouts": layouts,
        "k": found.neighbours.shape[1],
        "neighbours": packed(found.neighbours.numpy().astype(np.uint16)),
        "similarities": packed(found.cosines.numpy()),
        "thumbnails": build_atlas(found.thumbnails, THUMBNAIL_BYTES),
        "attention": None if found.attention is None else _packed_maps(found.attention),
    }


def _packed_maps(maps: Tensor) -> dict[str, Any]:
    """Return maps (n, y, x) with a byte per patch, averaged over neighbours if they are too many."""
    rows = _attention_rows(len(maps))
    size = min(rows, maps.shape[-2]), min(rows, maps.shape[-1])
    maps = F.adaptive_avg_pool2d(maps[:, None], size)[:, 0]
    maps = 255 * (maps / maps.amax(dim=(-2, -1), keepdim=True).clamp_min(TINY))
    return {"maps": packed(maps.round().to(torch.uint8).numpy()), "size": size}


def packed(values: NDArray[np.generic]) -> str:
    """Return an array as base64 of its bytes, little-endian on every machine."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()
