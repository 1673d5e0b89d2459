"""Classification of corrupted images in the published layout of folders."""

import json

import numpy as np
import pytest
from PIL import Image, ImageFilter

from eval.imagenet_c import ALEXNET, ImageNetCConfig, run


@pytest.fixture
def folders(tmp_path):
    """Two classes, light and dark, of which blur leaves more than inversion does."""
    generator = np.random.default_rng(0)

    def write(folder, change=lambda image: image, count=6):
        for number in range(count):
            for name, low in (("dark", 0), ("light", 130)):
                (folder / name).mkdir(parents=True, exist_ok=True)
                pixels = generator.integers(low, low + 120, (16, 16, 3), dtype=np.uint8)
                change(Image.fromarray(pixels)).save(folder / name / f"{number}.png")

    write(tmp_path / "train", count=20)
    write(tmp_path / "val")
    for severity in (1, 2):
        blur = ImageFilter.GaussianBlur(severity)
        write(tmp_path / "c" / "defocus_blur" / str(severity), lambda image, blur=blur: image.filter(blur))
    write(tmp_path / "c" / "fog" / "1", lambda image: image.point(lambda value: 255 - value))
    return tmp_path


@pytest.mark.parametrize("classifier", ["linear", "knn"])
def test_errors_are_counted_by_kind_and_severity(folders, weights, classifier):
    settings = {"train": str(folders / "train"), "val": str(folders / "val"), "cache": str(folders / "cache")}
    config = ImageNetCConfig(
        source=str(folders / "c"), weights=str(weights), classifier=classifier, **settings
    )
    result = run(config)
    figures = json.loads(result.path.read_text())["results"]
    assert figures["clean"] == 0
    assert figures["errors"] == {"defocus_blur": {"1": 0, "2": 0}, "fog": {"1": 100}}
    assert figures["mCE"] == pytest.approx((0 + 100 / ALEXNET["fog"]) / 2)
    assert "clean images 0.0 %" in str(result)


def test_without_alexnets_error_there_is_no_mce(folders, weights):
    (folders / "c" / "fog").rename(folders / "c" / "mist")
    config = ImageNetCConfig(
        source=str(folders / "c"), weights=str(weights), train=str(folders / "train"), classifier="knn"
    )
    result = run(config)
    assert json.loads(result.path.read_text())["results"]["mCE"] is None
    assert "no mCE, as AlexNet's error is not published for mist" in str(result)
