"""Images with masks: the class of every pixel."""

import io
import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from dino_vit.config.commands import IGNORED
from dino_vit.core import log
from dino_vit.core.text import plural, public
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.files import exists, is_folder, is_url, plain, read_file
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.published import PUBLISHED, PublishedSet, recognise
from dino_vit.data.sources.source import Source, Subset

INDEXED = ("P", "L", "1")  # Pillow's names for a palette, grey and black and white
_PNG_BITS = 24  # place of the byte that says how many bits a value has
_ORIENTATION = 274  # EXIF's tag

Table = NDArray[np.signedinteger[Any]]


@runtime_checkable
class MaskedSource(Source, Protocol):
    """A set of images of which each has a mask; `classes` are those of the pixels."""

    def mask(self, index: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W); `IGNORED` where there is none."""


class FilesWithMasks(Subset):
    """Images and their masks: PNG files of one channel, whose values stand for classes.

    `table` has the class of each of the 256 values: `IGNORED` for none, -1 for a value that masks must not
    have; `allowed` says which they may.
    """

    def __init__(
        self, images: Subset, masks: Subset, *, classes: Sequence[str], table: Table, allowed: str
    ) -> None:
        super().__init__(images.source, images.indices)
        self._masks, self.classes, self._table, self._allowed = masks, classes, table, allowed

    def label(self, index: int) -> int | None:
        return None  # the labels of the images are of other classes

    def mask(self, index: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W); `IGNORED` where there is none."""
        name = self._masks.name(index)
        try:
            values, size = _read_indexed(self._masks.read(index)), _size(self.read(index))
        except UnidentifiedImageError as error:  # whose text is the address of an object
            raise UnreadableImage(name, "the mask cannot be read: it is not an image") from error
        except Exception as error:  # Pillow raises anything on damaged files
            raise UnreadableImage(name, f"the mask cannot be read: {error}") from error
        if size is not None and values.shape != size:
            (height, width), (h, w) = values.shape, size
            raise UnreadableImage(
                name, f"the mask has {width} × {height} pixels, its image {w} × {h}; they must be the same"
            )
        classes = self._table[values]
        if (classes < 0).any():
            highest = values[classes < 0].max()
            raise ValueError(f"{name}: the mask has the value {highest}, but {self._allowed}")
        return torch.from_numpy(classes.astype(np.uint8))


def open_masks(
    spec: str,
    masks: str | None = None,
    *,
    class_names: str | None = None,
    ignore_value: int = IGNORED,
    training: bool = False,
) -> MaskedSource:
    """Open a set of images with masks; null: masks/ beside the folder of images.

    A mask has the name of its image but for the suffix. `class_names` is a text file with a name a line. Of
    the folder of a published set this is the split to judge by, or the one to learn from if `training`.
    """
    published = None if masks else recognise(spec)
    source: Source = open_source(spec) if published is None else _open_published(spec, published, training)
    if isinstance(source, MaskedSource):
        if masks or class_names or ignore_value != IGNORED:
            raise ValueError(
                f"{public(spec)} has masks of its own: leave out masks, class_names and ignore_value"
            )
        return source
    beside = _beside(spec)
    if masks is None and not is_folder(beside):
        expected = "; ".join(
            f"{each.title}: {', '.join(each.paths('FOLDER', training=False))}" for each in PUBLISHED
        )
        raise ValueError(
            f"{public(spec)} has no masks: {public(beside)} does not exist. Give masks=FOLDER with indexed "
            "PNG files that are named as the images (synthetic:scenes has masks), or the folder of a "
            f"published set, which is recognised by what is in it ({expected})"
        )
    classes = _read_names(class_names) if class_names else [str(value) for value in range(IGNORED)]
    return FilesWithMasks(
        *_pairs(source, open_source(masks or beside), spec, masks or beside),
        classes=classes,
        table=_table(range(len(classes)), [ignore_value]),
        allowed=f"values of classes go from 0 to {len(classes) - 1}; set ignore_value, or give more "
        f"class_names (at most {IGNORED})",
    )


def open_watched(spec: str, source: Source) -> MaskedSource | None:
    """Return a source, which is open already, with the masks that lie on this machine; None without any."""
    if isinstance(source, MaskedSource):
        return source
    if is_url(spec):
        return None
    if recognise(spec) is None:
        return open_masks(spec) if is_folder(_beside(spec)) else None
    try:
        return open_masks(spec)
    except ValueError as error:  # it only looks like a published set
        log.warning("%s is not watched by its masks: %s", spec, error)
        return None


