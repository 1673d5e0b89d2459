import os
import struct
import threading
import time
import zipfile
import zlib
from contextlib import suppress

import numpy as np
import pytest

from dino_vit.data import limits
from dino_vit.data.images.decode import UnreadableImage, decode, read_given, read_image
from dino_vit.data.images.pixels import Pixels
from dino_vit.data.limits import Budget, hold, one_image, open_regular, read_regular
from dino_vit.data.sources.folders import open_folder
from dino_vit.data.sources.open import open_source
from dino_vit.data.statistics import channel_statistics, inspect_images
from dino_vit.weights import load_backbone
from tests.support.images import png, saved, smooth


def zeros_zip(path, real, stated, method=zipfile.ZIP_DEFLATED):
    """Write a zip with a picture that is followed by zeros, which states another size."""
    content = saved(smooth(), "PNG") + bytes(real)
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("a.png", content)
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<L", len(content)), struct.pack("<L", stated)))


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_member_of_a_zip_is_decompressed_as_far_as_its_stated_size(tmp_path, method, monkeypatch):
    zeros_zip(tmp_path / "a.zip", 10**7, 1000, method)
    source = open_source(str(tmp_path / "a.zip"))
    made = []
    monkeypatch.setattr(zlib, "crc32", lambda data: made.append(len(data)))
    with pytest.raises(UnreadableImage, match="it has not the 1,000 bytes that the archive states"):
        read_image(source, 0)
    assert not made


def test_a_file_has_at_most_so_many_bytes_wherever_it_is(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(saved(smooth(), "PNG") + bytes(5000))
    monkeypatch.setattr(limits, "MAX_BYTES", 1000)
    with zipfile.ZipFile(tmp_path / "b.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.png", bytes(5000))
    for spec in (tmp_path / "photos", tmp_path / "b.zip"):
        with pytest.raises(UnreadableImage, match=r"has \d,\d+ bytes; a file may have 1,000"):
            read_image(open_source(str(spec)), 0)


def test_a_sparse_file_of_terabytes_is_not_read(tmp_path):
    for name in ("a.png", "list.txt", "labels.json"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**42)
    with pytest.raises(UnreadableImage, match="has 4,398,046,511,104 bytes"):
        read_image(open_folder(tmp_path), 0)
    for given in [(str(tmp_path / "list.txt"),), (str(tmp_path), tmp_path / "labels.json")]:
        with pytest.raises(ValueError, match="has 4,398,046,511,104 bytes"):
            open_source(*given)
    for name in ("a.tar", "a.zip", "a.parquet", "a.npy"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**42)
        with pytest.raises(ValueError, match=r"a\.\w+ (is|contains|is damaged)"):
            open_source(str(tmp_path / name))


@pytest.fixture
def pipes(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "stdin.png").symlink_to("/dev/stdin")
    smooth().save(folder / "a.png")
    return folder


def test_pipes_and_devices_among_images_are_unreadable(pipes):
    (pipes / "list.txt").write_text("a.png\npipe.png\nzero.png\n/dev/zero\n")
    for source in map(open_source, (str(pipes), f"{pipes}/*.png", f"{pipes}/list.txt")):
        summary = inspect_images(source, range(len(source)))
        assert len(summary.images) == 1
        assert {str(image).partition(" is ")[2] for image in summary.unreadable} <= {
            "a pipe; only regular files are read",
            "a device; only regular files are read",
        }


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tar", "a.zip", "a.parquet", "a.npy"])
def test_a_source_is_no_pipe(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is a pipe; only regular files are read"):
        open_source(str(tmp_path / name))


def test_labels_classes_catalogues_and_weights_are_no_pipes(pipes):
    for name in ("labels.json", "catalogue.arrow", "w.safetensors", "w.pth"):
        os.mkfifo(pipes / name)
    with pytest.raises(ValueError, match=r"catalogue.arrow is a pipe"):
        open_source(str(pipes))
    (pipes / "catalogue.arrow").unlink()
    with pytest.raises(ValueError, match=r"labels.json is a pipe"):
        open_source(str(pipes), pipes / "labels.json")
    with pytest.raises(ValueError, match="is a pipe"):
        read_given(pipes / "pipe.png")
    for name in ("w.safetensors", "w.pth"):
        with pytest.raises(ValueError, match="is not a file"):
            load_backbone(pipes / name)


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="is a folder; only regular files are read"):
        open_regular(tmp_path)


def test_a_budget_lets_in_what_fits_and_more_than_all_of_it_alone():
    budget, inside, most = Budget(10), [], []

    def use(amount):
        taken = budget.take(amount)
        inside.append(amount)
        most.append(list(inside))
        time.sleep(0.001)
        inside.remove(amount)
        budget.give(taken)

    threads = [threading.Thread(target=use, args=(amount,)) for amount in (4, 100, 6, 5, 3, 11, 1) * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sum(amounts) <= 10 or len(amounts) == 1 for amounts in most)
    assert budget.free == 10


def test_threads_hold_no_more_pixels_than_the_budget_until_they_are_done(tmp_path, monkeypatch):
    for number in range(6):
        smooth().save(tmp_path / f"{number}.png")
    inside, most = [], []

    def conversion(image):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return "uint8"

    source = open_folder(tmp_path)
    monkeypatch.setattr("dino_vit.data.statistics._THREADS", 6)
    monkeypatch.setattr("dino_vit.data.statistics.kind_of", conversion)
    monkeypatch.setattr("dino_vit.data.images.formats.PIXELS", Budget(20 * 30))
    inspect_images(source, range(6))
    assert max(most) == 1


def test_an_image_gives_back_what_it_held_also_if_it_cannot_be_read(tmp_path):
    smooth().save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(png(9, 9, bytes(5)))
    source = open_folder(tmp_path)
    inspect_images(source, range(2))
    channel_statistics(source, range(2), Pixels())
    assert (limits.BYTES.free, limits.PIXELS.free) == (limits.MAX_BYTES, limits.MAX_PIXELS)


def test_a_forked_process_begins_anew():
    budget = limits.PIXELS
    with one_image():
        hold(budget, budget.total)
        child = os.fork()
        if not child:
            with one_image():
                hold(budget, budget.total)
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "I;16", "CMYK"])
def test_pictures_are_converted_by_strips(mode, monkeypatch):
    image = smooth(mode, (7, 301))
    data = saved(image, "TIFF")
    expected = decode(data, "x")
    monkeypatch.setattr("dino_vit.data.images.formats._STRIP", 70)
    assert (decode(data, "x") == expected).all()
    assert expected.shape[1:] == (301, 7)


