"""The mIoU of a run is that of a loop over patches, and masks that cannot be used end no run."""

import re
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import jaccard_score

from dino_vit.core.blocks import choose_blocks, series_of
from dino_vit.data.sources.open import open_source
from dino_vit.data.sources.synthetic import make_scenes
from dino_vit.eval.maps.online import open_segmentation
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.views.eval_transform import EvalTransform
from tests.support.backbones import backbone
from tests.support.naive import ranked_classes

TRANSFORM = EvalTransform(size=(32, 32), mean=(0.5,) * 3, std=(0.25,) * 3)
SCENES = make_scenes(length=21, size=40)


def opened(spec, source, model=None):
    evaluation = OnlineEvaluation(source=source, transform=TRANSFORM, seed=0)
    return open_segmentation(spec, evaluation, model or backbone())


def test_patches_of_half_the_images_are_told_by_those_of_the_others():
    model = backbone()
    segmentation, said = opened("synthetic:scenes", SCENES, model)
    assert said == [
        "the run is evaluated by masks: patches of 10 images are classified by those of 11 others"
    ]
    judged = choose_blocks(series_of(SCENES.name, range(21)), 2, seed=0)
    learned_from, told = (np.flatnonzero(rows).tolist() for rows in (~judged, judged))
    assert ([*segmentation.learned], [*segmentation.judged]) == (learned_from, told)
    features, classes = [], []
    for index in range(21):
        image = (TRANSFORM.read(SCENES, index) / 255 - 0.5) / 0.25
        with torch.no_grad():
            features.append(F.normalize(model.forward_features(image[None])[0, 1:], dim=1))
        mask = TRANSFORM.place_mask(SCENES.mask(index))
        cells = (mask[8 * y : 8 * y + 8, 8 * x : 8 * x + 8] for y in range(4) for x in range(4))
        classes.append([int(cell.flatten().bincount().argmax()) for cell in cells])
    bank = torch.cat([features[index] for index in learned_from])
    labels = [label for index in learned_from for label in classes[index]]
    cosines = torch.cat([features[index] for index in told]) @ bank.T
    predicted = [ranked_classes(row.tolist(), labels, 20)[0] for row in cosines]
    true = [label for index in told for label in classes[index]]
    figures = segmentation(model)
    assert figures["miou"] == pytest.approx(100 * jaccard_score(true, predicted, average="macro"))
    assert 1 < figures["miou_error"] < 10
    constant = [max(set(labels), key=labels.count)] * len(true)
    expected = 100 * jaccard_score(true, constant, average="macro", zero_division=0)
    assert segmentation.guesses == {"constant_miou": pytest.approx(expected), "mask_images": 10}


def test_masks_that_are_learned_from_as_images_are_said(tmp_path):
    for name in ("JPEGImages/1.jpg", "SegmentationClass/1.png", "ImageSets/Segmentation/val.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(tmp_path / name, "PNG")
    _, (said,) = opened(f"{tmp_path}/", open_source(str(tmp_path)))
    assert said.startswith(f"{tmp_path} looks like Pascal VOC: the run learns from the pictures in Segm")
    assert said.endswith(f"give {tmp_path}/JPEGImages to leave them out")


def test_masks_that_cannot_be_used_are_left_out_or_said(tmp_path, caplog):
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
    for index in range(6):
        image, mask = SCENES.read(index).permute(1, 2, 0).numpy(), SCENES.mask(index).numpy()
        Image.fromarray(image).save(tmp_path / f"photos/{index}.png")
        Image.fromarray(mask).save(tmp_path / f"masks/{index}.png")
    spec, unlike = str(tmp_path / "photos"), Image.new("RGB", (40, 40))
    source = open_source(spec)
    unlike.save(tmp_path / "masks/0.png")
    segmentation, _ = opened(spec, source)
    assert (len(segmentation.learned), len(segmentation.judged)) == (2, 3)
    assert "left out: 0.png: the mask cannot be read" in caplog.text
    for name in "015":  # which are learned from
        Image.new("L", (40, 40), 255).save(tmp_path / f"masks/{name}.png")
    unlike.convert("L").save(tmp_path / "masks/1.png")
    for reason in (
        "need two classes, and those to judge by one; the value 255 is none",
        "no image of .*photos has a mask in",
    ):
        segmentation, (said,) = opened(spec, source)
        assert segmentation is None
        assert re.search(f"the run is not evaluated by masks: .*{reason}", said)
        shutil.rmtree(tmp_path / "masks")
        (tmp_path / "masks").mkdir()
        unlike.save(tmp_path / "masks/of_another.png")
    shutil.rmtree(tmp_path / "masks")
    assert opened(spec, source) == (None, [])
