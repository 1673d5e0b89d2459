"""Published sets of masks are read as they are unpacked."""

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import dino_vit
from dino_vit.config.commands import IGNORED, CompareConfig
from dino_vit.config.loading import load
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.masks import open_masks, open_watched
from dino_vit.data.sources.open import open_source
from dino_vit.eval.comparison.compare import choose_evaluators, open_compared, open_measured

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
    pixels = [IGNORED if value == IGNORED else masks.classes[value] for value in masks.mask(0)[0].tolist()]
    return [masks.name(index) for index in range(len(masks))], pixels


def test_pascal_voc_has_its_splits_in_lists(voc, caplog):
    with caplog.at_level(logging.INFO):
        names, classes = names_and_classes(open_masks(f"{voc}/", "voc"))
    assert names == ["2007_2.jpg"]
    assert classes == ["background", "person", IGNORED, "tv_monitor"] * 2
    assert caplog.messages[-1] == f"{voc}/, Pascal VOC: 1 image of val, 21 classes"
    assert names_and_classes(open_masks(str(voc), "voc", training=True))[0] == ["2007_1.jpg", "2008_3.jpg"]


def test_a_folder_that_looks_like_a_published_set_is_read_as_any_other(voc):
    """As that of a labelling tool, which exports in its layout."""
    write(voc / "bird" / "1.png")
    source = open_source(str(voc))
    assert source.classes == ["JPEGImages", "SegmentationClass", "bird"]
    assert open_watched(str(voc), source) is None
    for name, label in (("2007_1", "cat"), ("2007_2", "dog")):
        (voc / "JPEGImages" / label).mkdir()
        (voc / f"JPEGImages/{name}.jpg").rename(voc / f"JPEGImages/{label}/{name}.jpg")
    source = open_source(f"{voc}/JPEGImages")
    assert source.classes == ["cat", "dog"]
    assert {source.name(index): source.label(index) for index in range(len(source))}["cat/2007_1.jpg"] == 0


def test_the_zero_of_ade20k_is_no_class(ade20k):
    masks = open_masks(str(ade20k), "ade20k")
    assert (len(masks), len(masks.classes)) == (2, 150)
    _, classes = names_and_classes(masks)
    assert classes == [IGNORED, *(f"thing {number}, of many names" for number in (1, 150, 13))] * 2
    assert len(open_masks(str(ade20k), "ade20k", training=True)) == 3
    write(ade20k / "annotations/validation/ADE_0.png", values=[1, 151])
    with pytest.raises(
        ValueError, match=r"the mask has the value 151, but those of ADE20k have no such value"
    ):
        open_masks(str(ade20k), "ade20k").mask(0)


def test_cityscapes_is_judged_by_19_of_its_classes(cityscapes):
    masks = open_masks(str(cityscapes), "cityscapes")
    names, classes = names_and_classes(masks)
    assert names == [f"lindau/lindau_{number}_leftImg8bit.png" for number in (0, 1)]
    assert classes == [*LABEL_IDS, IGNORED, IGNORED]
    assert len(masks.classes) == len(set(masks.classes)) == 19
    train = open_masks(str(cityscapes), "cityscapes", training=True)
    assert names_and_classes(train)[0][0].startswith("aachen/")


def test_masks_follow_their_images_into_a_part(cityscapes):
    masks = open_masks(str(cityscapes), "cityscapes")
    chosen = masks.subset([1, 0, 1])
    assert [chosen.name(index) for index in range(3)] == [masks.name(index) for index in (1, 0, 1)]
    assert all((chosen.mask(index) == masks.mask(1 - index % 2)).all() for index in range(3))
    assert chosen.label(0) is None


def test_what_a_folder_lacks_or_has_of_its_own_is_said(voc, ade20k, cityscapes):
    with pytest.raises(ValueError, match=r"has no masks: .* or masks=voc, ade20k, cityscapes for"):
        open_masks(f"{voc}/JPEGImages")
    for name, root in {"voc": voc, "ade20k": ade20k, "cityscapes": cityscapes}.items():
        with pytest.raises(ValueError, match=f" as it is unpacked: give masks={name}$"):
            open_masks(f"{root}/")
    with pytest.raises(ValueError, match=r"is not Pascal VOC as it is unpacked: it lacks .*/JPEGImages"):
        open_masks(str(cityscapes), "voc")
    (ade20k / "images/training").rename(ade20k / "images/elsewhere")
    with pytest.raises(ValueError, match=r"is not ADE20k as it is unpacked: it lacks .*images/training"):
        open_masks(str(ade20k), "ade20k", training=True)
    with pytest.raises(ValueError, match="masks=cityscapes has classes of its own: leave out class_names"):
        open_masks(str(cityscapes), "cityscapes", ignore_value=0)


def test_a_mask_of_another_size_than_an_array_is_refused(tmp_path):
    """Whose size Pillow cannot tell."""
    (tmp_path / "bands").mkdir()
    np.save(tmp_path / "bands/1.npy", np.zeros((13, 32, 48), np.float32))
    write(tmp_path / "masks/1.png", values=[0, 1])  # 8 × 4 pixels
    with pytest.raises(UnreadableImage, match=r"the mask has 8 × 4 pixels, its image 48 × 32"):
        open_masks(str(tmp_path / "bands")).mask(0)
    np.save(tmp_path / "bands/1.npy", np.zeros((4, 8), np.float32))
    assert open_masks(str(tmp_path / "bands")).mask(0).shape == (4, 8)


def test_the_command_learns_from_one_split_and_judges_the_other(voc, weights):
    settings = {"steps": 2, "blocks": 2, "precision": "no", "verbose": False}
    result = dino_vit.dense(voc, weights, masks="voc", **settings)
    assert "pixels of 1 image; learned from 2 others: k-NN from " in str(result)
    assert set(result.linear.iou) == {"background", "person", "tv_monitor"}


def test_a_published_set_is_compared_by_its_images_and_masks_alone(voc, caplog):
    """Its folders are no classes, and its masks no images."""
    given = {"source": str(voc), "weights": ["a", "b"]}
    assert open_measured(load(CompareConfig, None, given))[0].classes == ["JPEGImages", "SegmentationClass"]
    assert "looks like Pascal VOC, whose folders are no classes: give masks=voc" in caplog.text
    config = load(CompareConfig, None, {**given, "masks": "voc"})
    source = open_compared(config)
    assert [source.name(index) for index in range(len(source))] == ["2007_2.jpg"]
    assert choose_evaluators(config, source) == ["dense"]
