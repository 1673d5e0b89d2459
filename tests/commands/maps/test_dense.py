"""The command that classifies pixels: its figures are those of a loop over patches, in one process or two."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dino_vit.commands.maps.dense import Bank, _linear_layer
from dino_vit.data.sources.scenes import SceneSource
from dino_vit.eval.features.extraction import FeatureSpec, extract_features
from dino_vit.views.preparation import preparation_of
from dino_vit.weights import load_backbone
from tests.support.processes import command_in_two
from tests.support.runs import command

SCENES = SceneSource(length=12, size=16)


def arguments(weights, output, *more):
    settings = [f"weights={weights}", f"output={output}", "precision=no", "k=3", *more]
    return ["dense", "synthetic:scenes:12:16", *settings]


def patches_of(weights, index):
    """Normalised features of an image's patches, and the class of most pixels of each."""
    model = load_backbone(weights)
    found = extract_features(
        model,
        SCENES,
        [index],
        preparation=preparation_of(model),
        batch_size=1,
        spec=FeatureSpec(tokens="patches"),
    )
    mask = SCENES.mask(index)
    classes = [
        int(mask[4 * y : 4 * y + 4, 4 * x : 4 * x + 4].flatten().bincount().argmax())
        for y in range(4)
        for x in range(4)
    ]
    return F.normalize(found.values[0].double(), dim=1), classes


def test_neighbours_are_those_of_a_loop(tmp_path, weights):
    output = tmp_path / "dense.json"
    said = command(tmp_path / "log", *arguments(weights, output))
    found = json.loads(output.read_text())
    bank = [patches_of(weights, index) for index in range(0, 12, 2)]
    features, classes = torch.cat([one for one, _ in bank]), [kind for _, kinds in bank for kind in kinds]
    right = pixels = 0
    for index in range(1, 12, 2):
        votes = torch.zeros(16, 10)
        for place, patch in enumerate(patches_of(weights, index)[0]):
            cosines = features @ patch
            for nearest in cosines.argsort(descending=True)[:3].tolist():
                votes[place, classes[nearest]] += (cosines[nearest] / 0.07).exp()
        best = F.one_hot(votes.argmax(1), 10).float().T.reshape(1, 10, 4, 4)
        predicted = F.interpolate(best, size=(16, 16), mode="bilinear").argmax(1)[0]
        right += int((predicted == SCENES.mask(index)).sum())
        pixels += 256
    assert found["knn"]["pixel_accuracy"]["percent"] == pytest.approx(100 * right / pixels, abs=0.2)
    assert (found["images"], found["bank"], len(found["classes"])) == (6, 96, 10)
    assert "k-NN of patches" in said
    assert "the largest class, has" in said
    with Image.open(tmp_path / "dense.png") as picture:
        assert picture.height > picture.width  # six rows of four pictures


def test_two_processes_count_as_one(tmp_path, weights):
    command(tmp_path / "log", *arguments(weights, tmp_path / "one.json"))
    command_in_two(tmp_path / "log", *arguments(weights, tmp_path / "two.json"))
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for judge in ("knn", "linear"):
        assert two[judge]["pixel_accuracy"] == pytest.approx(one[judge]["pixel_accuracy"])


def test_a_set_to_learn_from_and_few_patches_of_it(tmp_path, weights):
    output = tmp_path / "dense.json"
    more = ["train=synthetic:scenes:20:16", "patches=60", "pictures=0"]
    command(tmp_path / "log", *arguments(weights, output, *more))
    found = json.loads(output.read_text())
    assert (found["images"], found["bank"]) == (12, 60)
    assert not (tmp_path / "dense.png").exists()


def test_images_without_masks_are_refused(tmp_path, weights):
    said = command(tmp_path / "log", "dense", "synthetic:12:16", f"weights={weights}", code=2)
    assert "synthetic:12:16 has no masks; generated scenes have: synthetic:scenes" in said


def test_the_linear_layer_learns_what_is_linear():
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(3).repeat(200)
    features = F.one_hot(classes, 8).float() + 0.1 * torch.randn(600, 8, generator=generator)
    head, _ = _linear_layer(Bank(features, classes), (0.01, 1.0, 100.0), 3)
    assert (head.scores(features)[:, 0].argmax(1) == classes).float().mean() > 0.99


@pytest.mark.parametrize("fit", ["crop", "whole"])
def test_a_mask_is_placed_as_its_image_is(weights, fit):
    """On an image whose pixels are its classes, far from the borders between them."""
    mask = torch.zeros(90, 60, dtype=torch.uint8)
    mask[30:70, 25:45] = 200
    preparation = preparation_of(load_backbone(weights), size=(32, 32), fit=fit)

    class One:
        def read(self, index):
            return mask.expand(3, -1, -1).contiguous()

        def name(self, index):
            return "one"

    image = preparation.read(One(), 0)[0].int()
    placed = preparation.place_mask(mask)
    assert placed.shape == (32, 32)
    assert set(placed.unique().tolist()) == {0, 200}
    far = np.abs(image.numpy() - 100) > 90
    assert far.mean() > 0.8
    assert (np.abs(image.numpy() - placed.int().numpy())[far] < 20).all()
