"""The threshold of `duplicates`, which the features choose by copies that are made of the images."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit import VisionTransformer, save_backbone
from dino_vit.eval.embeddings.threshold import COPIES, best_threshold, crop, recompress, reduce
from tests.support.images import write_synthetic
from tests.support.runs import arguments, command_here

KINDS = "jpeg", "reduced", "cropped"
QUIET = {"precision": "no", "verbose": False}


@pytest.fixture
def photos(tmp_path):
    """Ninety images, and copies of twelve of them: encoded again, reduced or cropped."""
    root = tmp_path / "photos"
    for number in range(90):
        write_synthetic(root / f"{number:02}.png", number, size=64)
        if number < 12:
            with Image.open(root / f"{number:02}.png") as image:
                write_copy(image, root / f"{number:02}-{KINDS[number % 3]}")
    return root


def write_copy(image, stem):
    if stem.name.endswith("jpeg"):
        image.save(f"{stem}.jpg", quality=60)
    elif stem.name.endswith("reduced"):
        image.resize((51, 51)).save(f"{stem}.png")
    else:
        image.crop((1, 2, 62, 63)).save(f"{stem}.png")


def embedded(tmp_path, weights, photos):
    found = dino_vit.embed(photos, weights, output=tmp_path / "e.parquet", cache=tmp_path / "cache", **QUIET)
    return found.path


def test_copies_on_the_disk_are_found_without_a_threshold(tmp_path, weights, photos, caplog):
    output = tmp_path / "d.json"
    found = dino_vit.duplicates(embedded(tmp_path, weights, photos), output=output, verbose=False)
    pairs = {pair.images for pair in found.pairs.closest}
    copies = {(f"{number:02}-{KINDS[number % 3]}", f"{number:02}.png") for number in range(12)}
    found_copies = {pair for pair in pairs if pair[1] == f"{pair[0][:2]}.png"}
    assert len(found_copies) >= 8 < len(copies)
    assert len(pairs - found_copies) <= 2
    chosen = found.threshold
    assert (chosen.origin, chosen.value < 1, chosen.copies > 0.6) == ("features", True, True)
    lines = found.text.splitlines()
    assert lines[0].startswith(f"{len(pairs)} pairs in ")
    assert lines[1].startswith(f"threshold={chosen.value:g}, chosen for these features: ")
    written = json.loads(output.read_text())
    assert written["threshold"] == chosen.value
    assert written["threshold_chosen"]["by"] == "features"
    assert written["threshold_chosen"]["copies_that_pass"] == chosen.copies
    assert "do not tell copies" not in caplog.text


def test_a_threshold_that_is_given_stays(tmp_path, weights, photos):
    found = dino_vit.duplicates(embedded(tmp_path, weights, photos), threshold=0.9, verbose=False)
    assert (found.threshold.value, found.threshold.origin) == (0.9, "given")
    assert "threshold=0.9, as given" in found.text


def test_without_the_weights_or_the_images_the_threshold_is_fixed_and_that_is_said(
    tmp_path, weights, photos, caplog
):
    path = embedded(tmp_path, weights, photos)
    photos.rename(tmp_path / "moved")
    assert dino_vit.duplicates(path, verbose=False).threshold.origin == "fixed"
    assert "threshold=0.95 is not chosen for these features, as no copies of images can be" in caplog.text
    (tmp_path / "moved").rename(photos)
    weights.unlink()
    caplog.clear()
    found = dino_vit.duplicates(path, verbose=False)
    assert (found.threshold.value, found.threshold.origin) == (0.95, "fixed")
    assert "a.safetensors does not exist" in caplog.text


def test_images_that_cannot_be_read_any_more_choose_no_threshold(tmp_path, weights, photos, caplog):
    path = embedded(tmp_path, weights, photos)
    for image in photos.iterdir():
        image.write_bytes(b"damaged")
    found = dino_vit.duplicates(path, verbose=False)
    assert (found.threshold.value, found.threshold.origin) == (0.95, "fixed")
    assert "none of the embedded images can be read any more" in caplog.text


def test_features_that_do_not_tell_copies_apart_are_said(tmp_path, photos, caplog):
    """A network to which all images are alike."""
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=1, heads=2)
    with torch.no_grad():
        model.patch_embed.proj.weight.mul_(1e-6)
    save_backbone(model, tmp_path / "w.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    dino_vit.duplicates(embedded(tmp_path, tmp_path / "w.safetensors", photos), verbose=False)
    assert "these features do not tell copies from similar images" in caplog.text
    assert "timm:" in caplog.text


def test_the_run_of_weights_that_learned_nothing_is_said(tmp_path, photos, caplog):
    run = tmp_path / "run"
    command_here(*arguments(run, {"budget.steps": 5, "optim.warmup_epochs": 0}))
    path = embedded(tmp_path, run, photos)
    dino_vit.duplicates(path, threshold=0.9, verbose=False)
    assert "learned nothing" not in caplog.text
    records = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(records[-1]) | {"state": "stuck"}
    (run / "metrics.jsonl").write_text("\n".join([*records[:-1], json.dumps(last)]) + "\n")
    dino_vit.duplicates(path, threshold=0.9, verbose=False)
    assert "of a run that learned nothing (stuck)" in caplog.text


def test_the_best_threshold_makes_the_fewest_mistakes():
    generator = torch.Generator().manual_seed(0)
    copies = 0.9 + 0.1 * torch.rand(300, generator=generator)
    others = 0.5 + 0.47 * torch.rand(900, generator=generator)

    def mistakes(value):
        missed = sum(cosine < value for cosine in copies.tolist()) / 300
        return COPIES * missed + sum(cosine >= value for cosine in others.tolist()) / 900

    chosen = best_threshold(copies, others)
    assert mistakes(chosen) <= min(mistakes(value) for value in np.linspace(0.5, 0.99, 400)) + 2 / 300
    assert 0.96 < chosen < 0.971


@pytest.mark.parametrize("share", [0.1, 0.3, 0.45])
def test_real_copies_among_the_images_do_not_raise_the_threshold(share):
    generator = torch.Generator().manual_seed(0)
    copies = 0.95 + 0.05 * torch.rand(300, generator=generator)
    others = 0.5 + 0.4 * torch.rand(1000, generator=generator)
    real = round(1000 * share)
    others[:real] = 0.95 + 0.05 * torch.rand(real, generator=generator)
    assert 0.89 < best_threshold(copies, others) < 0.96


def test_copies_are_mild():
    image = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 40, 60), dtype=np.uint8))
    image = torch.nn.functional.avg_pool2d(image.float(), 5, 1, 2).to(torch.uint8)
    assert crop(image, 3).shape == (3, 38, 57)
    assert any(
        torch.equal(crop(image, 3), image[:, y : y + 38, x : x + 57]) for y in (0, 1, 2) for x in range(4)
    )
    assert {tuple(crop(image, index)[0, 0, :2].tolist()) for index in range(30)} != {
        tuple(image[0, 0, :2].tolist())
    }
    assert reduce(image, 0).shape == (3, 32, 48)
    for each in (image, image[:1]):
        again = recompress(each, 0)
        assert again.shape == each.shape
        assert 0 < (again.float() - each.float()).abs().mean() < 10


def test_a_chosen_threshold_is_not_followed_by_advice_to_raise_it(tmp_path, weights):
    for number in range(8):
        write_synthetic(tmp_path / f"same/{number}.png", 3, size=64)
    path = embedded(tmp_path, weights, tmp_path / "same")
    chosen = dino_vit.duplicates(path, verbose=False)
    assert chosen.pairs.total == 28
    assert "more pairs than images" not in chosen.text
    assert "more pairs than images" in dino_vit.duplicates(path, threshold=0.5, verbose=False).text
