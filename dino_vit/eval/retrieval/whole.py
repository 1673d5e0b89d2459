"""Features of whole images that keep their aspect ratio, one by one, as the published protocols need them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_vit.core.distributed import all_gather, share
from dino_vit.core.progress import progress
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.source import Source
from dino_vit.eval.features.extraction import FeatureSpec, evaluating, in_batches
from dino_vit.eval.features.frozen import FrozenBackbone
from dino_vit.eval.maps.pictures import resize

Box = tuple[float, float, float, float]  # left, top, right, bottom
_READ = 32  # images at a time


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
    and at the bottom that fill no patch are cut off. Each process computes a share.
    """
    mine, normalise = share(range(len(source))), frozen.preparation.normaliser(frozen.device)

    def read(index: int) -> Tensor:
        try:
            image, box = read_image(source, index, frozen.preparation.pixels), boxes[index]
        except UnreadableImage as error:
            raise ValueError(f"all images are needed, and one cannot be read: {error}") from error
        if box is not None:
            left, top, right, bottom = (max(0, round(side)) for side in box)
            image = image[:, top:bottom, left:right]
            if not image.numel():
                raise ValueError(f"the box of {source.name(index)} has no pixel of the image")
        return resize(image, None, longest) if max(image.shape[1:]) > longest else image

    width = spec.shape(frozen.model, frozen.preparation.size)[0]
    found = [torch.zeros(0, width, device=frozen.device)]
    with progress(title, len(mine)) as advance, ThreadPoolExecutor(frozen.config.readers or 4) as pool:
        for indices in in_batches(mine, _READ):
            for image in pool.map(read, indices):
                found.append(_at_scales(frozen, normalise(image[None]), scales, spec))
                advance(1)
    return all_gather(torch.cat(found))


def _at_scales(frozen: FrozenBackbone, image: Tensor, scales: Sequence[float], spec: FeatureSpec) -> Tensor:
    patch, total = frozen.model.patch_size, []
    for scale in scales:
        scaled = image if scale == 1 else F.interpolate(image, scale_factor=scale, mode="bilinear")
        sides = zip(scaled.shape[-2:], patch, strict=True)
        height, width = (max(step, side // step * step) for side, step in sides)
        missing = max(0, width - scaled.shape[-1]), max(0, height - scaled.shape[-2])
        scaled = F.pad(scaled, (0, missing[0], 0, missing[1]))[..., :height, :width]
        enabled = frozen.autocast is not None
        with evaluating(frozen.model), torch.autocast(frozen.device.type, frozen.autocast, enabled=enabled):
            total.append(spec.of(frozen.model, scaled).float())
    return torch.stack(total).mean(0)