def test_text_and_profiles_that_expand_do_no_harm():
    bomb = zlib.compress(bytes(10**8), 9)
    data = png(30, 20, bytes(20 * 31))
    for name, content in ((b"zTXt", b"a\0\0" + bomb), (b"iCCP", b"a\0\0" + bomb)):
        chunk = struct.pack(">I", len(content)) + name + content
        chunk += struct.pack(">I", zlib.crc32(name + content))
        with suppress(UnreadableImage):
            assert decode(data[:33] + chunk + data[33:], "x").shape == (1, 20, 30)


def test_a_picture_that_is_given_stays_as_it_is():
    image = smooth()
    image.getexif()[274] = 6
    assert read_given(image).shape == (3, 30, 20)
    assert image.size == (30, 20)


def test_a_file_is_read_as_long_as_it_says():
    assert read_regular("/proc/self/status") == b""  # which has more, and others there never end


@pytest.mark.parametrize(("brightest", "bits"), [((200, 255), 8), ((200, 60_000), 16)])
def test_wide_integers_have_one_white_in_a_folder(tmp_path, brightest, bits):
    for number, top in enumerate(brightest):
        np.save(tmp_path / f"{number}.npy", np.array([[0, 200, top]] * 2, np.int32))
    source = open_folder(tmp_path)
    assert inspect_images(source, range(2)).bits == bits
    images = [read_image(source, index, Pixels(channels=1, bits=bits)) for index in range(2)]
    assert images[0][0, 0, 1] == images[1][0, 0, 1]
