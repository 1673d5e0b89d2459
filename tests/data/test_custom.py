"""Objects of the user's own as sources: what they may return, and that runs on them resume exactly."""

import datasets
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset

import dino_vit
from dino_vit.data.custom import wrap
from dino_vit.data.images.decode import UnreadableImage, read_image
from dino_vit.data.open import open_source
from dino_vit.data.synthetic import make_textures
from tests.support.images import write_synthetic
from tests.support.runs import SETTINGS, assert_same_end, history, pretrain_until

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


class Indexed(Photos):
    __getitem__ = Photos.read


class Pairs(Dataset):
    """Pillow images with their targets, as torchvision's data sets."""

    classes = ("cat", "dog", "none")

    def __init__(self):
        self.source = make_textures(length=64)
        self.targets = [index % 2 for index in range(64)]

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return Image.fromarray(self.source.read(index).permute(1, 2, 0).numpy()), self.targets[index]


def test_an_object_is_a_source():
    source = wrap(Photos())
    assert (len(source), source.name(3), source.labels.names) == (64, "photo 3", ("even", "odd"))
    assert [source.label(index) for index in range(4)] == [None, 0, 1, 0]
    assert torch.equal(read_image(source, 5), make_textures(length=64).read(5))
    assert source.fingerprint == wrap(Photos()).fingerprint
    assert source.fingerprint != wrap(Photos(63)).fingerprint


def test_a_set_that_is_open_stays_as_it_is(tmp_path):
    for path in ("train/a/1.png", "test/a/2.png"):
        write_synthetic(tmp_path / path, 0, size=16)
    images = open_source(str(tmp_path))
    assert wrap(images) is images
    assert wrap(Subset(images, [1])).name(0) == images.name(1)


def test_a_dataset_of_pillow_images_is_a_source():
    source = wrap(Pairs())
    assert (source.labels.names, source.label(3), source.name(3)) == (("cat", "dog", "none"), 1, "3")
    assert torch.equal(read_image(source, 5), make_textures(length=64).read(5))


def labels_of(source):
    names = (source.label(index) for index in range(len(source)))
    return [None if label is None else source.labels.names[label] for label in names]


def test_parts_of_data_sets_keep_names_and_labels():
    chosen = wrap(Subset(Indexed(), [5, 0, 2]))
    assert labels_of(chosen) == ["even", None, "odd"]
    assert chosen.name(0) == "photo 5"
    assert torch.equal(read_image(chosen, 0), make_textures(length=64).read(5))
    for empty in (Subset(Pairs(), []), ConcatDataset([[]])):
        with pytest.raises(ValueError, match="has no images"):
            wrap(empty)


def test_joined_data_sets_are_an_object_like_others():
    joined = ConcatDataset([Pairs(), Subset(Pairs(), [1, 3])])
    source = wrap(joined)
    assert (len(source), source.name(65), source.labels.names) == (66, "65", ())
    assert torch.equal(read_image(source, 65), make_textures(length=64).read(3))
    joined.targets, joined.classes = [*[0, 1] * 32, 1, 1], ("cat", "dog")
    assert labels_of(wrap(joined)) == ["cat", "dog"] * 32 + ["dog", "dog"]


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


class Plain(Dataset):
    """What `targets` and `classes` may be; a `name` that is a text."""

    name = "plain"

    def __init__(self, targets, classes=None, shift=0):
        self.targets, self.shift = targets, shift
        if classes:
            self.classes = classes

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return np.full((8, 8, 3), index + self.shift, dtype=np.uint8), None


def test_sources_with_the_same_names_but_other_images_are_two():
    one, two, again = (wrap(Plain([0] * 9, shift=shift)).fingerprint for shift in (0, 1, 0))
    assert one == again != two


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_targets_are_indices_of_the_classes(kind):
    source = wrap(Plain(kind([2, 5, 2]), list("abcdef")))
    assert [source.labels.names[source.label(index)] for index in range(3)] == ["c", "f", "c"]
    assert wrap(Plain(kind([2, 5, 2]))).labels.names == ("2", "5")
    named = wrap(Plain(["c", "a"], list("abc")))
    assert [named.label(index) for index in range(2)] == [2, 0]
    with pytest.raises(ValueError, match="Plain has the label 6, which is none of its 6 classes, nor the"):
        wrap(Plain([6], list("abcdef")))


def test_two_classes_of_one_name_are_two():
    class Birds(list):
        targets, classes = [0, 1, 2], ["crane", "dog", "crane"]

    assert labels_of(wrap(Birds("abc"))) == ["crane (0)", "dog", "crane (2)"]


@pytest.mark.parametrize("count", [9, 11])
def test_targets_are_as_many_as_images(count):
    given = Photos(10)
    given.label, given.targets = None, [0] * count
    with pytest.raises(ValueError, match=f"Photos has {count} targets, but 10 images; each needs one"):
        wrap(given)


@pytest.mark.parametrize("classes", [None, ["cat", "dog"]])
def test_a_target_of_minus_one_is_no_label(classes):
    source = wrap(Plain(np.array([-1, 1, 0, -1]), classes))
    assert [source.label(index) for index in range(4)] == [None, 1, 0, None]
    assert len(source.labels.names) == 2
