"""The command that classifies pixels: its figures are those of a loop over patches, in one process or two."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dino_vit.core.blocks import choose_blocks, series_of
from dino_vit.data.sources.synthetic import make_scenes
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import eval_transform_of
from dino_vit.weights import load_backbone
from tests.support.backbones import extracted
from tests.support.images import write_synthetic
from tests.support.processes import command_in_two
from tests.support.runs import command_here

SCENES = make_scenes(length=12, size=16)


def arguments(weights, output, *more):
    settings = [f"weights={weights}", f"output={output}", "precision=no", "k=3", "steps=6", *more]
    return ["dense", "synthetic:scenes:12:16", *settings]


def patches_of(weights, index):
    """Normalised features of an image's patches, and the class of most pixels of each."""
    model = load_backbone(weights)
    whole, spec = eval_transform_of(model, fit="whole"), FeatureSpec(tokens="patches")
    (patches,) = extracted(model, SCENES, [index], spec, whole)
    mask = SCENES.mask(index)
    classes = [
        int(mask[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].flatten().bincount().argmax())
        for y in range(4)
        for x in range(4)
    ]
    return F.normalize(patches.double(), dim=1), classes


def kinds_of(indices):
    """Classes that the masks of some scenes have."""
    return {int(kind) for index in indices for kind in SCENES.mask(index).unique()}


def test_neighbours_are_those_of_a_loop_in_one_process_or_two(tmp_path, weights):
    output = tmp_path / "dense.json"
    said = command_here(*arguments(weights, output))
    found = json.loads(output.read_text())
    judged = choose_blocks(series_of(SCENES.name, range(12)), 2, seed=0)
    bank = [patches_of(weights, index) for index in np.flatnonzero(~judged).tolist()]
    features, classes = torch.cat([one for one, _ in bank]), [kind for _, kinds in bank for kind in kinds]
    right = pixels = 0
    occurring = kinds_of(np.flatnonzero(judged).tolist())  # in masks or predicted
    for index in np.flatnonzero(judged).tolist():
        votes = torch.zeros(16, 10)
        for place, patch in enumerate(patches_of(weights, index)[0]):
            cosines = features @ patch
            for nearest in cosines.argsort(descending=True)[:3].tolist():
                votes[place, classes[nearest]] += (cosines[nearest] / 0.07).exp()
        best = F.one_hot(votes.argmax(1), 10).float().T.reshape(1, 10, 4, 4)
        predicted = F.interpolate(best, size=(16, 16), mode="bilinear").argmax(1)[0]
        right += int((predicted == SCENES.mask(index)).sum())
        pixels += 256
        occurring |= {*predicted.unique().tolist()}
    assert found["knn"]["pixel_accuracy"]["percent"] == pytest.approx(100 * right / pixels, abs=0.2)
    assert (found["images"], found["bank"]) == (6, 96)
    assert list(found["knn"]["iou"]) == [SCENES.classes[kind] for kind in sorted(occurring)]
    assert "k-NN of patches" in said
    assert "the largest class, has" in said
    command_in_two(tmp_path / "log", *arguments(weights, tmp_path / "two.json"))
    two = json.loads((tmp_path / "two.json").read_text())
    assert two["bank"] == found["bank"]
    for judge in ("knn", "linear"):
        assert two[judge]["pixel_accuracy"] == pytest.approx(found[judge]["pixel_accuracy"])


@pytest.fixture
def folders(tmp_path):
    """Scenes 0 to 11 as files: their masks have a palette and the classes 3 to 12, one image has no mask."""
    for name in ("photos/sub", "masks/sub"):
        (tmp_path / name).mkdir(parents=True)
    for index in range(12):
        picture = Image.fromarray(SCENES.read(index).permute(1, 2, 0).numpy())
        picture.save(tmp_path / "photos" / "sub" / f"{index:02d}.png")
        mask = Image.fromarray(SCENES.mask(index).numpy() + 3, "P")
        mask.putpalette(bytes(range(256)) * 3)
        mask.save(tmp_path / "masks" / "sub" / f"{index:02d}.png")
    Image.new("RGB", (16, 16)).save(tmp_path / "photos" / "no_mask.png")
    return tmp_path


