import io
import os
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.sources.open import FolderSource, open_source
from dino_vit.data.sources.synthetic import PATTERNS, SyntheticSource


def picture(seed=0, height=20, width=30):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


def file(image, kind="PNG"):
    buffer = io.BytesIO()
    pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    Image.fromarray(pixels.numpy()).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path):
    for place, name in enumerate(["b/2.png", "b/deep/1.PNG", "a/x.jpg", "a-b/é.png", "top.png"]):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image = picture(place)
        path.write_bytes(file(image, "JPEG" if name.endswith("jpg") else "PNG"))
    (tmp_path / "a" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden.png").write_bytes(b"")
    return tmp_path


def test_folder_lists_every_image_once_sorted_by_path(folder):
    source = open_source(str(folder))
    names = [source.name(index) for index in range(len(source))]
    assert names == ["a-b/é.png", "a/x.jpg", "b/2.png", "b/deep/1.PNG", "top.png"]
    assert source.name(-1) == "top.png"
    assert torch.equal(read_image(source, 2), picture(0))
    with pytest.raises(IndexError):
        source.read(5)


def test_folder_labels_are_the_first_level_folders(folder):
    source = FolderSource(folder)
    assert [source.label(index) for index in range(len(source))] == [1, 0, 2, 2, None]
    assert source.classes == ["a", "a-b", "b"]


def test_one_image_and_images_that_match_a_pattern(folder):
    one = open_source(str(folder / "b" / "2.png"))
    assert (len(one), one.name(0), one.label(0)) == (1, "2.png", None)
    assert torch.equal(read_image(one, 0), picture(0))
    matching = open_source(str(folder / "*" / "*.[pj]*g"))
    assert [matching.name(index) for index in range(3)] == ["a-b/é.png", "a/x.jpg", "b/2.png"]
    assert [matching.classes[matching.label(index)] for index in range(3)] == ["a-b", "a", "b"]
    assert torch.equal(read_image(matching, 2), picture(0))
    (folder / "b" / "2.png").write_bytes(file(picture(9)))
    assert torch.equal(read_image(open_source(str(folder / "*" / "*.[pj]*g")), 2), picture(9))


def test_folder_fingerprint_follows_the_names(folder):
    before = FolderSource(folder).fingerprint
    assert FolderSource(folder).fingerprint == before
    (folder / "b" / "2.png").rename(folder / "b" / "3.png")
    assert FolderSource(folder).fingerprint != before


def test_folder_follows_links_and_ends_on_a_loop(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "far.png").write_bytes(file(picture()))
    (folder / "link").symlink_to(elsewhere)
    (folder / "b" / "loop").symlink_to(folder)
    names = [FolderSource(folder).name(index) for index in range(6)]
    assert len(FolderSource(folder)) == 6
    assert "link/far.png" in names


def test_empty_and_missing_folders_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"contains no files\. Give a folder"):
        open_source(str(tmp_path))
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "README").write_text("")
    with pytest.raises(ValueError, match=r"contains no images, only 2 \.txt, 1 without a suffix"):
        open_source(str(tmp_path))
    with pytest.raises(ValueError, match=r"does not exist: give a folder"):
        open_source(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="is not a folder"):
        FolderSource(tmp_path / "a.txt")


@pytest.mark.parametrize("spec", ["synthetic:many", "synthetic:1:2:3", "synthetic:10:-3"])
def test_misspelled_synthetic_sets_are_refused(spec):
    with pytest.raises(ValueError, match="synthetic:LENGTH:SIZE"):
        open_source(spec)


def test_a_file_that_is_gone_is_an_unreadable_image(folder):
    source = FolderSource(folder)
    os.remove(folder / "top.png")
    with pytest.raises(UnreadableImage, match=r"^top\.png: No such file"):
        read_image(source, 4)


def test_synthetic_is_a_function_of_seed_and_index():
    source = open_source("synthetic:100:48")
    assert (len(source), source.read(7).shape, source.read(7).dtype) == (100, (3, 48, 48), torch.uint8)
    assert torch.equal(source.read(7), SyntheticSource(length=50, size=48).read(7))
    assert not torch.equal(source.read(7), source.read(17))
    assert not torch.equal(source.read(7), SyntheticSource(length=100, size=48, seed=1).read(7))
    assert torch.equal(source.read(-1), source.read(99))
    with pytest.raises(IndexError):
        source.read(100)


def test_synthetic_labels_are_balanced_and_named():
    source = SyntheticSource(length=1000)
    assert np.bincount([source.label(index) for index in range(1000)]).tolist() == [100] * len(PATTERNS)
    assert source.name(12) == "checkers/00000012"
    assert source.fingerprint != SyntheticSource(length=1000, size=64).fingerprint
    with pytest.raises(ValueError, match="16 to 512"):
        SyntheticSource(size=8)


def neighbours_are_right(features, labels, k=20):
    bank, query = features[:-500], features[-500:]
    nearest = (F.normalize(query) @ F.normalize(bank).T).topk(k)
    votes = torch.zeros(500, 10).scatter_add_(1, labels[nearest.indices], (nearest.values / 0.07).exp())
    return float((votes.argmax(1) == labels[-500:]).float().mean())


def test_synthetic_pixels_say_little_about_the_class():
    source = SyntheticSource(length=6000)
    pixels = torch.stack([source.read(index)[0].flatten() for index in range(6000)]).float()
    labels = torch.arange(6000) % 10
    assert neighbours_are_right(pixels, labels) < 0.28
    assert neighbours_are_right(pixels - pixels.mean(1, keepdim=True), labels) < 0.38


def test_synthetic_classes_differ_by_what_does_not_move():
    """The amplitude spectrum, blind to place, tells classes apart: there is something to learn."""
    source = SyntheticSource(length=3000)
    images = torch.stack([source.read(index)[0] for index in range(3000)]).float()
    spectrum = torch.fft.fft2(images - images.mean((1, 2), keepdim=True)).abs().flatten(1).sqrt()
    assert neighbours_are_right(spectrum, torch.arange(3000) % 10) > 0.3


def test_synthetic_images_are_made_fast():
    source = SyntheticSource()
    start = time.process_time()
    for index in range(300):
        source.read(index)
    assert 300 / (time.process_time() - start) > 500  # about 4000 on an idle core
