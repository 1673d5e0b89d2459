import subprocess
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from dino_vit.cli import main
from dino_vit.commands.pack import pack
from dino_vit.data.images.decode import decode
from dino_vit.data.images.formats import format_of
from dino_vit.data.open import open_source
from tests.support.image_sets import items
from tests.support.images import png16, smooth


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    generator = np.random.default_rng(0)
    for name in ("cat/1.png", "cat/a.b.jpg", "dog/2.webp", "dog/deep/3.bmp", "dog/4.tiff"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / name)
    return folder


def images(source):
    """Return the bytes and the label of each image; names lose their dots."""
    return [(data, label) for _, data, label in items(source)]


def test_shards_hold_the_same_images_in_the_same_order(photos, tmp_path, capsys):
    (tmp_path / ".out.partial").mkdir()  # of one that was killed
    (tmp_path / ".out.partial" / "000007.tar").touch()
    assert main(["pack", str(photos), str(tmp_path / "out")]) == 0
    assert "5 images in 1 shard," in capsys.readouterr().out
    packed = open_source(str(tmp_path / "out"))
    assert images(packed) == images(open_source(str(photos)))
    assert packed.name(1) == "cat/a-b.jpg", "its label is found by what stands before the first dot"
    names = {"000000.tar", "000000.tar.arrow", "catalogue.arrow", "SHA256SUMS", "classes.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names


def test_digests_are_what_sha256sum_takes(photos, tmp_path):
    source = open_source(str(photos))
    packed = pack(source, tmp_path / "out", shard_bytes=6000)
    assert len(packed.shards) >= 3
    assert images(open_source(str(tmp_path / "out" / "*.tar"))) == images(source)
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    done = subprocess.run(check, cwd=tmp_path / "out", capture_output=True, text=True, check=True)
    assert done.stdout.count(": OK") == len(packed.shards) + 1, "and the names of the classes"
    again = pack(source, tmp_path / "again", shard_bytes=6000)
    for shard, other in zip(packed.shards, again.shards, strict=True):
        assert shard.read_bytes() == other.read_bytes(), "no time, no owner"
    packed.shards[1].write_bytes(packed.shards[1].read_bytes().replace(b"\0\1", b"\1\0", 1))
    assert subprocess.run(check, cwd=tmp_path / "out", capture_output=True, check=False).returncode == 1


def test_unreadable_images_are_left_out_and_named(photos, tmp_path, caplog):
    (photos / "dog" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert main(["pack", str(photos), str(tmp_path / "out")]) == 0
    assert "1 of 6 images cannot be read and are left out:\n  " in caplog.text
    assert "dog/0.png" in caplog.text
    assert len(open_source(str(tmp_path / "out"))) == 5


@pytest.mark.parametrize("spec", ["synthetic:12:16", "deep.npy", "wide.npy"])
def test_arrays_are_packed_without_loss(tmp_path, spec, monkeypatch):
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    np.save("deep.npy", generator.integers(0, 2**16, (4, 9, 8), dtype=np.uint16))
    np.save("wide.npy", generator.integers(0, 2**8, (4, 9, 8, 5), dtype=np.uint8))
    source = open_source(spec)
    pack(source, tmp_path / "out", shard_bytes=2**20)
    packed = open_source(str(tmp_path / "out"))
    places = {packed.name(index).removesuffix(".png"): index for index in range(len(packed))}
    for index in range(len(source)):
        place = places.get(source.name(index), index)  # generated images are not in the order of their names
        assert torch.equal(decode(packed.read(place), ""), source.read(index))
        label = source.label(index)
        assert label is None or packed.labels.names[packed.label(place)] == source.labels.names[label]


def test_names_stay_below_the_folder_of_who_unpacks(photos, tmp_path):
    (tmp_path / "list.txt").write_text(f"{photos}/cat/1.png\nphotos/../photos/dog/2.webp\n")
    pack(open_source(str(tmp_path / "list.txt")), tmp_path / "out", shard_bytes=2**20)
    with tarfile.open(tmp_path / "out" / "000000.tar") as shard:
        names = shard.getnames()
        shard.extractall(tmp_path / "unpacked", filter="data")
    assert all(not name.startswith("/") and ".." not in name.split("/") for name in names)
    assert len(names) == len(set(names))


def test_mistakes_are_said_and_nothing_is_half_written(photos, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"")
    for arguments, said in (
        ([photos, tmp_path / "full"], "already exists"),
        ([tmp_path / "bad", tmp_path / "out"], "none of 1 images can be read"),
        ([tmp_path / "none", tmp_path / "out"], "does not exist"),
    ):
        assert main(["pack", *map(str, arguments)]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        assert not list(tmp_path.glob(".*.partial"))
    assert (tmp_path / "full" / "file").read_text() == "mine"


def pack_reduced(folder, output):
    assert main(["pack", str(folder), str(output), "size=16"]) == 0
    return open_source(str(output))


@pytest.mark.parametrize("orientation", [1, 6])
def test_larger_images_are_reduced_upright_and_the_others_kept(tmp_path, orientation, capsys):
    exif = Image.Exif()
    exif[274] = orientation
    (tmp_path / "in").mkdir()
    smooth(size=(60, 40)).save(tmp_path / "in" / "a.jpg", quality=95, exif=exif)
    smooth(size=(60, 40)).save(tmp_path / "in" / "b.webp", lossless=True)
    smooth("L", size=(60, 40)).save(tmp_path / "in" / "c.bmp")
    smooth(size=(60, 16)).save(tmp_path / "in" / "d.jpg", exif=exif)
    source = open_source(str(tmp_path / "in"))
    packed = pack_reduced(tmp_path / "in", tmp_path / "out")
    assert "3 reduced to a shorter side of 16 pixels, the others unchanged" in capsys.readouterr().out
    assert [packed.name(index) for index in range(4)] == ["a.jpg", "b.webp", "c.bmp", "d.jpg"]
    assert [format_of(packed.read(index)) for index in range(4)] == ["JPEG", "PNG", "PNG", "JPEG"]
    assert packed.read(3) == source.read(3)
    for index in range(3):
        image = decode(source.read(index), "")
        height, width = (24, 16) if index == 0 and orientation == 6 else (16, 24)
        expected = F.interpolate(image[None].float(), (height, width), mode="bicubic", antialias=True)[0]
        reduced = decode(packed.read(index), "")
        assert reduced.shape == expected.shape
        assert (reduced - expected.clamp(0, 255)).abs().mean() < 2


def test_deep_images_and_other_channels_are_not_reduced(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    generator = np.random.default_rng(0)
    deep = generator.integers(0, 2**16, (40, 40, 3), dtype=np.uint16)
    (tmp_path / "in" / "deep.png").write_bytes(png16(deep))
    smooth("RGBA", size=(60, 40)).save(tmp_path / "in" / "see-through.png")
    np.save(tmp_path / "in" / "wide.npy", generator.integers(0, 256, (5, 40, 40), dtype=np.uint8))
    source = open_source(str(tmp_path / "in"))
    packed = pack_reduced(tmp_path / "in", tmp_path / "out")
    assert images(packed) == images(source)
    assert "0 reduced to a shorter side of 16 pixels" in capsys.readouterr().out


def write_alike(tmp_path):
    """Images whose names differ only in what WebDataset does not tell apart, each with a label of its own."""
    names = {
        "x/photo.jpg": "cat",
        "x/photo.png": "dog",
        "x/a.b.jpg": "élan",
        "x/a-b.jpg": "dog",
        "x/A.png": "10",
    }
    for number, name in enumerate(names):
        (tmp_path / "in" / "x").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number,) * 3).save(tmp_path / "in" / name)
    (tmp_path / "labels.csv").write_text("".join(f"{name},{label}\n" for name, label in names.items()))
    assert (
        main(["pack", str(tmp_path / "in"), str(tmp_path / "out"), f"labels={tmp_path / 'labels.csv'}"]) == 0
    )
    return open_source(str(tmp_path / "in"), tmp_path / "labels.csv")


def test_webdataset_reads_labels_as_numbers_of_a_table(tmp_path):
    """As its own decoders do: of what has equal names up to the first dot, .cls is an integer."""
    source, samples = write_alike(tmp_path), {}
    with tarfile.open(tmp_path / "out" / "000000.tar") as shard:
        for member in shard:
            folder, _, name = member.name.rpartition("/")
            key, _, extension = name.partition(".")
            sample = samples.setdefault(f"{folder}/{key}", {})
            assert extension not in sample
            sample[extension] = shard.extractfile(member).read()
    classes = (tmp_path / "out" / "classes.txt").read_text().splitlines()
    assert len(samples) == 5
    assert all(len(sample) == 2 for sample in samples.values())
    found = sorted(classes[int(sample["cls"])] for sample in samples.values())
    assert found == sorted(source.labels.names[source.label(index)] for index in range(5))


def test_what_has_no_labels_has_none_when_packed(tmp_path):
    """The folders in its names would be taken for labels."""
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir()
        smooth().save(tmp_path / name)
    (tmp_path / "list.txt").write_text("a/1.png\nb/2.png\n")
    source = open_source(str(tmp_path / "list.txt"))
    pack(source, tmp_path / "out", shard_bytes=2**20)
    for spec in ("out", "out/000000.tar"):  # with the catalogue, and with the headers of the shard
        packed = open_source(str(tmp_path / spec))
        assert images(packed) == images(source)
        assert list(packed.labels.names) == []
