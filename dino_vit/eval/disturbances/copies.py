"""Copies of photos as people and websites make them: cropped, compressed, written over, as a screenshot.

Each takes a picture, a strength and a generator, and changes a picture that is no longer than `LONGEST`: a
photo is reduced to that first, so that a strength means the same for all of them.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from io import BytesIO
from math import ceil, sqrt
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from dino_vit.data.sources.scenes import SceneSource
from dino_vit.eval.disturbances.source import Disturbance, Picture

LONGEST = 800  # pixels of the longer side, as on the web
_LINES = 10  # of text, that a picture has room for
_SCENES = SceneSource(length=1000, size=128)
_WORDS = ["follow", "for", "more", "of", "our", "photos", "every", "day", "summer", "sale", "only", "today"]

Kind = Literal["crop", "jpeg", "blur", "overlay", "text", "turn", "mirror", "screenshot", "dark", "contrast"]
Change = Callable[[Image.Image, float, np.random.Generator], Image.Image]


class CopyKind(NamedTuple):
    """A kind of copy: how it is made, its strengths from weak to strong, and how one is written."""

    change: Change
    strengths: tuple[float, ...]
    text: str

    def describe(self, *strengths: float) -> str:
        """Return strengths in words."""
        return self.text.format(", ".join(f"{strength:g}" for strength in strengths))

    def apply(self, picture: Picture, strength: float, generator: np.random.Generator) -> Picture:
        """Return the copy of a picture."""
        image = Image.fromarray(picture)
        image.thumbnail((LONGEST, LONGEST), Image.Resampling.BICUBIC)
        return np.array(self.change(image, strength, generator))


def crop(image: Image.Image, percent: float, generator: np.random.Generator) -> Image.Image:
    """Cut off a share of the area, at random sides."""
    scale = sqrt(1 - percent / 100)
    width, height = (max(1, round(side * scale)) for side in image.size)
    left, top = (round(generator.random() * rest) for rest in (image.width - width, image.height - height))
    return image.crop((left, top, left + width, top + height))


def compress(image: Image.Image, quality: float, _: np.random.Generator) -> Image.Image:
    """Compress as JPEG."""
    file = BytesIO()
    image.save(file, "JPEG", quality=round(quality))
    return Image.open(file).convert("RGB")


def blur(image: Image.Image, percent: float, _: np.random.Generator) -> Image.Image:
    """Blur by a Gaussian, whose sigma is a share of the shorter side."""
    return image.filter(ImageFilter.GaussianBlur(percent / 100 * min(image.size)))


def paste_over(image: Image.Image, percent: float, generator: np.random.Generator) -> Image.Image:
    """Paste a generated picture over a share of the area, anywhere."""
    scale = sqrt(percent / 100)
    width, height = (max(1, round(side * scale)) for side in image.size)
    left, top = (round(generator.random() * rest) for rest in (image.width - width, image.height - height))
    scene = _SCENES.read(int(generator.integers(len(_SCENES))))
    pasted = Image.fromarray(np.ascontiguousarray(scene.permute(1, 2, 0).numpy()))
    image.paste(pasted.resize((width, height), Image.Resampling.BICUBIC), (left, top))
    return image


def write_over(image: Image.Image, lines: float, generator: np.random.Generator) -> Image.Image:
    """Write white lines of text with a black outline over the whole width."""
    height = max(4, image.height // _LINES)
    font, draw = _font(round(0.9 * height)), ImageDraw.Draw(image)
    places = generator.permutation(_LINES)
    for place in places[: round(lines)].tolist():
        words = " ".join(_words(generator, image.width, font))
        outline = ceil(height / 16)
        draw.text((0, place * height), words, "white", font, stroke_width=outline, stroke_fill="black")
    return image


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _words(
    generator: np.random.Generator, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> Iterator[str]:
    """Yield words that are together longer than a width."""
    while width > 0:
        word = _WORDS[generator.integers(len(_WORDS))]
        width -= max(1, int(font.getlength(word)))
        yield word


def turn(image: Image.Image, degrees: float, generator: np.random.Generator) -> Image.Image:
    """Turn to the left or right; the corners become black."""
    sign = 1 if generator.random() < 0.5 else -1
    return image.rotate(sign * degrees, Image.Resampling.BICUBIC, expand=True)


def mirror(image: Image.Image, _: float, __: np.random.Generator) -> Image.Image:
    """Swap left and right."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def capture(image: Image.Image, percent: float, generator: np.random.Generator) -> Image.Image:
    """Make a screenshot in which a share of the area is the screen around the picture."""
    factor = 1 / (1 - percent / 100)  # of the area; bars above and below take most of it
    width, height = round(image.width * factor**0.25), round(image.height * factor**0.75)
    dark = generator.random() < 0.5
    paper, ink, button = (
        ((18, 18, 20), (235, 235, 235), (70, 70, 76)) if dark else ("white", "black", "silver")
    )
    screen = Image.new("RGB", (width, height), paper)
    top = round((height - image.height) * generator.uniform(0.3, 0.6))
    screen.paste(image, ((width - image.width) // 2, top))
    draw = ImageDraw.Draw(screen)
    line = max(4, min((height - image.height) // 10, width // 12))
    font = _font(line)
    draw.text((line, line // 3), "12:47", ink, font)
    draw.rectangle((width - 3 * line, line // 2, width - line, round(1.2 * line)), button)  # the battery
    below = top + image.height
    draw.text((line, below + line // 2), " ".join(_words(generator, width // 2, font)), ink, font)
    draw.text((line, below + 2 * line), " ".join(_words(generator, width // 3, font)), button, font)
    for place in range(4):
        left, upper = round((place + 0.4) * width / 4), height - round(1.7 * line)
        draw.ellipse((left, upper, left + line, upper + line), button)
    screen.thumbnail((LONGEST, LONGEST), Image.Resampling.BICUBIC)
    return compress(screen, 75, generator)


def darken(image: Image.Image, percent: float, _: np.random.Generator) -> Image.Image:
    """Take away light."""
    return image.point(lambda value: value * (1 - percent / 100))


def fade(image: Image.Image, percent: float, _: np.random.Generator) -> Image.Image:
    """Take away contrast: move every value towards the mean of the picture."""
    values = np.asarray(image, np.float32)
    faded = values.mean() + (values - values.mean()) * (1 - percent / 100)
    return Image.fromarray(faded.round().astype(np.uint8))


COPY_KINDS: dict[str, CopyKind] = {
    "crop": CopyKind(crop, (20, 40, 60, 80, 90), "{} % cut off"),
    "jpeg": CopyKind(compress, (50, 20, 10, 5, 2), "quality {}"),
    "blur": CopyKind(blur, (0.5, 1, 2, 4, 8), "{} % of the side"),
    "overlay": CopyKind(paste_over, (10, 25, 50, 75), "{} % covered"),
    "text": CopyKind(write_over, (1, 2, 4, 8), "{} of 10 lines"),
    "turn": CopyKind(turn, (5, 15, 45, 90, 180), "{} degrees"),
    "mirror": CopyKind(mirror, (1,), "left to right"),
    "screenshot": CopyKind(capture, (20, 40, 60, 80), "{} % around it"),
    "dark": CopyKind(darken, (30, 50, 70, 90), "{} % less light"),
    "contrast": CopyKind(fade, (30, 50, 70, 90), "{} % less"),
}


def copies(kinds: Iterable[str]) -> list[Disturbance]:
    """Return all strengths of some kinds of copies, each kind from weak to strong."""
    return [
        Disturbance(kind, strength, COPY_KINDS[kind].apply)
        for kind in kinds
        for strength in COPY_KINDS[kind].strengths
    ]
