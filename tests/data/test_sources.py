import os

import numpy as np
import pytest
import torch

from dino_vit.data.image_set import evenly_spaced
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.open import open_source
from dino_vit.data.stores.files import open_folder
from dino_vit.data.synthetic import PATTERNS, make_textures
from tests.support.image_sets import items, write_folder


@pytest.fixture
def folder(tmp_path):
    """Files that hold their names, five of them images."""
    names = ["b/2.png", "b/deep/1.PNG", "a/x.jpg", "a-b/é.png", "top.png", "a/notes.txt", ".hidden.png"]
    return write_folder(tmp_path, {name: name.encode() for name in names})


def test_one_image_and_images_that_match_a_pattern(folder):
    assert items(open_source(str(folder / "b" / "2.png"))) == [("2.png", b"b/2.png", None)]
    matching = [("a-b/é.png", "a-b"), ("a/x.jpg", "a"), ("b/2.png", "b")]
    pattern = str(folder / "*" / "*.[pj]*g")
    assert items(open_source(pattern)) == [(name, name.encode(), label) for name, label in matching]
    (folder / "b" / "2.png").write_bytes(b"changed")
    assert open_source(pattern).read(2) == b"changed"


def test_empty_folders_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match=r"contains no files\. Give a folder"):
        open_source(str(tmp_path))
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "README").write_text("")
    with pytest.raises(ValueError, match=r"contains no images, only 2 \.txt, 1 without a suffix"):
        open_source(str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder"):
        open_folder(tmp_path / "a.txt")


def test_a_file_that_is_gone_is_an_unreadable_image(folder):
    source = open_folder(folder)
    os.remove(folder / "top.png")
    with pytest.raises(UnreadableImage, match=r"^top\.png: No such file"):
        read_image(source, 4)


def test_synthetic_is_a_function_of_seed_and_index():
    source = open_source("synthetic:100:72")
    assert (len(source), source.read(7).shape, source.read(7).dtype) == (100, (3, 72, 72), torch.uint8)
    assert torch.equal(source.read(7), make_textures(length=50, size=72).read(7))
    assert not torch.equal(source.read(7), source.read(17))
    assert not torch.equal(source.read(7), make_textures(length=100, size=72, seed=1).read(7))
    assert torch.equal(source.read(-1), source.read(99))
    with pytest.raises(ValueError, match="is not valid: write synthetic"):
        open_source("synthetic:7:48:20")
    with pytest.raises(IndexError):
        source.read(100)


def test_synthetic_labels_are_balanced_and_named():
    source = make_textures(length=1000)
    assert np.bincount([source.label(index) for index in range(1000)]).tolist() == [100] * len(PATTERNS)
    assert source.name(12) == "checkers/00000012"
    assert source.fingerprint != make_textures(length=1000, size=64).fingerprint
    with pytest.raises(ValueError, match="16 to 512"):
        make_textures(size=8)


@pytest.mark.parametrize(
    ("length", "count"), [(1, 5), (7, 7), (1000, 6), (20_000, 12), (3000, 2000), (50, 49)]
)
def test_spread_indices_are_different_and_from_all_over(length, count):
    indices = evenly_spaced(length, count)
    assert len(set(indices)) == len(indices) == min(length, count)
    assert all(0 <= index < length for index in indices)
    if length >= 1000:
        assert max(np.diff([0, *indices, length])) < max(2.7 * length / count, 4)
        assert len({index % 10 for index in indices}) > min(count // 2, 9)
