"""Videos whose first frame has a mask: a file, images in order, the validation videos of DAVIS 2017."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

from torch import Tensor

from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.sources.files import exists, is_folder, plain, read_file
from dino_vit.data.sources.folder import PathSource
from dino_vit.data.sources.masks import Mask, read_mask
from dino_vit.data.sources.open import Source, open_source
from dino_vit.eval.video.files import VideoFile, is_video

DAVIS_LIST = "ImageSets/2017/val.txt"
RATE = Fraction(24)  # frames a second of images, as DAVIS has
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Clip:
    """The frames of a video in order, and the masks that are known of it."""

    frames: Iterable[Tensor]
    names: Sequence[str] | None  # of the frames; None in a file
    rate: Fraction
    mask: Mask  # of the first frame
    truth: Mapping[str, Callable[[], Mask]]  # of the frames to judge, by name without suffix
    folders: Sequence[Path]  # of the frames and of truth, in which nothing may be written
    published: bool = False  # whether frames get the size that they have in the published code

    def name_of(self, number: int) -> str:
        """Return the name of a frame without suffix, such as 00000 for the first of a file."""
        return _stem(self.names[number]) if self.names else f"{number:05}"


def open_clips(
    spec: str, mask: str | None, truth: str | None, pixels: Pixels
) -> dict[str, Callable[[], Clip]]:
    """Return what opens each video, by name; `truth` is a folder of masks that are named as the frames."""
    root = Path(plain(spec))
    if (root / DAVIS_LIST).is_file():
        if mask or truth:
            raise ValueError(
                f"{spec} is the folder of DAVIS, with masks of its own: leave out mask and truth"
            )
        names = (root / DAVIS_LIST).read_text().split()
        missing = [str(folder) for name in names for folder in _of_davis(root, name) if not folder.is_dir()]
        if missing or not names:
            why = f"names a video whose folder {missing[0]} does not exist" if names else "names no video"
            raise ValueError(f"{root / DAVIS_LIST} {why}: download DAVIS 2017 in 480p again")
        return {name: partial(_open_davis, root, name, pixels) for name in names}
    if mask is None or is_folder(plain(mask)) or not exists(plain(mask)):
        given = "mask is needed" if mask is None else f"mask={mask} is not a file"
        raise ValueError(f"{given}: give a PNG file with the objects of the first frame")
    name = re.sub(r"[^\w-]+", "-", root.stem).strip("-") or "video"
    return {name: partial(_open, spec, mask, truth, pixels)}


def _open(spec: str, mask: str, truth: str | None, pixels: Pixels) -> Clip:
    first, folders = read_mask(mask, read_file(plain(mask))), [Path(plain(spec))]
    known, masks = {}, {os.path.realpath(plain(mask))}
    if truth:
        source = open_source(truth)
        known, masks = _by_stem(source), masks | _files(source)
        folders.append(Path(plain(truth)))
    if is_video(plain(spec)):
        video = VideoFile(plain(spec))
        if truth and not any(re.fullmatch(r"\d{5,}", name) and int(name) for name in known):
            text = "has no masks of later frames than the first; name them by frame: 00001.png, ..."
            raise ValueError(f"{truth} {text}")
        return Clip(map(pixels.conform, video), None, video.rate, first, known, folders)
    source = open_source(spec)
    if both := _files(source) & masks:
        raise ValueError(
            f"{min(both)} is both a mask and a frame of {spec}: keep masks and frames in different folders"
        )
    order = in_order(source)
    names = [source.name(index) for index in order]
    if truth and not any(_stem(name) in known for name in names[1:]):
        example = f"there is no {_stem(names[-1])}.png, for example"
        raise ValueError(f"no frame of {spec} but the first has a mask in {truth}: {example}")
    return Clip(_frames(source, order, pixels), names, RATE, first, known, folders)


def _of_davis(root: Path, name: str) -> list[Path]:
    return [root / kind / "480p" / name for kind in ("JPEGImages", "Annotations")]


def _open_davis(root: Path, name: str, pixels: Pixels) -> Clip:
    """Open a video of DAVIS, which judges all frames but the first and the last."""
    folders = _of_davis(root, name)
    source, masks = open_source(str(folders[0])), _by_stem(open_source(str(folders[1])))
    order = in_order(source)
    names = [source.name(index) for index in order]
    stems = [_stem(one) for one in names]
    if missing := [stem for stem in stems if stem not in masks]:
        raise ValueError(f"{folders[1]} has no {missing[0]}.png")
    judged = {stem: masks[stem] for stem in stems[1:-1]}
    first = masks[stems[0]]()
    return Clip(_frames(source, order, pixels), names, RATE, first, judged, folders, published=True)


def in_order(source: Source) -> list[int]:
    """Return the indices of a source by the numbers in the names: 10.png comes after 9.png."""

    def key(index: int) -> list[str | int]:
        parts = _NUMBER.split(source.name(index))
        return [int(part) if place % 2 else part for place, part in enumerate(parts)]

    return sorted(range(len(source)), key=key)


def _frames(source: Source, order: Sequence[int], pixels: Pixels) -> Iterator[Tensor]:
    for index in order:
        try:
            yield read_image(source, index, pixels)
        except UnreadableImage as error:
            raise ValueError(f"a frame cannot be read: {error}") from error


def _files(source: Source) -> set[str]:
    """Return the paths of the images of a source that are files of their own."""
    if not isinstance(source, PathSource):
        return set()
    root = os.path.realpath(source.root)
    return {os.path.join(root, source.name(index)) for index in range(len(source))}


def _by_stem(masks: Source) -> dict[str, Callable[[], Mask]]:
    def read(index: int) -> Mask:
        return read_mask(masks.name(index), masks.read(index))

    return {_stem(masks.name(index)): partial(read, index) for index in range(len(masks))}


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]
