"""The 15 kinds of corruption of ImageNet-C (Hendrycks and Dietterich, 2019), each at severities 1 to 5.

The constants are the published ones for 224 × 224, given to what a backbone sees: the resized and cropped
image. What counts pixels in blurs, snow and elastic is scaled to other sides. Two kinds are not the
published ones to the letter: frost is generated, because the six photographs are not part of this library,
and elastic samples the image once for its two warps. Filters and random numbers are NumPy's and PyTorch's,
so single pixels differ from those of the published files everywhere.
"""

from collections.abc import Callable, Iterable
from functools import partial
from io import BytesIO
from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image as Pillow

from dino_vit.eval.disturbances.blurs import Image, defocus, gaussian, glass, motion, scale_of, zoom
from dino_vit.eval.disturbances.source import Disturbance, Picture
from dino_vit.eval.disturbances.weather import brighten, fog, frost, snow

GAUSSIAN_NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)  # standard deviation
SHOT_NOISE = (60, 25, 12, 5, 3)  # photons of a white pixel
IMPULSE_NOISE = (0.03, 0.06, 0.09, 0.17, 0.27)  # share of the values
CONTRAST = (0.4, 0.3, 0.2, 0.1, 0.05)
# Length of the shifts, sigma that smooths them, largest move of the affine map's three points.
ELASTIC = (
    (488, 170.8, 24.4),
    (488, 19.52, 48.8),
    (12.2, 2.44, 4.88),
    (17.08, 2.44, 4.88),
    (29.28, 2.44, 4.88),
)
PIXELATE = (0.6, 0.5, 0.4, 0.3, 0.25)  # of the side
JPEG = (25, 18, 15, 10, 7)  # quality

Corruption = Literal[
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic",
    "pixelate",
    "jpeg",
]
CORRUPTIONS: tuple[Corruption, ...] = get_args(Corruption)
SEVERITIES = (1, 2, 3, 4, 5)

Corrupt = Callable[[Image, int, np.random.Generator], Image]


def add_gaussian_noise(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Add normal noise to every value."""
    return image + np.float32(GAUSSIAN_NOISE[severity - 1]) * generator.standard_normal(
        image.shape, np.float32
    )


def add_shot_noise(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Count photons."""
    photons = SHOT_NOISE[severity - 1]
    return (generator.poisson(image * photons) / photons).astype(np.float32)


def add_impulse_noise(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Set a share of the values to 0 or 1."""
    hit, white = generator.random((2, *image.shape), np.float32)
    return np.where(hit <= IMPULSE_NOISE[severity - 1], (white <= 0.5).astype(np.float32), image)


def lower_contrast(image: Image, severity: int, _: np.random.Generator) -> Image:
    """Move every value towards the mean of its channel."""
    mean = image.mean(axis=(0, 1), keepdims=True)
    return mean + CONTRAST[severity - 1] * (image - mean)


def warp(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Warp by a random affine map and by smooth random shifts."""
    length, sigma, reach = (scale_of(image) * each for each in ELASTIC[severity - 1])
    sides = np.array(image.shape[:2])
    centre, arm = sides // 2, sides.min() / 3
    corners = centre + np.array([[arm, arm], [arm, -arm], [-arm, -arm]])
    moved = corners + generator.uniform(-reach, reach, corners.shape)
    origin_of = np.linalg.solve(np.column_stack([moved, np.ones(3)]), corners)
    shifts = [
        length
        * gaussian(generator.uniform(-1, 1, sides).astype(np.float32), sigma, truncate=3, border="symmetric")
        for _ in range(2)
    ]
    grid = (np.indices(tuple(sides)) + np.stack(shifts)).transpose(1, 2, 0)
    origin = grid @ origin_of[:2] + origin_of[2]  # (H, W, 2): row and column
    relative = 2 * origin / np.maximum(sides - 1, 1) - 1
    where = torch.from_numpy(relative[None, ..., ::-1].astype(np.float32))
    planes = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None]
    warped = F.grid_sample(planes, where, padding_mode="reflection", align_corners=True)
    return rearrange(warped, "1 c y x -> y x c").numpy()


def pixelate(image: Image, severity: int, _: np.random.Generator) -> Image:
    """Make the image smaller, and as large again."""
    picture = _picture(image)
    small = (max(1, int(side * PIXELATE[severity - 1])) for side in picture.size)
    reduced = picture.resize(tuple(small), Pillow.Resampling.BOX)  # type: ignore[arg-type]
    return _values(reduced.resize(picture.size, Pillow.Resampling.BOX))


def compress(image: Image, severity: int, _: np.random.Generator) -> Image:
    """Compress as JPEG."""
    file = BytesIO()
    _picture(image).save(file, "JPEG", quality=JPEG[severity - 1])
    return _values(Pillow.open(file).convert("RGB"))


_FUNCTIONS: dict[Corruption, Corrupt] = {
    "gaussian_noise": add_gaussian_noise,
    "shot_noise": add_shot_noise,
    "impulse_noise": add_impulse_noise,
    "defocus_blur": defocus,
    "glass_blur": glass,
    "motion_blur": motion,
    "zoom_blur": zoom,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brighten,
    "contrast": lower_contrast,
    "elastic": warp,
    "pixelate": pixelate,
    "jpeg": compress,
}


def corruptions(kinds: Iterable[Corruption] = CORRUPTIONS) -> list[Disturbance]:
    """Return all severities of some kinds, each kind from weak to strong."""
    return [
        Disturbance(kind, severity, partial(_corrupt, _FUNCTIONS[kind]))
        for kind in kinds
        for severity in SEVERITIES
    ]


def _corrupt(function: Corrupt, picture: Picture, severity: float, generator: np.random.Generator) -> Picture:
    changed = function(picture.astype(np.float32) / np.float32(255), int(severity), generator)
    return np.asarray(changed.clip(0, 1) * 255).astype(np.uint8)  # cut off, as published


def _picture(image: Image) -> Pillow.Image:
    return Pillow.fromarray(np.rint(image * 255).astype(np.uint8))


def _values(picture: Pillow.Image) -> Image:
    return np.asarray(picture, np.float32) / np.float32(255)
