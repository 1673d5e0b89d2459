"""Retrieval by the protocol of Oxford and Paris, on a few images, against the definition in plain Python."""

import json
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import dino_vit
from tests.support.processes import command_in_two

SIDES = {"a": (40, 28), "b": (28, 40), "c": (32, 32), "d": (44, 20), "e": (24, 24), "big": (900, 300)}
BOX = (4.0, 2.2, 31.6, 26.0)
GND = [
    {"bbx": list(BOX), "easy": [0, 4], "hard": [1], "junk": [2]},
    {"bbx": [0, 0, 32, 32], "easy": [], "hard": [3, 4], "junk": [0]},
]
RULES = {"easy": ("easy", "hard"), "medium": ("easy hard", ""), "hard": ("hard", "easy")}


def write_truth(folder, gnd):
    truth = {"imlist": list(SIDES), "qimlist": ["a", "c"], "gnd": gnd}
    (folder / "gnd_rmini.pkl").write_bytes(pickle.dumps(truth, 2))


@pytest.fixture
def buildings(tmp_path):
    """A folder of the published form: the images of the bank, two of which are queries too."""
    folder, generator = tmp_path / "rmini", np.random.default_rng(0)
    (folder / "jpg").mkdir(parents=True)
    for name, (width, height) in SIDES.items():
        small = generator.integers(0, 255, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(small).resize((width, height)).save(folder / "jpg" / f"{name}.png")
    write_truth(folder, GND)
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


def average_precision(order, relevant, junk):
    """By trapezoids, on the ranking without junk."""
    ranking, found, total = [one for one in order if one not in junk], 0, 0.0
    for place, one in enumerate(ranking):
        if one in relevant:
            before = found / place if place else 1.0
            found += 1
            total += (before + found / (place + 1)) / 2
    return total / len(relevant)


@pytest.mark.parametrize("boxes", [True, False])
def test_figures_are_those_of_the_definition(buildings, weights, tmp_path, boxes):
    settings = {"scales": [1, 0.5], "boxes": boxes, "output": tmp_path / "a.json", "precision": "no"}
    found = dino_vit.retrieval(buildings, weights=weights, verbose=False, **settings)
    model = dino_vit.load_backbone(weights)
    bank = torch.stack([feature(model, buildings / "jpg" / f"{name}.png") for name in SIDES])
    asked = [("a", BOX if boxes else None), ("c", (0, 0, 32, 32))]
    queries = [feature(model, buildings / "jpg" / f"{name}.png", box) for name, box in asked]
    for difficulty, (wanted, ignored) in RULES.items():
        values = []
        for query, truth in zip(queries, GND, strict=True):
            order = (bank @ query).argsort(descending=True).tolist()
            relevant = {one for kind in wanted.split() for one in truth[kind]}
            junk = {*truth["junk"], *(one for kind in ignored.split() for one in truth[kind])}
            if relevant:
                values.append(average_precision(order, relevant, junk))
        assert found.difficulties[difficulty]["mAP"].percent == pytest.approx(100 * np.mean(values), abs=1e-3)
    assert found.mean_ap == found.difficulties["medium"]["mAP"]
    assert json.loads(found.path.read_text())["results"].keys() == RULES.keys()
    assert "medium" in str(found)


def test_two_processes_and_a_whitening(buildings, weights, tmp_path):
    settings = {"whitening": buildings / "jpg", "dimensions": 3, "precision": "no"}
    one = dino_vit.retrieval(
        buildings, weights=weights, output=tmp_path / "a.json", verbose=False, **settings
    )
    given = [f"{key}={value}" for key, value in {**settings, "cache": tmp_path / "own"}.items()]
    output = tmp_path / "b.json"
    command_in_two(
        tmp_path / "log", "retrieval", str(buildings), f"weights={weights}", f"output={output}", *given
    )
    two = json.loads(output.read_text())["results"]
    for difficulty, figures in one.difficulties.items():
        assert two[difficulty]["mAP"]["percent"] == pytest.approx(figures["mAP"].percent, abs=1e-3)


def test_features_are_cached_for_what_they_depend_on(buildings, weights, tmp_path, monkeypatch):
    settings = {"weights": weights, "output": tmp_path / "a.json", "verbose": False}
    once = dino_vit.retrieval(buildings, **settings)

    def computed(*_):
        raise AssertionError("computed")

    monkeypatch.setattr("dino_vit.eval.retrieval.whole.WholeExtraction.compute", computed)
    assert dino_vit.retrieval(buildings, **settings).difficulties == once.difficulties
    write_truth(buildings, [{**GND[0], "bbx": [0, 0, 20, 20]}, GND[1]])
    for changed in ({}, {"boxes": False}, {"scales": [1, 0.5]}, {"size": 64}, {"tokens": "gem"}):
        with pytest.raises(AssertionError, match="computed"):
            dino_vit.retrieval(buildings, **settings, **changed)


def test_what_does_not_fit_is_said(buildings, weights, tmp_path):
    settings = {"weights": weights, "output": tmp_path / "a.json", "verbose": False}
    with pytest.raises(ValueError, match=r"queries: .*gnd_rmini\.pkl says which images are relevant"):
        dino_vit.retrieval(buildings, queries=buildings / "jpg", **settings)
    with pytest.raises(ValueError, match=r"fit: .*gnd_rmini\.pkl keep their aspect ratio; leave it out"):
        dino_vit.retrieval(buildings, fit="whole", **settings)
    with pytest.raises(ValueError, match="boxes=false is for a folder with the ground truth"):
        dino_vit.retrieval(buildings / "jpg", boxes=False, **settings)
    (buildings / "a.png").write_bytes((buildings / "jpg" / "b.png").read_bytes())
    with pytest.raises(ValueError, match=r"a\.png and jpg/a\.png have the same; keep one"):
        dino_vit.retrieval(buildings, **settings)
    (buildings / "a.png").unlink()
    write_truth(buildings, [{**GND[0], "bbx": [100, 100, 120, 120]}, GND[1]])
    with pytest.raises(ValueError, match=r"the box of .*a\.png has no pixel of the image"):
        dino_vit.retrieval(buildings, **settings)
    (buildings / "jpg" / "d.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"one cannot be read: .*d\.png: it is not a JPEG"):
        dino_vit.retrieval(buildings, boxes=False, **settings)
    (buildings / "jpg" / "d.png").unlink()
    with pytest.raises(ValueError, match=r"1 of the 6 images .* are missing, such as d\.jpg"):
        dino_vit.retrieval(buildings, **settings)


def test_a_difficulty_without_relevant_images_is_left_out(buildings, weights, tmp_path):
    settings = {"weights": weights, "output": tmp_path / "a.json", "verbose": False}
    write_truth(buildings, [{**one, "easy": [1], "hard": []} for one in GND])
    found = dino_vit.retrieval(buildings, **settings)
    assert list(found.difficulties) == ["easy", "medium"]
    write_truth(buildings, [{**one, "easy": [], "hard": []} for one in GND])
    with pytest.raises(ValueError, match="no query of the ground truth has easy or hard images"):
        dino_vit.retrieval(buildings, **settings)
