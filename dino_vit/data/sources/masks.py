"""Images with masks: the class of every pixel."""

import io
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from dino_vit.config.commands import IGNORED
from dino_vit.core import log
from dino_vit.core.text import plural, public
from dino_vit.data.image_set import ImageSet, unlabelled
from dino_vit.data.images.decode import UnreadableImage, decode
from dino_vit.data.sources.files import exists, is_folder, is_url, plain, read_file
from dino_vit.data.sources.open import open_source

INDEXED = ("P", "L", "1")  # Pillow's names for a palette, grey and black and white
_PNG_BITS = 24  # place of the byte that says how many bits a value has
_ORIENTATION = 274  # EXIF's tag

Table = NDArray[np.signedinteger[Any]]


class PublishedSet(NamedTuple):
    """A published set of images with masks, as it is unpacked; `{}` in a path is the name of a split."""

    title: str
    splits: tuple[str, str]  # to learn from, and to judge by
    images: str
    masks: str
    values: Sequence[int]  # of the classes in masks, in their order
    ignored: Iterable[int]  # other values that masks may have
    classes: Sequence[str] = ()
    text: str = ""  # file of the names of a split or, without `classes`, table of those of classes
    suffixes: tuple[str, str] = ("", "")  # of the stems of an image and its mask

    def paths(self, root: str, *, training: bool) -> list[str]:
        """Return what a folder must contain: images, masks, and the text file if there is one."""
        names = filter(None, (self.images, self.masks, self.text))
        return [f"{root}/{name.format(self.splits[not training])}" for name in names]


VOC = """background aeroplane bicycle bird boat bottle bus car cat chair cow dining_table dog horse motorbike
    person potted_plant sheep sofa train tv_monitor"""
CITYSCAPES = """road sidewalk building wall fence pole traffic_light traffic_sign vegetation terrain sky
    person rider car truck bus train motorcycle bicycle"""
PUBLISHED = {
    "voc": PublishedSet(
        title="Pascal VOC",
        splits=("train", "val"),
        images="JPEGImages",
        masks="SegmentationClass",
        text="ImageSets/Segmentation/{}.txt",
        values=range(21),
        ignored=(255,),
        classes=VOC.split(),
    ),
    "ade20k": PublishedSet(
        title="ADE20k",
        splits=("training", "validation"),
        images="images/{}",
        masks="annotations/{}",
        text="objectInfo150.txt",
        values=range(1, 151),
        ignored=(0,),
    ),
    "cityscapes": PublishedSet(
        title="Cityscapes",
        splits=("train", "val"),
        images="leftImg8bit/{}",
        masks="gtFine/{}",
        suffixes=("_leftImg8bit", "_gtFine_labelIds"),
        values=(7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33),
        ignored=(*range(7), 9, 10, 14, 15, 16, 18, 29, 30, 34, 255),
        classes=CITYSCAPES.split(),
    ),
}


@dataclass(frozen=True)
class _Masks:
    """The masks of images: PNG files of one channel, whose values stand for classes."""

    images: ImageSet
    files: ImageSet  # of the masks, in the order of the images
    table: Table  # the class of each of the 256 values: `IGNORED` for none, -1 for one they must not have
    allowed: str  # which values they may

    def __call__(self, row: int) -> Tensor:
        """Return the class of every pixel, uint8 (H, W), by the row of the image in its store."""
        index = self._indices[row]
        name = self.files.name(index)
        try:
            values, size = _read_indexed(self.files.read(index)), _size(self.images.read(index))
        except UnidentifiedImageError as error:  # whose text is the address of an object
            raise UnreadableImage(name, "the mask cannot be read: it is not an image") from error
        except Exception as error:  # Pillow raises anything on damaged files
            raise UnreadableImage(name, f"the mask cannot be read: {error}") from error
        if size is not None and values.shape != size:
            (height, width), (h, w) = values.shape, size
            raise UnreadableImage(
                name, f"the mask has {width} × {height} pixels, its image {w} × {h}; they must be the same"
            )
        classes = self.table[values]
        if (classes < 0).any():
            highest = values[classes < 0].max()
            raise ValueError(f"{name}: the mask has the value {highest}, but {self.allowed}")
        return torch.from_numpy(classes.astype(np.uint8))

    @cached_property
    def _indices(self) -> dict[int, int]:
        return {int(row): index for index, row in enumerate(self.images.rows)}