def _beside(spec: str) -> str:
    return f"{plain(spec).rstrip('/').rpartition('/')[0] or '.'}/masks"


def _pairs(
    source: Source, folder: Source, spec: str, of_masks: str, suffixes: tuple[str, str] = ("", "")
) -> tuple[Subset, Subset]:
    """Return the images that have a mask, and the masks; name and mask differ by suffixes of their stems."""
    stems = [
        _stem(source.name(index)).removesuffix(suffixes[0]) + suffixes[1] for index in range(len(source))
    ]
    masks_by_stem = {_stem(folder.name(index)): index for index in range(len(folder))}
    with_mask = [index for index, stem in enumerate(stems) if stem in masks_by_stem]
    if not with_mask:
        example = f": there is no {stems[0]}.png, for example" if stems else ", as its list names none"
        raise ValueError(f"no image of {public(spec)} has a mask in {public(of_masks)}{example}")
    if len(with_mask) < len(source):
        text = "left out: %s of %s without a mask in %s"
        log.info(text, plural(len(source) - len(with_mask), "image"), public(spec), public(of_masks))
    return Subset(source, with_mask), Subset(folder, [masks_by_stem[stems[index]] for index in with_mask])


def _open_published(spec: str, published: PublishedSet, training: bool) -> FilesWithMasks:
    """Open a split of a published set."""
    title, paths = published.title, published.paths(plain(spec).rstrip("/"), training=training)
    if missing := next((path for path in paths if not exists(path)), None):
        raise ValueError(f"{public(spec)} is {title} by its folders, but lacks {public(missing)}; unpack it")
    images, folder = open_source(paths[0]), open_source(paths[1])
    text = read_file(paths[2]).decode() if published.text else ""
    if text and published.classes:
        listed = set(text.split())
        images = Subset(images, [i for i in range(len(images)) if _stem(images.name(i)) in listed])
    pairs = _pairs(images, folder, paths[0], paths[1], published.suffixes)
    # The last column, below the title.
    rows = text.strip().splitlines()[1:]
    classes = published.classes or [row.split("\t")[-1].strip() for row in rows]
    split, count = published.splits[not training], plural(len(pairs[0]), "image")
    log.info("%s is %s by its folders: %s of %s, %d classes", public(spec), title, count, split, len(classes))
    return FilesWithMasks(
        *pairs,
        classes=classes,
        table=_table(published.values, published.ignored),
        allowed=f"those of {title} have no such value",
    )


def _table(values: Sequence[int], ignored: Iterable[int]) -> Table:
    """Return the class of each of the 256 values of a mask: those of the classes in their order."""
    table = np.full(256, -1, np.int16)
    table[[*values]] = np.arange(len(values))
    table[[*ignored]] = IGNORED
    return table


def _read_names(path: str) -> list[str]:
    names = [name.strip() for name in read_file(plain(path)).decode().rstrip().splitlines()]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        lines = ", ".join(str(line) for line, name in enumerate(names, 1) if name == repeated)
        raise ValueError(
            f"{public(path)} has the class {repeated!r} on lines {lines}; each needs its own name"
        )
    return names


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _read_indexed(data: bytes | Tensor) -> NDArray[np.uint8]:
    """Return the values (H, W) of a file's only channel."""
    if isinstance(data, Tensor):
        raise ValueError("masks are files of images, not arrays")
    with Image.open(io.BytesIO(data)) as file:
        shallow_grey = file.mode == "L" and data[_PNG_BITS] != 8  # Pillow would stretch the values to 255
        if file.format != "PNG" or file.mode not in INDEXED or shallow_grey:
            raise ValueError(
                f"it must be a PNG with a palette, or grey with 8 bits, but is {file.format} {file.mode}"
            )
        return np.asarray(file).astype(np.uint8)


def _size(item: bytes | Tensor) -> tuple[int, int] | None:
    """Return the height and width of an upright image; None if only its reader can tell."""
    if isinstance(item, Tensor):
        return int(item.shape[1]), int(item.shape[2])
    try:
        with Image.open(io.BytesIO(item)) as file:
            width, height = file.size
            turned = file.getexif().get(_ORIENTATION, 1) >= 5
    except Exception:
        return None
    return (width, height) if turned else (height, width)
