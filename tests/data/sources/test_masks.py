"""Published sets of masks are read as they are unpacked."""

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dino_vit
from dino_vit.config.commands import IGNORED, CompareConfig
from dino_vit.config.loading import load
from dino_vit.data.sources.masks import open_masks, open_watched
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.published import PUBLISHED, recognise
from dino_vit.eval.comparison.compare import choose_evaluators, open_compared

LABEL_IDS = {"road": 7, "sidewalk": 8, "pole": 17, "sky": 23, "train": 31, "bicycle": 33}  # of Cityscapes


def write(path: Path, *, values=None):
    """Write an image of 8 × 4 pixels, or a mask with these values in its columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if values is None:
        Image.new("RGB", (8, 4), "grey").save(path)
    else:
        Image.fromarray(np.resize(np.array(values, np.uint8), (4, 8))).save(path)


@pytest.fixture
def voc(tmp_path):
    root = tmp_path / "VOC2012"
    for name in ("2007_1", "2007_2", "2008_3"):
        write(root / f"JPEGImages/{name}.jpg")
        write(root / f"SegmentationClass/{name}.png", values=[0, 15, 255, 20])
    write(root / "JPEGImages/2009_of_no_split.jpg")
    for split, names in (("train", "2007_1\n2008_3\n"), ("val", "2007_2\n")):
        (root / "ImageSets/Segmentation").mkdir(parents=True, exist_ok=True)
        (root / f"ImageSets/Segmentation/{split}.txt").write_text(names)
    return root


@pytest.fixture
def ade20k(tmp_path):
    root = tmp_path / "ADEChallengeData2016"
    for split, count in (("training", 3), ("validation", 2)):
        for number in range(count):
            write(root / f"images/{split}/ADE_{number}.jpg")
            write(root / f"annotations/{split}/ADE_{number}.png", values=[0, 1, 150, 13])
    rows = [f"{i}\t0.1\t9\t9\t1\tthing {i}, of many names  " for i in range(1, 151)]
    (root / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows]))
    return root


@pytest.fixture
def cityscapes(tmp_path):
    root = tmp_path / "cityscapes"
    for split, city in (("train", "aachen"), ("val", "lindau")):
        for number in range(2):
            name = f"{split}/{city}/{city}_{number}"
            write(root / f"leftImg8bit/{name}_leftImg8bit.png")
            write(root / f"gtFine/{name}_gtFine_labelIds.png", values=[*LABEL_IDS.values(), 0, 4])
            write(root / f"gtFine/{name}_gtFine_color.png")
            (root / f"gtFine/{name}_gtFine_polygons.json").write_text("{}")
    return root


def names_and_classes(masks):
    of_pixels = [IGNORED if value == IGNORED else masks.classes[value] for value in masks.mask(0)[0].tolist()]
    return [masks.name(index) for index in range(len(masks))], of_pixels


def test_pascal_voc_has_its_splits_in_lists(voc, caplog):
    with caplog.at_level(logging.INFO):
        names, classes = names_and_classes(open_masks(f"{voc}/"))
    assert names == ["2007_2.jpg"]
    assert classes == ["background", "person", IGNORED, "tv_monitor"] * 2
    assert caplog.messages[-1] == f"{voc}/ is Pascal VOC by its folders: 1 image of val, 21 classes"
    assert names_and_classes(open_masks(str(voc), training=True))[0] == ["2007_1.jpg", "2008_3.jpg"]


def test_pretraining_takes_the_images_of_a_published_set_and_no_masks(voc, ade20k, cityscapes):
    """All splits of them; folders of masks, splits and cities are no labels."""
    for root, count, judged in ((voc, 4, 1), (ade20k, 5, 2), (cityscapes, 4, 2)):
        source = open_source(str(root))
        assert len(open_watched(str(root), source)) == judged
        assert len(source) == count
        assert all(source.name(index).endswith((".jpg", "_leftImg8bit.png")) for index in range(count))
        assert {source.label(index) for index in range(count)} == {None}


def test_labels_of_an_export_that_looks_like_a_published_set_are_kept(voc, caplog):
    for name, label in (("2007_1", "cat"), ("2007_2", "dog")):
        (voc / "JPEGImages" / label).mkdir()
        (voc / f"JPEGImages/{name}.jpg").rename(voc / f"JPEGImages/{label}/{name}.jpg")
    write(voc / "bird" / "1.png")
    with caplog.at_level(logging.INFO):
        source = open_source(str(voc))
    assert source.classes == ["cat", "dog"]
    assert {source.name(index): source.label(index) for index in range(len(source))}["cat/2007_1.jpg"] == 0
    assert "its images are in JPEGImages, labelled by the folders there" in caplog.text
    assert "the images in bird are left out" in caplog.text
    given = {"source": str(voc), "weights": ["a", "b"]}
    assert open_compared(load(CompareConfig, None, given)).classes == ["cat", "dog"]
    assert open_watched(str(voc), source) is None
    assert "is not watched by its masks: no image of" in caplog.text


def test_the_zero_of_ade20k_is_no_class(ade20k, caplog):
    with caplog.at_level(logging.INFO):
        masks = open_masks(str(ade20k))
    assert "is ADE20k by its folders: 2 images of validation, 150 classes" in caplog.messages[-1]
    _, classes = names_and_classes(masks)
    assert classes == [IGNORED, *(f"thing {number}, of many names" for number in (1, 150, 13))] * 2
    assert len(open_masks(str(ade20k), training=True)) == 3
    write(ade20k / "annotations/validation/ADE_0.png", values=[1, 151])
    with pytest.raises(
        ValueError, match=r"the mask has the value 151, but those of ADE20k have no such value"
    ):
        open_masks(str(ade20k)).mask(0)


def test_cityscapes_is_judged_by_19_of_its_classes(cityscapes):
    masks = open_masks(str(cityscapes))
    names, classes = names_and_classes(masks)
    assert names == [f"lindau/lindau_{number}_leftImg8bit.png" for number in (0, 1)]
    assert classes == [*LABEL_IDS, IGNORED, IGNORED]
    assert len(masks.classes) == len(set(masks.classes)) == 19
    assert names_and_classes(open_masks(str(cityscapes), training=True))[0][0].startswith("aachen/")


def test_a_folder_that_is_none_of_them_is_told_what_they_have(voc, cityscapes):
    for root, lacks in ((voc, "SegmentationClass"), (cityscapes, "gtFine")):
        (root / lacks).rename(root / "elsewhere")
        assert recognise(str(root)) is None
        with pytest.raises(ValueError, match="has no masks") as caught:
            open_masks(str(root))
        for published in PUBLISHED:
            for path in published.paths("FOLDER", training=False):
                assert path in str(caught.value)


def test_what_a_published_set_lacks_or_has_of_its_own_is_said(ade20k, cityscapes):
    (ade20k / "images/training").rename(ade20k / "images/elsewhere")
    with pytest.raises(ValueError, match=r"is ADE20k by its folders, but lacks .*images/training"):
        open_masks(str(ade20k), training=True)
    with pytest.raises(ValueError, match="has masks of its own: leave out masks"):
        open_masks(str(cityscapes), ignore_value=0)


def test_the_command_learns_from_one_split_and_judges_the_other(voc, weights):
    result = dino_vit.dense(voc, weights, steps=2, blocks=2, precision="no", verbose=False)
    assert "pixels of 1 image; learned from 2 others: k-NN from " in str(result)
    assert set(result.linear.iou) == {"background", "person", "tv_monitor"}


def test_a_published_set_is_compared_by_its_images_and_masks_alone(voc):
    """Its folders are no classes, and its masks no images."""
    config = load(CompareConfig, None, {"source": str(voc), "weights": ["a", "b"]})
    source = open_compared(config)
    assert [source.name(index) for index in range(len(source))] == ["2007_2.jpg"]
    assert choose_evaluators(config, source) == ["dense"]