def evaluate_folders(folders, weights, *more, code=0):
    output = folders / "dense.json"
    settings = [f"weights={weights}", f"output={output}", "precision=no", "k=3", "steps=6", *more]
    said = command_here("dense", folders / "photos", *settings, code=code)
    return said, json.loads(output.read_text()) if output.exists() else None


def test_folders_of_photos_and_masks_are_as_good_as_scenes(folders, weights):
    command_here(*arguments(weights, folders / "scenes.json"))
    names = [f"none {value}" for value in range(3)] + list(SCENES.classes)
    (folders / "names.txt").write_text("\n".join(names) + "\n")
    said, found = evaluate_folders(folders, weights, f"class_names={folders / 'names.txt'}")
    expected = json.loads((folders / "scenes.json").read_text())
    assert "1 image of" in said
    assert "without a mask in" in said
    for key in ("images", "bank", "largest_class"):
        assert found[key] == expected[key], key
    for judge, figure in (("knn", "mean_iou"), ("linear", "iou")):
        assert found[judge][figure] == pytest.approx(expected[judge][figure])


def test_a_mask_that_cannot_be_used_leaves_its_image_out(folders, weights):
    masks = folders / "masks" / "sub"  # 00 to 05 are judged
    (masks / "00.png").write_bytes(b"nothing of the kind")
    (masks / "01.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    Image.new("RGB", (16, 16)).save(masks / "02.png")
    Image.new("L", (20, 16)).save(masks / "03.png")
    text, results = evaluate_folders(folders, weights)
    assert "sub/01.png: the mask cannot be read" in text
    assert "it must be a PNG with a palette, or grey with 8 bits, but is PNG RGB" in text
    assert "the mask has 20 × 16 pixels, its image 16 × 16" in text
    assert "left out: sub/00.png: the mask cannot be read: it is not an image" in text
    assert "0x" not in text
    assert results["images"] == 2
    assert "4 of 6 images cannot be read and are left out, the first is sub/00.png" in text


def test_masks_that_do_not_fit_or_are_missing_are_refused(folders, weights):
    (folders / "names.txt").write_text("a\nb\n")
    said, _ = evaluate_folders(folders, weights, f"class_names={folders / 'names.txt'}", code=2)
    assert "but values of classes go from 0 to 1; set ignore_value" in said
    (folders / "names.txt").write_text("road\nsky\nroad\n")
    said, _ = evaluate_folders(folders, weights, f"class_names={folders / 'names.txt'}", code=2)
    assert "names.txt has the class 'road' on lines 1, 3; each needs its own name" in said
    said = command_here("dense", "synthetic:12:16", f"weights={weights}", code=2)
    assert "synthetic:12:16 has no masks" in said
    assert "synthetic:scenes has masks" in said
    for index in range(12):
        mask = Image.new("L", (16, 16), index // 6)
        mask.save(folders / "masks" / "sub" / f"{index:02d}.png")
    said, _ = evaluate_folders(folders, weights, code=2)
    assert "the patches to learn from have only the class 1, and telling classes apart takes two" in said
    for setting, message in (
        ("masks=masks", "has masks of its own"),
        ("train_masks=masks", "train_masks are those of train, which is not given"),
    ):
        assert message in command_here(*arguments(weights, folders / "x.json", setting), code=2)


def test_images_to_learn_from_are_no_images_to_judge_by(tmp_path, weights, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_synthetic(tmp_path / "images" / f"{number}.png", number, size=16)
        mask = np.repeat(np.arange(2, dtype=np.uint8), 128).reshape(16, 16)
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    settings = [f"weights={weights}", "train=./images", "train_masks=masks"]
    said = command_here("dense", "images", *settings, code=2)
    assert "all 3 images of images are in train=./images too" in said
