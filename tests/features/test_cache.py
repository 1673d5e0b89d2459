"""Features on disk: the same whoever computes them, and computed again only when they must be."""

import gc
import os
from dataclasses import replace

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow.parquet import read_table

from dino_vit import VisionTransformer, save_backbone
from dino_vit.core.storage import read_tensors
from dino_vit.data.image_set import ImageSet
from dino_vit.data.open import open_source
from dino_vit.data.stores.calls import wrap
from dino_vit.data.stores.files import open_folder
from dino_vit.data.synthetic import make_textures
from dino_vit.features.cache import cached_features
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.models.backbone import CLS, FeatureSpec
from dino_vit.views.eval_transform import EvalTransform
from tests.support.backbones import extracted
from tests.support.close import assert_close_to_scale
from tests.support.image_sets import write_folder, write_tar
from tests.support.images import saved, write_synthetic
from tests.support.processes import command_in_two
from tests.support.runs import command_here

TRANSFORM = EvalTransform(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)


def backbone():
    torch.manual_seed(0)
    return VisionTransformer(image_size=16, patch_size=4, width=32, depth=2, heads=2)


def store_in(folder, source=None, *, spec=CLS, **changes):
    settings = {"model": backbone(), "transform": TRANSFORM, "batch_size": 4, "cache": folder, **changes}
    source = make_textures(length=50) if source is None else source
    return cached_features(FrozenBackbone(**settings), source, spec=spec)


@pytest.fixture
def computed(monkeypatch):
    """Count the images that go through the backbone."""
    batches = []
    compute = FrozenBackbone.compute

    def counted(self, images, spec):
        batches.append(len(images))
        return compute(self, images, spec)

    monkeypatch.setattr(FrozenBackbone, "compute", counted)
    return batches


@pytest.mark.parametrize(
    "spec", [FeatureSpec(), FeatureSpec(tokens="cls+mean", blocks=2), FeatureSpec(tokens="patches")]
)
def test_what_is_stored_is_what_is_extracted(tmp_path, spec):
    source = make_textures(length=50)
    stored, indices = store_in(tmp_path, source, spec=spec)
    expected = extracted(backbone(), source, spec=spec, transform=TRANSFORM, batch_size=4)
    assert np.array_equal(stored, expected.numpy())
    assert indices.tolist() == list(range(50))


def test_a_part_has_the_features_of_its_images(tmp_path):
    source = make_textures(length=50)
    chosen, indices = store_in(tmp_path, source.subset([40, 3, 17]))
    np.testing.assert_allclose(chosen, store_in(tmp_path, source)[0][[40, 3, 17]], atol=1e-5)
    assert indices.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="no images"):
        store_in(tmp_path, source.subset([]))


def test_cached_features_are_used_until_anything_differs(tmp_path, computed):
    first, _ = store_in(tmp_path)
    assert sum(computed) == 50
    computed.clear()
    again, _ = store_in(tmp_path)
    assert computed == []
    assert np.array_equal(first, again)
    other = backbone()
    with torch.no_grad():
        other.norm.bias[0] += 1e-3
    for changes in (
        {"model": other},
        {"source": make_textures(length=50, seed=1)},
        {"transform": replace(TRANSFORM, resize_mode="whole", size=(16, 12))},
        {"transform": replace(TRANSFORM, mean=(0.4,) * 3)},
        {"spec": FeatureSpec(blocks=2)},
        {"autocast": torch.bfloat16},
        {"source": make_textures(length=50).subset(range(49))},
    ):
        store_in(tmp_path, **changes)
        assert sum(computed) in (49, 50), changes
        computed.clear()


@pytest.fixture
def folder(tmp_path):
    """A folder of 40 images, three of which cannot be read."""
    root = tmp_path / "images"
    for number in range(40):
        path = root / ("even" if number % 2 == 0 else "odd") / f"{number:02}.png"
        write_synthetic(path, number)
        if number in (3, 4, 10):
            path.write_bytes(path.read_bytes()[:40])
    return root


@pytest.mark.parametrize("kind", ["folder", "tar", "npy"])
def test_images_that_are_replaced_are_noticed_though_they_are_as_long_and_as_old(tmp_path, kind, computed):
    """As `cp -p`, `rsync -t` and `tar -x` leave them; names, sizes and the times of folders stay."""
    root, pixels = tmp_path / "set", np.random.default_rng(0).integers(0, 256, (200, 16, 16, 3), np.uint8)
    spec = root if kind == "folder" else tmp_path / f"set.{kind}"
    for _ in range(2):
        files = {f"{n:03}.bmp": saved(Image.fromarray(image), "BMP") for n, image in enumerate(pixels)}
        write_folder(root, files)
        write_tar(tmp_path / "set.tar", files)
        np.save(tmp_path / "set.npy", pixels)
        for path in (root, *root.iterdir(), tmp_path / "set.tar", tmp_path / "set.npy"):
            os.utime(path, (10**9, 10**9))
        computed.clear()
        store_in(tmp_path / "cache", open_source(str(spec)))
        assert sum(computed) == 200
        pixels[77] = pixels[77, ::-1]  # none of the images that a look at a few reads


