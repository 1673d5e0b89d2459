"""Images of two colours with awkward names, and the page to label them by."""

from pathlib import Path

import numpy as np
from PIL import Image

from dino_vit.core.text import printable

AWKWARD = [
    "plain.png",
    "with space .png",
    ' leading space "and quotes".png',
    "comma, semicolon; tab\there.png",
    "line\nbreak.png",
    "carriage\r\nreturn.png",
    "<script>alert(1)</script>.png",
    "</script><!--.png",
    "שלום עולם.png",
    "مرحبا\u202egnp.png",
    "=1+1.png",
    "ümläut café.png",
    "日本.png",
    "back\\slash.png",
    "'single'.png",
    "per%20cent & ampersand.png",
    "sub folder,/a \"b\".png",
    "\ufeffbom.png",
    "emoji 🍏.png",
    "#hash?.png",
]  # fmt: skip
NAMES = [*AWKWARD, *(f"IMG_{number:04}.png" for number in range(40))]


def write_images(folder: Path) -> dict[str, str]:
    """Write red and blue images, each a little different; return the colour by the name that is shown."""
    colours = {}
    for number, name in enumerate(NAMES):
        red = number % 3 > 0
        pixels = np.full((24, 32, 3), (200, 30, 30) if red else (30, 30, 200), np.uint8)
        pixels[:, number % 32] = 255 - number
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
        colours[printable(name)] = "red" if red else "blue"
    return colours
