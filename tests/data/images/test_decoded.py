"""Images that stay decoded: the same views, to the bit, by one process and by its workers."""

import multiprocessing

import numpy as np
import pytest
from PIL import Image

from dino_vit.data.images import decoded
from dino_vit.data.images.decoded import DecodedImages
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.open import open_source
from dino_vit.data.statistics import inspect_images
from dino_vit.views.build import keep_decoded
from dino_vit.views.geometry import View
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler

VIEWS = (View(size=(32, 32), scale=(0.25, 1.0)), View(size=(16, 16), scale=(0.1, 0.4)))


@pytest.fixture
def photos(tmp_path):
    """JPEG of several sizes, one of them turned by its tag, one grey, and a PNG."""
    random = np.random.default_rng(0)
    for number in range(12):
        pixels = random.integers(0, 256, (40 + 25 * number, 300 - 20 * number, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).convert("L" if number == 3 else "RGB")
        tags = image.getexif()
        if number == 5:
            tags[274] = 6
        image.save(tmp_path / f"{number:02}.jpg", exif=tags)
    image.save(tmp_path / "last.png")
    return tmp_path


def loader_of(folder, *, keep, **settings):
    source = open_source(str(folder))
    loader = Loader(
        source=source,
        views=VIEWS,
        sampler=Sampler(length=len(source), global_batch=4, seed=0),
        scaled_decoding=True,
        **settings,
    )
    if keep:
        loader.decoded = DecodedImages(len(source), 10_000_000)
    return loader


def batches(loader, count=12):
    iterator = loader.batches()
    taken = [next(iterator) for _ in range(count)]
    iterator.close()
    return taken


@pytest.mark.parametrize("workers", [0, 2])
def test_views_are_the_same_to_the_bit(photos, workers):
    kept = loader_of(photos, keep=True, workers=workers)
    plain = loader_of(photos, keep=False)
    for with_memory, without in zip(batches(kept), batches(plain), strict=True):
        assert with_memory.samples.equal(without.samples)
        for size, views in without.views.items():
            assert with_memory.views[size].equal(views)
    assert int(kept.decoded.used[0]) > 0, "what workers keep is seen here, too"
    assert (kept.decoded.sizes[:, 0] != 0).all(), "each image has been seen in 48 draws of 13"


def test_a_kept_image_is_neither_read_nor_decoded_again(photos):
    loader = loader_of(photos, keep=True)
    batches(loader, 60)
    for path in photos.iterdir():
        path.unlink()
    batch = batches(loader, 60)[-1]
    assert not batch.unreadable
    assert batch.times.keys().isdisjoint({"read", "decode"})


def test_what_has_no_room_is_decoded_each_time(photos):
    small = loader_of(photos, keep=False)
    small.decoded = DecodedImages(13, 50_000)
    for limited, without in zip(batches(small), batches(loader_of(photos, keep=False)), strict=True):
        assert all(limited.views[size].equal(views) for size, views in without.views.items())
    assert 0 < int(small.decoded.used[0]) <= len(small.decoded.memory)


def test_an_image_that_cannot_be_read_is_tried_again(photos):
    path = photos / "00.jpg"
    content = path.read_bytes()
    path.write_bytes(b"damaged")
    loader = loader_of(photos, keep=True)
    assert any(batch.unreadable for batch in batches(loader, 4))
    path.write_bytes(content)
    assert not any(batch.unreadable for batch in batches(loader, 4))


def test_there_is_room_where_a_quarter_of_the_free_memory_suffices(monkeypatch):
    def room(images, scaled=False, workers=0):
        return decoded.room_for(images, [(10, 20), (30, 40)], 3, scaled=scaled, workers=workers)

    needed = 5 * 3 * 700
    monkeypatch.setattr(decoded, "free_memory", lambda: 5 * needed)
    assert room(5) == needed
    assert room(3, scaled=True) == round(3 * 3 * 700 * (1 + 1 / 4 + 1 / 16 + 1 / 64))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert room(5) is None, "another process of this host needs as much"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(decoded, "free_memory", lambda: 5 * needed - 1)
    assert room(5) is None
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
    assert room(1, workers=1) is None, "its workers would share nothing"


def test_arrays_and_deeper_images_are_not_kept(photos, tmp_path):
    source = open_source(str(photos))
    loader, summary = loader_of(photos, keep=False), inspect_images(source, range(13))
    assert "stay in memory" in keep_decoded(loader, summary)
    assert len(loader.decoded.table) == 13
    assert keep_decoded(loader_of(photos, keep=False, pixels=Pixels(bits=16)), summary) is None
    np.save(tmp_path / "images.npy", np.zeros((5, 8, 8, 3), np.uint8))
    arrays = open_source(str(tmp_path / "images.npy"))
    assert keep_decoded(loader, inspect_images(arrays, range(5))) is None