def test_features_of_images_behind_a_list_of_urls_are_those_of_the_images_now(tmp_path, computed, caplog):
    """What is behind a URL may be replaced without a trace; that such features are not kept is said."""
    caplog.set_level("INFO")
    (tmp_path / "list.txt").write_text("\n".join(f"memory://urls/{number}.bmp" for number in range(5)))
    features = []
    for value in (20, 200):
        for number in range(5):
            data = saved(Image.new("RGB", (16, 16), (value + number, 0, 0)), "BMP")
            fsspec.filesystem("memory").pipe(f"/urls/{number}.bmp", data)
        features.append(store_in(tmp_path / "cache", open_source(str(tmp_path / "list.txt")))[0])
    assert sum(computed) == 10
    assert not np.array_equal(*features)
    assert caplog.text.count("the features could not be cached") == 2
    assert not list(tmp_path.rglob("*.safetensors"))


class Code:
    """Images of code, which change without a trace."""

    shift = 0

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return np.full((16, 16, 3), index + self.shift * (index == 7), np.uint8)


def test_features_of_an_object_are_kept_only_if_it_has_a_fingerprint(tmp_path, computed):
    given = Code()
    for given.shift in (0, 90):
        values, _ = store_in(tmp_path, wrap(given))
        expected = extracted(backbone(), wrap(given), transform=TRANSFORM, batch_size=4)
        assert np.array_equal(values, expected.numpy())
        assert not list(tmp_path.rglob("*.safetensors"))
    given.fingerprint = "mine, version 1"
    computed.clear()
    for _ in range(2):
        store_in(tmp_path, wrap(given))
    assert sum(computed) == 30


def test_the_cache_keeps_the_features_that_were_used_last(tmp_path, computed, caplog, monkeypatch):
    monkeypatch.setenv("DINO_VIT_CACHE", str(tmp_path / "indexes"))
    caplog.set_level("INFO")
    names = {}
    for seed in (0, 1, 2):
        store_in(tmp_path, make_textures(length=50, seed=seed))
        names |= {path.name: seed for path in tmp_path.iterdir() if path.name not in names}
        for path in tmp_path.iterdir():
            os.utime(path, (0, seed + names[path.name]))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    store_in(tmp_path, make_textures(length=50, seed=0))  # used last
    kept = store_in(tmp_path, make_textures(length=50, seed=3), cache_gb=size / 1e9)
    assert len(kept[0]) == 50
    assert {names.get(path.name, 3) for path in tmp_path.iterdir()} == {0, 2, 3}
    assert "1 file that had not been used for longest" in caplog.text
    del kept
    gc.collect()
    store_in(tmp_path, make_textures(length=50, seed=4), cache_gb=0)
    assert len(list(tmp_path.iterdir())) == 1, "the latest stays"


def test_damaged_features_are_computed_again(tmp_path, computed):
    expected = store_in(tmp_path)[0].copy()
    (path,) = tmp_path.rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    computed.clear()
    assert np.array_equal(store_in(tmp_path)[0], expected)
    assert sum(computed) == 50


def test_unreadable_images_are_left_out_and_named(tmp_path, folder, caplog):
    for _ in range(2):  # computed, and from the cache
        caplog.clear()
        source = open_folder(folder)
        stored, indices = store_in(tmp_path / "cache", source)
        assert len(indices) == len(stored) == 37
        assert "3 of 40 images cannot be read and are left out:\n  even/04.png: " in caplog.text
        assert [source.name(row)[-6:-4] for row in indices[:4]] == ["00", "02", "06", "08"]


def test_an_image_that_can_be_read_again_is_not_left_out(tmp_path, monkeypatch, computed):
    source, read = make_textures(length=5), ImageSet.read

    def away(self, index):
        if index == 3:
            raise OSError("the disk is away")
        return read(self, index)

    monkeypatch.setattr(ImageSet, "read", away)
    for _ in range(2):
        assert len(store_in(tmp_path, source)[1]) == 4
    assert sum(computed) == 4
    monkeypatch.setattr(ImageSet, "read", read)
    assert len(store_in(tmp_path, source)[1]) == 5


def test_a_source_without_one_readable_image_is_refused(tmp_path, folder):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"none of 40 images can be read, the first is even/00.png"):
        store_in(tmp_path / "cache", open_folder(folder))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_two_processes_write_what_one_does(tmp_path):
    save_backbone(backbone(), tmp_path / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    argv = ["embed", "synthetic:301:32", f"weights={tmp_path / 'a.safetensors'}", "batch_size=4"]
    paths = [[f"cache={tmp_path / name}", f"output={tmp_path / name}.parquet"] for name in ("one", "two")]
    command_here(*argv, "precision=no", *paths[0])
    _, second = command_in_two(tmp_path / "two.log", *argv, "precision=no", *paths[1])
    assert not second.count("images"), "only rank 0 logs"
    (one,), (two,) = ([*(tmp_path / name).iterdir()] for name in ("one", "two"))
    assert one.name == two.name
    for ours, theirs in zip(*(read_tensors(path)[0].values() for path in (one, two)), strict=True):
        assert_close_to_scale(ours.float(), theirs.float())  # by batches of other sizes
    ours, theirs = (read_table(tmp_path / f"{name}.parquet") for name in ("one", "two"))
    assert ours.drop_columns("embedding").equals(theirs.drop_columns("embedding"))
    assert_close_to_scale(*(torch.tensor(table["embedding"].to_pylist()) for table in (ours, theirs)))