def open_masks(
    spec: str,
    masks: str | None = None,
    *,
    class_names: str | None = None,
    ignore_value: int = IGNORED,
    training: bool = False,
) -> ImageSet:
    """Open a set of images with masks, of which `classes` are those of the pixels.

    `masks` is the folder of the masks, by default masks/ beside that of the images, or the name of a
    published set (`voc`, `ade20k`, `cityscapes`), of whose folder this is then the split to judge by, or the
    one to learn from if `training`. A mask has the name of its image but for the suffix. `class_names` is a
    text file with a name a line.
    """
    if masks in PUBLISHED:
        if class_names or ignore_value != IGNORED:
            raise ValueError(f"masks={masks} has classes of its own: leave out class_names and ignore_value")
        return _open_published(spec, PUBLISHED[masks], training)
    images = open_source(spec)
    if images.masks:
        if masks or class_names or ignore_value != IGNORED:
            raise ValueError(
                f"{public(spec)} has masks of its own: leave out masks, class_names and ignore_value"
            )
        return images
    beside = _beside(spec)
    if masks is None and not is_folder(beside) and (name := published_like(spec)):
        raise ValueError(
            f"{public(spec)} looks like {PUBLISHED[name].title} as it is unpacked: give masks={name}"
        )
    if masks is None and not is_folder(beside):
        raise ValueError(
            f"{public(spec)} has no masks: {public(beside)} does not exist. Give masks=FOLDER with indexed "
            "PNG files that are named as the images (synthetic:scenes has masks), or masks="
            f"{', '.join(PUBLISHED)} for the folder of a published set as it is unpacked"
        )
    classes = _read_names(class_names) if class_names else [str(value) for value in range(IGNORED)]
    allowed = f"values of classes go from 0 to {len(classes) - 1}; set ignore_value, or give more class_names"
    allowed += f" (at most {IGNORED})"
    pairs = _pairs(images, open_source(masks or beside), spec, masks or beside)
    return _with_masks(pairs, classes, range(len(classes)), [ignore_value], allowed)


def published_like(spec: str) -> str | None:
    """Return the name of the published set whose files a local folder has."""
    root = plain(spec).rstrip("/")
    for name, published in PUBLISHED.items():
        if not is_url(root) and all(map(os.path.exists, published.paths(root, training=False))):
            return name
    return None


def open_watched(spec: str, images: ImageSet) -> ImageSet | None:
    """Return images, which are open already, with the masks that lie on this machine; None without any."""
    if images.masks:
        return images
    return open_masks(spec) if not is_url(spec) and is_folder(_beside(spec)) else None


def _beside(spec: str) -> str:
    return f"{plain(spec).rstrip('/').rpartition('/')[0] or '.'}/masks"


def _pairs(
    source: ImageSet, folder: ImageSet, spec: str, masks: str, suffixes: tuple[str, str] = ("", "")
) -> tuple[ImageSet, ImageSet]:
    """Return the images that have a mask, and the masks; name and mask differ by suffixes of their stems."""
    stems = [
        _stem(source.name(index)).removesuffix(suffixes[0]) + suffixes[1] for index in range(len(source))
    ]
    masks_by_stem = {_stem(folder.name(index)): index for index in range(len(folder))}
    with_mask = [index for index, stem in enumerate(stems) if stem in masks_by_stem]
    if not with_mask:
        example = f": there is no {stems[0]}.png, for example" if stems else ", as its list names none"
        raise ValueError(f"no image of {public(spec)} has a mask in {public(masks)}{example}")
    if len(with_mask) < len(source):
        text = "left out: %s of %s without a mask in %s"
        log.info(text, plural(len(source) - len(with_mask), "image"), public(spec), public(masks))
    return source.subset(with_mask), folder.subset([masks_by_stem[stems[index]] for index in with_mask])


def _open_published(spec: str, published: PublishedSet, training: bool) -> ImageSet:
    """Open a split of a published set."""
    title, paths = published.title, published.paths(plain(spec).rstrip("/"), training=training)
    if missing := next((path for path in paths if not exists(path)), None):
        raise ValueError(f"{public(spec)} is not {title} as it is unpacked: it lacks {public(missing)}")
    images, folder = open_source(paths[0]), open_source(paths[1])
    text = read_file(paths[2]).decode() if published.text else ""
    if text and published.classes:
        listed = set(text.split())
        images = images.subset([i for i in range(len(images)) if _stem(images.name(i)) in listed])
    pairs = _pairs(images, folder, paths[0], paths[1], published.suffixes)
    # The last column, below the title.
    rows = text.strip().splitlines()[1:]
    classes = published.classes or [row.split("\t")[-1].strip() for row in rows]
    split, count = published.splits[not training], plural(len(pairs[0]), "image")
    log.info("%s, %s: %s of %s, %d classes", public(spec), title, count, split, len(classes))
    allowed = f"those of {title} have no such value"
    return _with_masks(pairs, classes, published.values, published.ignored, allowed)


def _with_masks(
    pairs: tuple[ImageSet, ImageSet],
    classes: Sequence[str],
    values: Sequence[int],
    ignored: Iterable[int],
    allowed: str,
) -> ImageSet:
    """Return images with their masks, which have these values for the classes, in their order."""
    table = np.full(256, -1, np.int16)
    table[[*values]] = np.arange(len(values))
    table[[*ignored]] = IGNORED
    # The labels of the images are of other classes.
    return replace(pairs[0], labels=unlabelled, classes=classes, masks=_Masks(*pairs, table, allowed))


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
    """Return the height and width of an upright image; None if it cannot be read."""
    if isinstance(item, Tensor):
        return int(item.shape[1]), int(item.shape[2])
    try:
        with Image.open(io.BytesIO(item)) as file:
            width, height = file.size
            turned = file.getexif().get(_ORIENTATION, 1) >= 5
    except Exception:  # of what Pillow does not know, such as npy and TIFF of many channels
        with suppress(UnreadableImage):
            height, width = decode(item, "the image").shape[1:]
            return height, width
        return None
    return (width, height) if turned else (height, width)
