"""Features of whole images that keep their aspect ratio, one by one, as the published protocols need them."""

from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.source import Source
from dino_vit.eval.features.extraction import Extraction, Features, FeatureSpec, in_batches
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.eval.maps.pictures import resize

Box = tuple[float, float, float, float]  # left, top, right, bottom
_AHEAD = 32  # images that are read while others are computed


def whole_features(
    frozen: FrozenBackbone,
    source: Source,
    boxes: Sequence[Box | None],
    *,
    longest: int,
    scales: Sequence[float],
    spec: FeatureSpec,
    title: str,
) -> Tensor:
    """Return the features (n, D) of images, or of boxes of them, whose longer side is at most `longest`.

    With several scales, their mean, as in the 2021 code: the input is resized bilinearly. Pixels at the right
    and at the bottom that fill no patch are cut off.
    """
    usual = vars(frozen.extraction(source, spec))
    whole = WholeExtraction(**usual, boxes=boxes, longest=longest, scales=scales)
    stored = frozen.cached(whole, title=title)
    if stored.unreadable:
        raise ValueError(f"all images are needed, and one cannot be read: {stored.unreadable[0]}")
    return torch.from_numpy(stored.values).to(frozen.device)


@dataclass(kw_only=True)
class WholeExtraction(Extraction):
    """Send images, or boxes of them, through a backbone at their own aspect ratio."""

    boxes: Sequence[Box | None]
    longest: int
    scales: Sequence[float]

    @property
    def described(self) -> dict[str, Any]:
        return {"boxes": list(self.boxes), "longest": self.longest, "scales": list(self.scales)}

    def __call__(self, batches: Iterable[Sequence[int]]) -> Generator[Features]:
        """Yield the features of each batch of indices."""
        normalise = self.preparation.normaliser(self.device)
        with ThreadPoolExecutor(self.threads) as pool:
            for indices in batches:
                found, kept, unreadable = [self.empty()], list[int](), list[UnreadableImage]()
                ahead = (pool.map(self._read, part) for part in in_batches(indices, _AHEAD))
                for index, image in zip(indices, chain.from_iterable(ahead), strict=True):
                    if isinstance(image, UnreadableImage):
                        unreadable.append(image)
                    else:
                        kept.append(index)
                        found.append(self._at_scales(normalise(image[None])))
                yield Features(torch.cat(found), torch.tensor(kept, dtype=torch.long), tuple(unreadable))

    def _read(self, index: int) -> Tensor | UnreadableImage:
        try:
            image, box = read_image(self.source, index, self.preparation.pixels), self.boxes[index]
        except UnreadableImage as error:
            return error
        if box is not None:
            left, top, right, bottom = (max(0, round(side)) for side in box)
            image = image[:, top:bottom, left:right]
            if not image.numel():
                raise ValueError(f"the box of {self.source.name(index)} has no pixel of the image")
        return resize(image, None, self.longest) if max(image.shape[1:]) > self.longest else image

    def _at_scales(self, image: Tensor) -> Tensor:
        patch, total = self.model.patch_size, []
        for scale in self.scales:
            scaled = image if scale == 1 else F.interpolate(image, scale_factor=scale, mode="bilinear")
            sides = zip(scaled.shape[-2:], patch, strict=True)
            height, width = (max(step, side // step * step) for side, step in sides)
            missing = max(0, width - scaled.shape[-1]), max(0, height - scaled.shape[-2])
            total.append(self.compute(F.pad(scaled, (0, missing[0], 0, missing[1]))[..., :height, :width]))
        return torch.stack(total).mean(0)
