"""Arrays, and objects of the user's own: what they may return, and that runs on them resume exactly."""

import pickle

import datasets
import fsspec
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

import dino_vit
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.open import open_source
from dino_vit.data.stores.calls import wrap
from dino_vit.data.synthetic import make_textures
from tests.support.images import write_synthetic
from tests.support.runs import SETTINGS, assert_same_end, history, pretrain_until

ARRAYS = {
    "grey": ((7, 12, 9), (1, 12, 9)),
    "last": ((7, 12, 9, 3), (3, 12, 9)),
    "first": ((7, 5, 12, 9), (5, 12, 9)),
}


@pytest.mark.parametrize("dtype", ["uint8", ">u2", "float32"])
@pytest.mark.parametrize("name", ["grey", "last", "first"])
@pytest.mark.parametrize("kind", ["c", "fortran"])
def test_arrays_are_images_of_any_dtype(tmp_path, name, dtype, kind):
    shape, expected = ARRAYS[name]
    array = (np.random.default_rng(0).random(shape) * 250).astype(dtype)
    path = tmp_path / "a.npy"
    np.save(path, np.asfortranarray(array) if kind == "fortran" else array)
    source = open_source(str(path))
    for one in (source, pickle.loads(pickle.dumps(source))):
        image = one.read(3)
        assert (image.shape, len(one), one.name(3)) == (expected, 7, "000000003")
        planes = np.moveaxis(array[3], -1, 0) if name == "last" else array[3].reshape(expected)
        assert np.array_equal(image.numpy(), planes)
        image.fill_(0)
        assert one.read(3).any()
    other = array.copy()
    other[4] = 1
    np.save(tmp_path / "b.npy", other)
    assert open_source(str(tmp_path / "b.npy")).fingerprint != source.fingerprint


def test_what_is_no_array_of_images_is_refused(tmp_path):
    np.save(tmp_path / "cube.npy", np.zeros((2, 8, 8, 8)))
    np.save(tmp_path / "complex.npy", np.zeros((2, 8, 8), dtype=complex))
    np.save(tmp_path / "none.npy", np.zeros((0, 8, 8)))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "damaged.npy").write_bytes((tmp_path / "cube.npy").read_bytes().replace(b"}", b"{"))
    for path in tmp_path.glob("*.npy"):
        with pytest.raises(ValueError, match=f"{path.name} is damaged or not an array of images: "):
            open_source(str(path))
    fsspec.filesystem("memory").pipe("/a.npy", b"")
    with pytest.raises(ValueError, match="copy it here first"):
        open_source("memory://a.npy")


PLAIN = {key: value for key, value in SETTINGS.items() if key != "data.source"}


class Photos:
    """Textures with names and labels."""

    def __init__(self, count=64):
        self.source = make_textures(length=count)

    def __len__(self):
        return len(self.source)

    def name(self, index):
        return f"photo {index}"

    def read(self, index):
        return self.source.read(index)

    def label(self, index):
        return ("odd", "even")[index % 2] if index else None


class Pictures(Dataset):
    """Pillow images with their targets, as torchvision's data sets; a `name` that is a text."""

    name = "pictures"

    def __init__(self, targets, classes=None, shift=0):
        self.source, self.targets, self.shift = make_textures(length=64), targets, shift
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return Image.fromarray(self.source.read(index + self.shift).permute(1, 2, 0).numpy()), None


def labels_of(source):
    names = (source.label(index) for index in range(len(source)))
    return [None if label is None else source.labels.names[label] for label in names]


