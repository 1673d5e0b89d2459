"""Published sets of images with masks, recognised by what their folder contains as it is unpacked."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dino_vit.data.sources.files import exists, is_folder, plain


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
    labelled: bool = True  # by folders of its images, which labelling tools write for classes
    others: Sequence[str] = ()  # further folders with pictures

    def paths(self, root: str, *, training: bool) -> list[str]:
        """Return what a folder must contain: images, masks, and the text file if there is one."""
        names = filter(None, (self.images, self.masks, self.text))
        return [f"{root}/{name.format(self.splits[not training])}" for name in names]


VOC = """background aeroplane bicycle bird boat bottle bus car cat chair cow dining_table dog horse motorbike
    person potted_plant sheep sofa train tv_monitor"""
CITYSCAPES = """road sidewalk building wall fence pole traffic_light traffic_sign vegetation terrain sky
    person rider car truck bus train motorcycle bicycle"""
PUBLISHED = (
    PublishedSet(
        title="Pascal VOC",
        splits=("train", "val"),
        images="JPEGImages",
        masks="SegmentationClass",
        text="ImageSets/Segmentation/{}.txt",
        values=range(21),
        ignored=(255,),
        classes=VOC.split(),
        others=("SegmentationObject",),
    ),
    PublishedSet(
        title="ADE20k",
        splits=("training", "validation"),
        images="images/{}",
        masks="annotations/{}",
        text="objectInfo150.txt",
        values=range(1, 151),
        ignored=(0,),
    ),
    PublishedSet(
        title="Cityscapes",
        splits=("train", "val"),
        images="leftImg8bit/{}",
        masks="gtFine/{}",
        suffixes=("_leftImg8bit", "_gtFine_labelIds"),
        labelled=False,  # these are cities
        values=(7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33),
        ignored=(*range(7), 9, 10, 14, 15, 16, 18, 29, 30, 34, 255),
        classes=CITYSCAPES.split(),
    ),
)


def recognise(spec: str) -> PublishedSet | None:
    """Return which published set a folder is; None for any other source."""
    root = plain(spec).rstrip("/")
    sets = (each for each in PUBLISHED if all(map(exists, each.paths(root, training=False))))
    return next(sets, None) if is_folder(root) else None
