"""Revisited Oxford and Paris on a few images, against the definition in plain Python."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import dino_vit
from eval.oxford_paris import OxfordParisConfig, run

SIDES = {"a": (40, 28), "b": (28, 40), "c": (32, 32), "d": (44, 20), "e": (24, 24), "big": (900, 300)}
BOX = (4.0, 2.2, 31.6, 26.0)
GND = [
    {"bbx": list(BOX), "easy": [0, 4], "hard": [1], "junk": [2]},
    {"bbx": [0, 0, 32, 32], "easy": [], "hard": [3, 4], "junk": [0]},
]
RULES = {"easy": ("easy", "hard"), "medium": ("easy hard", ""), "hard": ("hard", "easy")}


@pytest.fixture
def buildings(tmp_path):
    """A folder of the published form: the images of the bank, two of which are queries too."""
    folder, generator = tmp_path / "rmini", np.random.default_rng(0)
    (folder / "jpg").mkdir(parents=True)
    for name, (width, height) in SIDES.items():
        small = generator.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(small).resize((width, height)).save(folder / "jpg" / f"{name}.png")
    truth = {"imlist": list(SIDES), "qimlist": ["a", "c"], "gnd": GND}
    (folder / "gnd_rmini.pkl").write_bytes(pickle.dumps(truth, 2))
    return folder


def feature(model, path, box=None):
    """The CLS token of an image, the mean at two scales; pixels that fill no patch are cut off."""
    image = Image.open(path)
    if box:
        image = image.crop(tuple(round(side) for side in box))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    if max(pixels.shape) > 512:
        pixels = F.interpolate(pixels[None], size=(171, 512), mode="bicubic", antialias=True)[0]
        pixels = (pixels.clamp(0, 1) * 255).round() / 255
    parts = []
    for scale in (1, 0.5):
        scaled = F.interpolate((pixels[None] - 0.5) / 0.5, scale_factor=scale, mode="bilinear")
        height, width = (side // 4 * 4 for side in scaled.shape[-2:])
        with torch.no_grad():
            parts.append(model.forward_cls(scaled[..., :height, :width])[0])
    return F.normalize(sum(parts), dim=0)


def walk(order, relevant, junk):
    """Average precision by trapezoids and mP@5 of a ranking without junk, image by image."""
    ranking, hits, total, ranks = [image for image in order if image not in junk], 0, 0.0, []
    for place, image in enumerate(ranking):
        if image in relevant:
            before = hits / place if place else 1.0
            hits += 1
            total += (before + hits / (place + 1)) / 2
            ranks.append(place + 1)
    last = min(5, ranks[-1])
    return total / len(relevant), sum(rank <= last for rank in ranks) / last


@pytest.mark.parametrize("boxes", [True, False])
def test_figures_are_those_of_the_definition(buildings, weights, boxes):
    settings = {"source": str(buildings), "weights": str(weights), "scales": (1, 0.5), "boxes": boxes}
    results = json.loads(run(OxfordParisConfig(**settings)).path.read_text())["results"]
    model = dino_vit.load_backbone(weights)
    bank = torch.stack([feature(model, buildings / "jpg" / f"{name}.png") for name in SIDES])
    asked = [("a", BOX if boxes else None), ("c", (0, 0, 32, 32) if boxes else None)]
    queries = [feature(model, buildings / "jpg" / f"{name}.png", box) for name, box in asked]
    for difficulty, (wanted, ignored) in RULES.items():
        values = []
        for query, truth in zip(queries, GND, strict=True):
            order = (bank @ query).argsort(descending=True).tolist()
            relevant = {image for kind in wanted.split() for image in truth[kind]}
            junk = {*truth["junk"], *(image for kind in ignored.split() for image in truth[kind])}
            if relevant:
                values.append(walk(order, relevant, junk))
        expected = 100 * np.mean(values, axis=0)
        figures = results[difficulty]
        assert [figures["mAP"], figures["mP@5"]] == pytest.approx(expected.tolist(), abs=1e-3)
    assert results.keys() == RULES.keys()


def test_a_ground_truth_that_would_run_a_program_is_refused(buildings, weights):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(buildings / "made"),)

    (buildings / "gnd_rmini.pkl").write_bytes(pickle.dumps({"imlist": Runs()}))
    with pytest.raises(ValueError, match="is no ground truth"):
        run(OxfordParisConfig(source=str(buildings), weights=str(weights)))
    assert not (buildings / "made").exists()


def test_missing_images_are_counted(buildings, weights):
    (buildings / "jpg" / "d.png").unlink()
    with pytest.raises(ValueError, match=r"1 of the 6 images are missing, such as d\.jpg"):
        run(OxfordParisConfig(source=str(buildings), weights=str(weights)))
