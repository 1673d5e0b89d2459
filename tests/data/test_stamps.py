"""What tells whether the images of a source were replaced: every kind, local and behind a server."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dino_vit.core.storage import write_bytes
from dino_vit.data.image_set import join_sets
from dino_vit.data.open import open_source
from dino_vit.data.stores.calls import wrap
from dino_vit.data.stores.rows import open_hub
from tests.support.image_sets import write_tar
from tests.support.images import saved
from tests.support.remote import serving

KINDS = ["photos", "photos/{a,b}.bmp", "list.txt", "set.tar", "set.zip", "set.parquet"]


def write_images(folder, value):
    """Write two images in all kinds of sources, as large whatever the value."""
    shutil.rmtree(folder / "photos", ignore_errors=True)
    files = {f"{name}.bmp": saved(Image.new("RGB", (8, 8), (value, 0, 0)), "BMP") for name in "ab"}
    for name, data in files.items():
        write_bytes(folder / "photos" / name, data)
    write_tar(folder / "set.tar", files)
    shutil.make_archive(str(folder / "set"), "zip", folder / "photos")
    pq.write_table(pa.table({"image": list(files.values())}), folder / "set.parquet", compression="none")
    np.save(folder / "set.npy", np.full((2, 8, 8, 3), value, np.uint8))


@pytest.mark.parametrize("kind", [*KINDS, "set.npy"])
def test_local_images_that_are_replaced_have_another_stamp(tmp_path, kind):
    (tmp_path / "list.txt").write_text("photos/a.bmp\nphotos/b.bmp\n")
    stamps = []
    for value in (1, 2):
        write_images(tmp_path, value)
        for path in tmp_path.rglob("*.*"):
            os.utime(path, (1e9, 1e9))  # as `cp -p` does
        stamps.append(open_source(str(tmp_path / kind)).stamp)
    assert stamps[0] != stamps[1]
    assert None not in stamps


@pytest.mark.parametrize("tells_versions", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "photos"])
def test_images_behind_a_server_have_a_stamp_if_it_tells_their_versions(tmp_path, kind, tells_versions):
    """No server is asked for each image of a list."""
    stamps, listed = [], kind == "list.txt"
    with serving(tmp_path) as server:
        server.tells_versions = tells_versions
        (tmp_path / "list.txt").write_text(f"{server.url}/photos/a.bmp\n{server.url}/photos/b.bmp\n")
        for value in (1, 2):
            write_images(tmp_path, value)
            spec = str(tmp_path / kind) if kind == "list.txt" else f"{server.url}/{kind}"
            stamps.append(open_source(spec).stamp)
        assert not (listed and any(request.name.endswith(".bmp") for request in server.requests))
    if tells_versions and not listed:
        assert stamps[0] != stamps[1]
        assert None not in stamps
    else:
        assert stamps == [None, None]


def test_a_source_that_says_nothing_has_no_stamp():
    generated = open_source("synthetic:4:16")
    assert generated.stamp == ""
    assert join_sets(["a"], [generated]).stamp == ""
    silent = wrap([np.zeros((8, 8, 3), np.uint8)])
    assert silent.stamp is None
    assert join_sets(["a", "b"], [generated, silent]).stamp is None


def test_a_data_set_of_the_hub_that_names_files_has_no_stamp(tmp_path, monkeypatch):
    """The files of its rows are elsewhere, and may be replaced."""
    write_images(tmp_path, 1)
    path = str(tmp_path / "photos/a.bmp")
    for number, image in enumerate([{"bytes": None, "path": path}, {"bytes": b"", "path": path}, None]):
        rows = pa.table({"image": [{"bytes": b"x", "path": None}, image]})
        monkeypatch.setattr("dino_vit.data.stores.rows._load_splits", lambda _, rows=rows: splits_of(rows))
        assert (open_hub(f"o/{number}").stamp is None) == (number == 0)


def splits_of(rows):
    """What `datasets` gives for one split."""

    class Split:
        data = type("Data", (), {"table": rows, "column": rows.column})
        features = type("Features", (), {"arrow_schema": rows.schema})
        cache_files = ()

        def __len__(self):
            return len(rows)

    return {"train": Split()}
