"""Features on disk: the same bytes whoever computes them, and computed again only when they must be."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import dino_vit.eval.features.store as store
from dino_vit import VisionTransformer, save_backbone
from dino_vit.core.storage import read_tensors
from dino_vit.data.sources.open import FolderSource, SyntheticSource
from dino_vit.eval.features.extraction import Extraction, FeatureSpec, extract_features
from dino_vit.eval.features.store import shard_length, stored_features
from dino_vit.views.preparation import Preparation
from tests.support.images import write_synthetic
from tests.support.processes import command_in_two, torchrun_environs
from tests.support.runs import Command, command

PREPARATION = Preparation(size=(16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)


def backbone():
    torch.manual_seed(0)
    return VisionTransformer(image_size=16, patch_size=4, width=32, depth=2, heads=2)


def store_in(folder, source=None, *, model=None, batch_size=4, indices=None, dtype="float32", **changes):
    extraction = Extraction(
        model or backbone(),
        source or SyntheticSource(length=50),
        **{"preparation": PREPARATION, **changes},
    )
    return stored_features(extraction, folder=folder, batch_size=batch_size, indices=indices, dtype=dtype)


def files(folder):
    """Return what all files of a folder hold, by path; safetensors writes its metadata in any order."""
    return {str(path.relative_to(folder)): contents(path) for path in folder.rglob("*") if path.is_file()}


def contents(path):
    if path.suffix != ".safetensors":
        return path.read_bytes()
    tensors, metadata = read_tensors(path)
    return metadata, {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}


@pytest.fixture
def computed(monkeypatch):
    """Count the batches that go through the backbone."""
    batches = []
    compute = store.Extraction.compute

    def counted(self, images):
        batches.append(len(images))
        return compute(self, images)

    monkeypatch.setattr(store.Extraction, "compute", counted)
    return batches


@pytest.mark.parametrize(
    "spec", [FeatureSpec(), FeatureSpec(tokens="cls+mean", blocks=2), FeatureSpec(tokens="patches")]
)
def test_what_is_stored_is_what_is_extracted(tmp_path, spec):
    source = SyntheticSource(length=50)
    stored = store_in(tmp_path, source, spec=spec)
    extracted = extract_features(
        backbone(), source, range(50), preparation=PREPARATION, batch_size=4, spec=spec
    )
    assert np.array_equal(stored.values, extracted.values.numpy())
    assert isinstance(stored.values, np.memmap)
    assert stored.indices.tolist() == list(range(50))
    half = store_in(tmp_path, source, spec=spec, dtype="float16")
    assert np.array_equal(half.values, extracted.values.half().numpy())


def test_chosen_images_come_in_the_order_asked_for(tmp_path):
    source = SyntheticSource(length=50)
    chosen = store_in(tmp_path, source, indices=[40, 3, 17])
    whole = store_in(tmp_path, source)
    np.testing.assert_allclose(chosen.values, whole.values[[40, 3, 17]], atol=1e-5)
    assert chosen.indices.tolist() == [40, 3, 17]
    with pytest.raises(ValueError, match="no images"):
        store_in(tmp_path, source, indices=[])


def test_cached_features_are_used_until_anything_differs(tmp_path, computed):
    first = store_in(tmp_path)
    assert sum(computed) == 50
    computed.clear()
    again = store_in(tmp_path)
    assert computed == []
    assert np.array_equal(first.values, again.values)
    other = backbone()
    with torch.no_grad():
        other.norm.bias[0] += 1e-3
    for changes in (
        {"model": other},
        {"source": SyntheticSource(length=50, seed=1)},
        {"preparation": replace(PREPARATION, fit="whole", size=(16, 12))},
        {"preparation": replace(PREPARATION, mean=(0.4,) * 3)},
        {"spec": FeatureSpec(blocks=2)},
        {"autocast": torch.bfloat16},
        {"dtype": "float16"},
        {"indices": range(49)},
        {"batch_size": 5},
    ):
        store_in(tmp_path, **changes)
        assert sum(computed) in (49, 50), changes
        computed.clear()


def test_images_that_only_look_the_same_are_noticed(tmp_path, computed):
    """A source whose fingerprint knows no contents."""
    store_in(tmp_path)
    source = SyntheticSource(length=50, seed=1)
    source.seed, known = 0, source.fingerprint
    source.read = SyntheticSource(length=50, seed=5).read
    assert SyntheticSource(length=50).fingerprint == source.fingerprint != known
    computed.clear()
    store_in(tmp_path, source)
    assert sum(computed) == 50


@pytest.mark.parametrize("name", ["values.npy", "features.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damaged_features_are_computed_again(tmp_path, computed, name, damage):
    whole = store_in(tmp_path)
    expected = np.array(whole.values)
    before = files(tmp_path)
    (path,) = tmp_path.rglob(name)
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        path.write_bytes(data)
    elif damage == "truncate":
        path.write_bytes(data[:-9])
    else:
        path.unlink()
    computed.clear()
    assert np.array_equal(store_in(tmp_path).values, expected)
    assert sum(computed) == 50
    assert files(tmp_path) == before


def test_finished_shards_are_kept_and_damaged_ones_made_again(tmp_path, computed, monkeypatch):
    source = SyntheticSource(length=300)
    store_in(tmp_path / "whole", source)
    expected = files(tmp_path / "whole")
    computed.clear()
    write = store._CacheEntry._write

    def write_then_fail(self, shard, parts):
        write(self, shard, parts)
        if shard.start == 100:
            raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(store._CacheEntry, "_write", write_then_fail)
        with pytest.raises(RuntimeError, match="stopped"):
            store_in(tmp_path / "parts", source)
    shards = sorted((tmp_path / "parts").rglob("*.safetensors"))
    assert len(shards) == 26
    data = bytearray(shards[3].read_bytes())
    data[-1] ^= 1
    shards[3].write_bytes(data)
    computed.clear()
    store_in(tmp_path / "parts", source)
    assert sum(computed) == 300 - 26 * 4 + 4
    assert files(tmp_path / "parts") == expected


def test_shards_are_whole_batches_of_bounded_size():
    for images in (1, 7, 640, 5000, 1_281_167):
        for batch in (1, 32, 100, 256, 10_000):
            for size in (64, 384 * 4, 196 * 768 * 4):
                length = shard_length(images, batch, size)
                assert length % batch == 0
                assert length == batch or (length <= 4096 and length * size <= 64 * 2**20)
    assert shard_length(5000, 32, 1536) == 64
    assert shard_length(10**6, 128, 1536) == 4096


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


def test_unreadable_images_are_left_out_and_named(tmp_path, folder, caplog):
    for _ in range(2):  # computed, and from the cache
        caplog.clear()
        source = FolderSource(folder)
        stored = store_in(tmp_path / "cache", source)
        assert len(stored.indices) == len(stored.values) == 37
        assert {image.name for image in stored.unreadable} == {"odd/03.png", "even/04.png", "even/10.png"}
        assert "3 of 40 images cannot be read and are left out: even/04.png" in caplog.text
        assert [source.name(row)[-6:-4] for row in stored.indices[:4]] == ["00", "02", "06", "08"]


def test_an_image_that_can_be_read_again_is_not_left_out(tmp_path, folder):
    """A disk that was away for a while changes no fingerprint."""

    class Away(FolderSource):
        def read(self, index):
            if index < 25 and away:
                raise OSError(5, "Input/output error")
            return super().read(index)

    away, source = True, Away(folder)
    assert len(store_in(tmp_path / "cache", source).indices) == 15
    away = False
    assert len(store_in(tmp_path / "cache", source).indices) == 37


def test_a_source_without_one_readable_image_is_refused(tmp_path, folder):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"none of 40 images can be read, the first is even/00.png"):
        store_in(tmp_path / "cache", FolderSource(folder))
    assert not list((tmp_path / "cache").rglob("features.safetensors"))


@pytest.fixture
def embed(tmp_path):
    save_backbone(backbone(), tmp_path / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    settings = [f"weights={tmp_path / 'a.safetensors'}", "batch_size=4", "precision=no"]

    def arguments(name):
        paths = [f"cache={tmp_path / name}", f"output={tmp_path / name}.npy"]
        return ["embed", "synthetic:300:32", *settings, *paths]

    return arguments


def die_after_five_shards():
    write = store._CacheEntry._write
    written = 0

    def write_then_die(self, shard, parts):
        nonlocal written
        write(self, shard, parts)
        written += 1
        if written == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    store._CacheEntry._write = write_then_die


def test_the_files_are_the_same_bytes_for_two_processes_and_after_a_kill(tmp_path, embed):
    command(tmp_path / "one.log", *embed("one"))
    expected = files(tmp_path / "one")
    assert len(expected) == 2

    _, second = command_in_two(tmp_path / "two.log", *embed("two"))
    assert files(tmp_path / "two") == expected
    assert not second.count("images"), "only rank 0 logs"

    killed = {"code": -signal.SIGKILL, "before": die_after_five_shards}
    command_in_two(tmp_path / "killed.log", *embed("killed"), **killed)
    assert len(list((tmp_path / "killed").rglob("*.safetensors"))) == 10
    assert not (tmp_path / "killed.npy").exists()
    command(tmp_path / "again.log", *embed("killed"))
    assert files(tmp_path / "killed") == expected
    for suffix in (".npy", ".csv"):
        same = {(tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two", "killed")}
        assert len(same) == 1
    one, *others = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two", "killed"))
    assert others == [one, one]


def test_an_error_in_one_process_is_said_and_ends_both(tmp_path, embed):
    first, second = torchrun_environs()
    waiting = Command(embed("x"), tmp_path / "0.log", environ=first)
    failing = Command(embed("x"), tmp_path / "1.log", environ=second, before=fail_at_the_first_shard)
    assert failing.wait() == 2
    assert "no space" in failing.said
    assert waiting.wait() == 1
    assert "dino-vit embed: another process of this run has ended; see its error message" in waiting.said
    assert "Traceback" not in waiting.said + failing.said
    assert not (tmp_path / "x.npy").exists()


def fail_at_the_first_shard():
    def fail(self, shard, parts):
        raise OSError(28, "no space left on device")

    store._CacheEntry._write = fail