def test_an_object_is_a_source():
    source = wrap(Photos())
    assert (len(source), source.name(3), source.labels.names) == (64, "photo 3", ("even", "odd"))
    assert [source.label(index) for index in range(4)] == [None, 0, 1, 0]
    assert torch.equal(read_image(source, 5), make_textures(length=64).read(5))
    assert source.fingerprint == wrap(Photos()).fingerprint
    assert source.fingerprint != wrap(Photos(63)).fingerprint
    assert wrap(source) is source
    count = Photos(10)
    count.label, count.targets = None, [0] * 9
    with pytest.raises(ValueError, match="Photos has 9 targets, but 10 images; each needs one"):
        wrap(count)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_dataset_of_pillow_images_has_targets_that_are_indices_of_its_classes(kind):
    source = wrap(Pictures(kind([2, 5, -1]), list("abcdec")))
    assert labels_of(source) == ["c (2)", "c (5)", None], "two classes of one name are two"
    assert torch.equal(read_image(source, 2), make_textures(length=64).read(2))
    assert source.name(2) == "2"
    assert labels_of(wrap(Pictures(kind([2, 5, -1])))) == ["2", "5", None]
    assert labels_of(wrap(Pictures(["c", "a"], list("abc")))) == ["c", "a"]
    with pytest.raises(ValueError, match="Pictures has the label 6, which is none of its 6 classes, nor the"):
        wrap(Pictures(kind([6]), list("abcdef")))
    other, again = (wrap(Pictures(kind([2, 5, -1]), list("abcdec"), shift)) for shift in (1, 0))
    assert source.fingerprint == again.fingerprint != other.fingerprint, "by some of the images"


def test_parts_of_data_sets_keep_names_and_labels_and_joined_ones_are_like_others():
    pictures = Pictures([0, 1] * 32, ["cat", "dog"])
    chosen = wrap(Subset(pictures, [5, 2]))
    assert (labels_of(chosen), chosen.name(0)) == (["dog", "cat"], "5")
    assert torch.equal(read_image(chosen, 0), make_textures(length=64).read(5))
    joined = ConcatDataset([pictures, Subset(pictures, [1, 3])])
    source = wrap(joined)
    assert (len(source), source.name(65), source.labels.names) == (66, "65", ())
    assert torch.equal(read_image(source, 65), make_textures(length=64).read(3))
    joined.targets, joined.classes = [*[0, 1] * 32, 1, 1], ("cat", "dog")
    assert labels_of(wrap(joined)) == ["cat", "dog"] * 32 + ["dog", "dog"]
    with pytest.raises(ValueError, match="has no images"):
        wrap(Subset(pictures, []))


def test_a_folder_of_torchvision_has_labels(tmp_path):
    for name in ("ant/a.png", "ant/b.png", "bee/c.png"):
        write_synthetic(tmp_path / name, 0, size=32)
    folder = torchvision.datasets.ImageFolder(str(tmp_path))
    assert labels_of(wrap(folder)) == ["ant", "ant", "bee"]
    assert wrap(folder).name(2) == str(tmp_path / "bee/c.png")


@pytest.fixture
def hub_rows(tmp_path):
    """A Hugging Face Dataset with two columns beside the images."""
    for number in range(4):
        write_synthetic(tmp_path / f"{number}.png", number, size=32)
    columns = {"img": [str(tmp_path / f"{number}.png") for number in range(4)]}
    columns |= {"fine_label": [0, 1, 0, 1], "file_name": list("abcd")}
    rows = datasets.Dataset.from_dict(columns).cast_column("img", datasets.Image())
    return rows.cast_column("fine_label", datasets.ClassLabel(names=["cat", "dog"]))


def test_a_dataset_of_hugging_face_is_a_source(tmp_path, hub_rows, caplog):
    source = wrap(hub_rows)
    assert (len(source), source.labels.names, source.name(3)) == (4, ("cat", "dog"), "d")
    assert labels_of(source) == ["cat", "dog"] * 2
    assert source.read(2) == (tmp_path / "2.png").read_bytes()
    assert (source.fingerprint, source.stamp) == (wrap(hub_rows).fingerprint, None), "files may change"
    chosen = wrap(hub_rows.shuffle(seed=1).select([0, 1]).with_format("torch"))
    order = list("abcd").index(chosen.name(0))
    assert chosen.read(0) == (tmp_path / f"{order}.png").read_bytes()
    assert chosen.fingerprint != source.fingerprint
    assert not caplog.text
    column = [{"bytes": source.read(row), "path": None} for row in range(4)]
    held = datasets.Dataset.from_dict({"img": column}).cast_column("img", datasets.Image())
    assert (wrap(held).read(2), wrap(held).stamp) == (source.read(2), "")
    part = wrap(Subset(hub_rows, [3, 0]))
    assert (labels_of(part), part.name(0), part.read(1)) == (["dog", "cat"], "d", source.read(0))
    turned = wrap(hub_rows.with_transform(lambda rows: {"img": [0 for _ in rows["img"]]}))
    assert turned.read(2) == source.read(2)
    assert "transform of the Dataset is not applied" in caplog.text
    with pytest.raises(ValueError, match="the Dataset has no column of images"):
        wrap(hub_rows.remove_columns("img"))
    settings = {**PLAIN, "budget.steps": 2, "data.batch_size": 4, "verbose": False}
    run = dino_vit.pretrain(hub_rows, tmp_path / "run", **settings)
    assert run.metrics()


