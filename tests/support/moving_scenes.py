"""Videos made on the fly: textured objects that move over a texture, and the mask of every frame."""

import numpy as np
from PIL import Image

from dino_vit.data.sources.synthetic import SyntheticSource


def moving_scene(frames, *, height=96, width=128, objects=2, speed=2.5, seed=0):
    """Return frames (n, H, W, 3) and masks (n, H, W) of uint8, in which 0 is the background.

    Each object has a texture and colours of its own, which move with it, and hides those before it.
    """
    generator = np.random.default_rng(seed)
    source = SyntheticSource(length=1000, size=32, seed=seed)
    background, *surfaces = (surface(source, generator, 2 * width) for _ in range(objects + 1))
    y, x = np.mgrid[:height, :width]
    pictures = np.repeat(background[None, :height, :width], frames, axis=0)
    masks = np.zeros((frames, height, width), np.uint8)
    for value, texture in enumerate(surfaces, 1):
        turn = generator.uniform(0, 2 * np.pi)
        pace = speed * np.array([np.sin(turn), np.cos(turn)])
        start = np.array([height, width]) / 2 - pace * frames * generator.uniform(0.3, 0.7)
        radii = height * generator.uniform(0.16, 0.26, 2)
        for frame in range(frames):
            top, left = start + pace * frame
            inside = ((y - top) / radii[0]) ** 2 + ((x - left) / radii[1]) ** 2 < 1
            moved = np.roll(texture, np.rint(pace * frame).astype(int), axis=(0, 1))[:height, :width]
            pictures[frame][inside] = moved[inside]
            masks[frame][inside] = value
    return pictures, masks


def surface(source, generator, side):
    """Return a texture (side, side, 3): an image of a source many times, in two colours."""
    grey = source.read(int(generator.integers(len(source)))).float().mean(0).numpy() / 255
    tiled = np.tile(grey, (-(-side // len(grey)),) * 2)[:side, :side, None]
    low, high = generator.uniform(0, 255, (2, 3))
    return np.rint(low + (high - low) * tiled).astype(np.uint8)


def write_scene(folder, pictures, masks, colours=((0, 0, 0), (230, 60, 30), (40, 90, 220))):
    """Write frames/00000.png, ... and masks/00000.png, ..., the masks with a palette."""
    for name in ("frames", "masks"):
        (folder / name).mkdir(parents=True)
    for number, (picture, mask) in enumerate(zip(pictures, masks, strict=True)):
        Image.fromarray(picture).save(folder / "frames" / f"{number:05}.png")
        image = Image.fromarray(mask)
        image.putpalette(list(np.ravel(colours)))
        image.save(folder / "masks" / f"{number:05}.png")
    return folder
