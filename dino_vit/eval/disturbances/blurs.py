"""The blurs of ImageNet-C, of images (H, W) or (H, W, 3) with values from 0 to 1."""

from functools import lru_cache
from math import ceil, cos, radians, sin
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from numpy.typing import NDArray
from PIL import Image as Pillow

Image = NDArray[np.float32]
Border = Literal["edge", "symmetric", "reflect"]

DEFOCUS = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))  # radius of the disk, sigma that smooths it
GLASS = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))  # sigma, largest shift, passes
MOTION = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))  # radius, sigma
# Largest factor, step; the published code means 1.10 at first, but its range of floats has 1.11 too.
ZOOM = ((1.11, 0.01), (1.15, 0.01), (1.20, 0.02), (1.25, 0.02), (1.30, 0.03))


def scale_of(image: Image) -> float:
    """Return what pixels are multiplied by: the published constants are for images of 224."""
    return min(image.shape[:2]) / 224


@lru_cache(maxsize=64)
def gaussian_weights(sigma: float, radius: int) -> Image:
    """Return the weights of a Gaussian filter, from -radius to radius."""
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / max(sigma, 1e-6)) ** 2)
    return (weights / weights.sum()).astype(np.float32)


@lru_cache(maxsize=64)
def _gaussian_matrix(side: int, sigma: float, truncate: float, border: Border) -> Image:
    """Return the matrix (side, side) that filters a row; a filter may be longer than the row."""
    radius = int(truncate * sigma + 0.5)
    indices = np.pad(np.arange(side), radius, mode=border)
    matrix = np.zeros((side, side), np.float32)
    for offset, weight in enumerate(gaussian_weights(sigma, radius)):
        matrix[np.arange(side), indices[offset : offset + side]] += weight
    return matrix


def gaussian(image: Image, sigma: float, *, truncate: float = 4, border: Border = "edge") -> Image:
    """Filter by a Gaussian."""
    rows, columns = (_gaussian_matrix(side, sigma, truncate, border) for side in image.shape[:2])
    planes = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
    filtered = rows @ np.ascontiguousarray(planes) @ columns.T
    return filtered[0] if image.ndim == 2 else filtered.transpose(1, 2, 0)


def defocus(image: Image, severity: int, _: np.random.Generator) -> Image:
    """Spread every pixel over a disk; of less than 75 pixels a side the first severity changes nothing."""
    published, sigma = DEFOCUS[severity - 1]
    radius = published * scale_of(image)
    reach = ceil(radius) + 2  # room for what the disk is smoothed by
    across = np.arange(-reach, reach + 1)
    disk = (across[:, None] ** 2 + across**2 <= radius**2).astype(np.float32)
    weights = gaussian_weights(sigma, 1 if radius <= 8 else 2)
    smooth = np.array([np.convolve(row, weights, "same") for row in disk / disk.sum()])
    smooth = np.array([np.convolve(column, weights, "same") for column in smooth.T]).T.astype(np.float32)
    used = np.flatnonzero(smooth.any(axis=0))
    smooth, reach = smooth[used[0] : used[-1] + 1, used[0] : used[-1] + 1], (len(used) - 1) // 2
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="symmetric")
    planes = torch.from_numpy(np.ascontiguousarray(padded.transpose(2, 0, 1)))[:, None]
    filtered = F.conv2d(planes, torch.from_numpy(np.ascontiguousarray(smooth))[None, None])
    return rearrange(filtered, "c 1 y x -> y x c").numpy()


def glass(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Replace pixels by some nearby, one after another; as published they are copied, not swapped."""
    sigma, shift, passes = GLASS[severity - 1]
    sigma, shift = sigma * scale_of(image), max(1, round(shift * scale_of(image)))
    values = np.rint(gaussian(image, sigma) * 255).astype(np.uint8)
    height, width, _ = image.shape
    origin = list(range(height * width))
    rows, columns = np.arange(height - shift, shift, -1), np.arange(width - shift, shift, -1)
    places = (rows[:, None] * width + columns).ravel()
    for _ in range(passes):
        down, right = generator.integers(-shift, shift, (2, len(places)))
        nearby = places + down * width + right
        for place, other in zip(places.tolist(), nearby.tolist(), strict=True):
            origin[place] = origin[other]
    moved = values.reshape(-1, 3)[origin].reshape(values.shape)
    return gaussian(moved.astype(np.float32) / np.float32(255), sigma)


def motion(image: Image, severity: int, generator: np.random.Generator) -> Image:
    """Move the camera while the shutter is open."""
    radius, sigma = MOTION[severity - 1]
    return streak(image, radius, sigma, generator.uniform(-45, 45))


def streak(image: Image, radius: float, sigma: float, degrees: float) -> Image:
    """Average pixels along one direction, with the weights of half a Gaussian, as ImageMagick does."""
    scale = scale_of(image)
    length = 2 * ceil(radius * scale) + 1
    weights = np.exp(-0.5 * (np.arange(length) / (sigma * scale)) ** 2)
    pad = [(length, length), (length, length), (0, 0)][: image.ndim]
    padded, (height, width) = np.pad(image, pad, mode="edge"), image.shape[:2]
    total = np.zeros_like(image)
    for step, weight in enumerate((weights / weights.sum()).astype(np.float32)):
        top = length + ceil(step * sin(radians(degrees)) - 0.5)
        left = length + ceil(step * cos(radians(degrees)) - 0.5)
        total += weight * padded[top : top + height, left : left + width]
    return total


def zoom(image: Image, severity: int, _: np.random.Generator) -> Image:
    """Average enlargements of the centre."""
    largest, step = ZOOM[severity - 1]
    factors = 1 + step * np.arange(round((largest - 1) / step) + 1)
    picture = Pillow.fromarray(np.rint(image * 255).astype(np.uint8))
    total = image + sum(np.asarray(enlarged(picture, factor), np.float32) for factor in factors) / 255
    return np.asarray(total / (len(factors) + 1), np.float32)


def enlarged(picture: Pillow.Image, factor: float) -> Pillow.Image:
    """Return the centre of a picture, enlarged to its size."""
    width, height = picture.size
    left, top = (side * (1 - 1 / factor) / 2 for side in (width, height))
    box: Any = left, top, width - left, height - top
    return picture.resize(picture.size, Pillow.Resampling.BILINEAR, box)
