"""Snow, frost, fog and light as in ImageNet-C, on images (H, W, 3) with values from 0 to 1."""

import numpy as np
from PIL import Image as Pillow

from dino_vit.eval.disturbances.blurs import Image, enlarged, gaussian, scale_of, streak

# Mean and deviation of the noise, its enlargement, what is too dark to be a flake, radius and sigma of the
# streaks, what is left of the picture's colours.
SNOW = (
    (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
    (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
    (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
    (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
    (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
)
FROST = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))  # shares of picture and ice
FOG = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))  # thickness, decay of the clouds' roughness
BRIGHTNESS = (0.1, 0.2, 0.3, 0.4, 0.5)
_GREY = np.array([0.299, 0.587, 0.114], np.float32)
_ICE = np.array([0.82, 0.93, 1.0], np.float32)


def snow(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Let snow fall, and whiten what is below it."""
    mean, deviation, factor, darkest, radius, sigma, left = SNOW[severity - 1]
    flakes = mean + deviation * generator.standard_normal(image.shape[:2], np.float32)
    flakes = np.array(enlarged(Pillow.fromarray(flakes), factor), np.float32)
    flakes[flakes < darkest] = 0
    flakes = streak(flakes.clip(0, 1), radius, sigma, generator.uniform(-135, -45))
    white = np.maximum(image, (image @ _GREY)[..., None] * 1.5 + 0.5)
    return left * image + (1 - left) * white + (flakes + np.rot90(flakes, 2))[..., None]


def frost(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Look through an icy window."""
    picture, ice = FROST[severity - 1]
    return picture * image + ice * ice_texture(image.shape[0], image.shape[1], generator)


def ice_texture(height: int, width: int, generator: np.random.Generator) -> Image:
    """Return generated ice (H, W, 3): feathers of needles in several directions, in patches.

    The published frost is cut out of six photographs, which are not used here.
    """
    side = max(height, width)
    needles = np.zeros((side, side), np.float32)
    turn = generator.uniform(0, 120)
    for direction in (0, 120, 240):
        seeds = np.float32(0.5) * (generator.random((side, side), np.float32) > 0.97)
        where = clouds(side, 1.6, generator)  # each direction has its own patches
        needles += streak(seeds, 14, 9, turn + direction) * where**2
    needles = needles / np.maximum(np.quantile(needles, 0.98), 1e-6)  # of few pixels there may be no needle
    cover = clouds(side, 1.8, generator)
    grain = gaussian(generator.random((side, side), np.float32), 1.2 * scale_of(needles))
    ice = (0.25 + 0.75 * cover) * (0.3 + 0.9 * needles) + 0.3 * (grain - 0.5)
    return ice.clip(0, 1).astype(np.float32)[:height, :width, None] * _ICE


def fog(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Add clouds, and reduce all to the largest value that the image had."""
    thickness, decay = FOG[severity - 1]
    largest = image.max()
    drawn = clouds(max(image.shape[:2]), decay, generator)[: image.shape[0], : image.shape[1], None]
    return (image + thickness * drawn) * (largest / (largest + thickness))


def clouds(side: int, decay: float, generator: np.random.Generator) -> Image:
    """Return clouds from 0 to 1 (side, side) by the diamond-square algorithm.

    Each level fills the middles between the points of the level before with the mean of four and a random
    number, whose range shrinks by decay² from level to level.
    """
    size = 1 << (side - 1).bit_length()
    field, step, reach = np.zeros((size, size), np.float32), size, 100.0

    def middle(total: Image) -> Image:
        noise = reach * generator.uniform(-reach, reach, total.shape)
        return (total / 4 + noise).astype(np.float32)

    while step >= 2:
        half = step // 2
        corners = field[::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=0)
        field[half::step, half::step] = centres = middle(pairs + np.roll(pairs, -1, axis=1))
        above, left = np.roll(centres, 1, axis=0), np.roll(centres, 1, axis=1)
        field[::step, half::step] = middle(centres + above + corners + np.roll(corners, -1, axis=1))
        field[half::step, ::step] = middle(centres + left + corners + np.roll(corners, -1, axis=0))
        step, reach = half, reach / decay
    field -= field.min()
    return field[:side, :side] / max(field.max(), 1e-12)


def brighten(image: Image, severity: int, _: np.random.Generator) -> Image:
    """Raise the value of HSV, and keep hue and saturation."""
    value = image.max(axis=2, keepdims=True)
    raised = np.minimum(value + BRIGHTNESS[severity - 1], 1)
    return np.where(value > 0, image * (raised / np.maximum(value, 1e-6)), raised)