@pytest.mark.parametrize("kind", ["path", "text", "bytes", "array", "grey", "pillow", "clear", "nothing"])
def test_an_item_may_be_any_image(tmp_path, kind):
    path = tmp_path / "a.png"
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    given = {"path": path, "text": str(path), "bytes": path.read_bytes(), "array": pixels, "nothing": {}}
    given |= {"grey": pixels[:, :, 0], "pillow": Image.fromarray(pixels)}
    given["clear"] = Image.fromarray(pixels).convert("RGBA")
    source = wrap([given[kind]])
    if kind == "nothing":
        with pytest.raises(UnreadableImage, match="0: TypeError: dict is not an image: give a path"):
            read_image(source, 0)
        return
    wanted = pixels[:, :, :1].repeat(3, axis=2) if kind == "grey" else pixels
    assert np.array_equal(read_image(source, 0).permute(1, 2, 0).numpy(), wanted)


def test_an_object_of_another_program_is_refused():
    with pytest.raises(ValueError, match="object:Unknown is an object of a Python program"):
        open_source("object:Unknown")


def pretrain_in_two(output, *source, **settings):
    """Pretrain up to an interruption, and then to the end."""
    pretrain_until(12, *source, output=output, **settings)
    dino_vit.pretrain(*source, output=output, **settings)


def test_a_run_on_an_object_resumes_exactly(tmp_path, capsys):
    settings = {**PLAIN, "data.workers": 2, "verbose": False}
    dino_vit.pretrain("synthetic:64:32", tmp_path / "whole", **settings)  # the same images
    pretrain_in_two(tmp_path / "run", Photos(), **settings)
    assert_same_end(tmp_path / "run", tmp_path / "whole", 20)
    dino_vit.pretrain(Photos(), tmp_path / "run", **settings | {"verbose": True})
    advised = capsys.readouterr().err.rpartition("next: ")[2]  # no command line can name the object
    assert advised.startswith(f"`dino_vit.report({str(tmp_path / 'run')!r})` draws curves")
    assert "dino-vit " not in advised


class Dimmed(torch.nn.Module):
    """Augmentation that draws from torch's generator."""

    def forward(self, views):
        assert 0 <= float(views.min()) <= float(views.max()) <= 1
        return views * torch.rand(len(views), 1, 1, 1)


def test_augmentation_of_ones_own_is_as_reproducible(tmp_path):
    """In one go or in two, with workers or without, whatever the generator was before."""
    settings = {**SETTINGS, "augment.module": Dimmed(), "verbose": False}
    dino_vit.pretrain(output=tmp_path / "whole", **settings)
    torch.manual_seed(5)
    pretrain_in_two(tmp_path / "run", **settings | {"data.workers": 2})
    assert_same_end(tmp_path / "run", tmp_path / "whole", 20)
    pretrain_until(1, output=tmp_path / "ours", **settings | {"augment.module": None})
    assert history(tmp_path / "ours")[0]["loss"] != history(tmp_path / "whole")[0]["loss"]


def test_augmentation_that_changes_the_shape_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"augment.module returned \(16, 1, 32, 32\) for views \(16, 3"):
        dino_vit.pretrain(output=tmp_path, **SETTINGS, **{"augment.module": lambda views: views[:, :1]})
