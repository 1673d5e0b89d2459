import pickle
import random
import tarfile
from itertools import islice

import numpy as np
import pytest

import dino_vit
from dino_vit.cli import main
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.image_set import join_sets
from dino_vit.data.labels import Labels
from dino_vit.data.open import open_source
from dino_vit.views.build import shard_starts
from dino_vit.views.sampler import Sampler, ShardUses
from tests.support.image_sets import write_folder, write_tar, write_zip
from tests.support.images import write_synthetic
from tests.support.remote import write_shards
from tests.support.training import assert_resumes_exactly

WORDS = ["cat", "dog", "x y", "é", "10", "9", "train", "val", "new\nline", "set.1.0"]


def draw_files(draw):
    """Files of one of several shapes: flat, in classes, in splits, at any depth."""
    depth, count = draw.randrange(4), draw.randint(4, 12)
    splits = draw.sample(["train", "val", "test"], 2)
    files = {}
    for number in range(count):
        folders = [draw.choice(WORDS) for _ in range(draw.randint(0, depth))]
        folders = [splits[number % 2], *folders] if depth == 2 else folders
        files["/".join([*folders, f"{number}.{draw.choice(['png', 'JPG', 'webp'])}"])] = draw.randbytes(9)
    return files


def labels_of(names):
    """The first folder below what all share, below the splits if there are some; naively."""
    paths = [name.split("/") for name in names]
    while all(len(path) > 1 and path[0] == paths[0][0] for path in paths):
        paths = [path[1:] for path in paths]
    tops = {path[0] for path in paths if len(path) > 1}
    splits = {}
    if len(tops) > 1 and tops <= {"train", "val", "test"}:
        for index, path in enumerate(paths):
            if len(path) > 1:
                splits.setdefault(path[0], []).append(index)
        paths = [path[1:] if len(path) > 1 else path for path in paths]
    return [path[0].replace("\n", r"\n") if len(path) > 1 else None for path in paths], splits


def seen(images):
    labels = [images.label(index) for index in range(len(images))]
    return [
        (images.full_name(index), images.read(index), None if label is None else images.labels.names[label])
        for index, label in enumerate(labels)
    ]


def stores(root, files, draw):
    """The same files as they are and in archives, with and without a catalogue, and the order of names."""
    names = list(files)
    draw.shuffle(names)
    by_name = sorted(names, key=str.encode)
    yield write_folder(root / "folder", files), by_name
    yield write_tar(root / "a.tar", {name: files[name] for name in names}), by_name
    yield write_zip(root / "a.zip", files), by_name
    halves = [names[::2], names[1::2]]
    by_shard = [name for half in halves for name in sorted(half, key=str.encode)]
    for folder, order in (("sorted", by_name), ("any", by_shard)):
        middle = len(names) - len(names) // 2
        for number, part in enumerate((order[:middle], order[middle:])):
            draw.shuffle(part)
            write_tar(root / folder / f"{number}.tar", {name: files[name] for name in part})
        yield root / folder, order
        assert main(["pack", str(root / folder), "index_only=true"]) == 0
        yield root / folder, order


@pytest.mark.parametrize("seed", range(12))
def test_every_store_has_the_names_labels_splits_and_bytes_of_the_files(tmp_path, seed):
    draw = random.Random(seed)
    files = draw_files(draw)
    chosen = [draw.randrange(len(files)) for _ in range(5)]
    again = draw.sample(range(5), 3)
    fingerprints = set()
    for path, order in stores(tmp_path, files, draw):
        images = open_source(str(path))
        labels, splits = labels_of(order)
        expected = list(zip(order, (files[name] for name in order), labels, strict=True))
        assert seen(images) == seen(pickle.loads(pickle.dumps(images))) == expected
        assert {name: images.split(name).tolist() for name in images.splits.names} == splits
        part = images.subset(chosen).subset(np.array(again))
        assert seen(part) == [expected[chosen[index]] for index in again]
        split_of = {index: name for name, indices in splits.items() for index in indices}
        own = {row: split_of.get(chosen[index]) for row, index in enumerate(again)}
        for name in images.splits.names:
            assert part.split(name).tolist() == [row for row, split in own.items() if split == name]
        assert part.stamp == images.stamp
        assert part.shards is None
        fingerprints.add((*order, images.fingerprint, part.fingerprint))
    assert len(fingerprints) == len({each[:-2] for each in fingerprints})


def test_other_labels_are_of_the_images_of_a_part(tmp_path):
    images = open_source(
        str(write_folder(tmp_path, {f"{number}.png": b"%d" % number for number in range(6)}))
    )
    part = images.subset([4, 1, 3]).with_labels(Labels(np.array([1, -1, 0], np.int32).take, ("a", "b")))
    assert [part.label(index) for index in range(3)] == [1, None, 0]
    assert part.subset([2, 0]).label(1) == 1
    assert part.fingerprint == images.subset([4, 1, 3]).fingerprint


def test_joined_sets_have_the_images_of_each_and_the_classes_of_all(tmp_path):
    files = {f"{name}.png": b"x" for name in "12"}
    parts = [open_source(str(write_folder(tmp_path / name, files))) for name in "ab"]
    first, second = (
        part.with_labels(Labels(np.zeros(2, np.int32).take, (f"of {n}",))) for n, part in enumerate(parts)
    )
    joined = join_sets(["first", "second"], [first, second.subset([1])])
    assert [joined.name(index) for index in range(3)] == ["first/1.png", "first/2.png", "second/2.png"]
    assert [joined.labels.names[joined.label(index)] for index in range(3)] == ["of 0", "of 0", "of 1"]
    assert joined.origins() == [*parts[0].origins(), parts[1].origins()[1]]
    assert [joined.read(index) for index in range(3)] == [b"x"] * 3
    assert joined.fingerprint != join_sets(["first", "second"], [second, first]).fingerprint
    assert join_sets("ab", parts).stamp == join_sets("ab", parts).stamp
    assert joined.subset([2]).origins() == parts[1].subset([1]).origins()


def test_two_addresses_of_one_name_are_refused_where_names_go_into_a_table(tmp_path, weights):
    """A query may be a secret, so names are without it."""
    path, labels = tmp_path / "list.txt", tmp_path / "labels.csv"
    path.write_text("".join(f"https://h.invalid/img?id={number}\n" for number in (1, 2)))
    refused = r"images 0 and 1 \(counted from 0\) are both named https://h\.invalid/img: .* before the"
    with pytest.raises(ValueError, match=refused):
        dino_vit.embed(path, weights)
    labels.write_text("name,label\nhttps://h.invalid/img,cat\n")
    with pytest.raises(ValueError, match=refused):
        open_source(str(path), labels)
    labels.write_text("name,label\nhttps://h.invalid/img?id=1,cat\nhttps://h.invalid/img?id=2,dog\n")
    assert open_source(str(path), labels).codes().tolist() == [0, 1], "whole addresses tell them apart"
    path.write_text(f"{path.read_text()}https://h.invalid/img?id=3\n")
    with pytest.raises(ValueError, match=refused):
        dino_vit.predict(tmp_path / "list.txt", weights, train="synthetic:20")
    path.write_text("https://h.invalid/img?id=1\n" * 2)
    assert open_source(str(path)).distinct_names([0, 1]) == ["https://h.invalid/img"] * 2, "listed twice"


def test_two_images_of_one_name_in_an_archive_are_refused_where_names_go_into_a_table(tmp_path, weights):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number in range(2):
            write_synthetic(tmp_path / f"{number}.png", number)
            archive.add(tmp_path / f"{number}.png", "a.png")
    refused = r"images 0 and 1 \(counted from 0\) are both named a\.png: rename one of them"
    with pytest.raises(ValueError, match=refused):
        dino_vit.embed(tmp_path / "a.tar", weights)


@pytest.fixture
def sources(tmp_path):
    write_folder(tmp_path / "labelled")
    write_tar(tmp_path / "plain" / "a.tar", {f"{number}.png": b"%d" % number for number in range(20)})
    return [str(tmp_path / "plain"), str(tmp_path / "labelled")]


def test_a_window_walks_through_the_shards_of_all_sources(tmp_path, sources):
    for name in ("first", "second"):
        files = {f"{name}{number}.png": b"%d" % number for number in range(50)}
        write_tar(tmp_path / "shards" / f"{name}.tar", files)
    parts = open_source([*sources, str(tmp_path / "shards")]).parts
    starts = shard_starts(parts)
    assert starts.tolist() == [0, 20, *range(21, 25), 25, 75, 125], "a file is a shard of its own"
    sampler = Sampler(length=125, global_batch=5, seed=0, shard_starts=starts, window=1)
    assert sorted(sampler.order(1)) == list(range(125))
    for position in (0, 9, 20, 24):
        images = np.concatenate([spec.samples for spec in islice(sampler.batch_specs(position), 50)])
        uses = ShardUses(sampler, sampler.build_order(), 2, first=6).next(position)
        for shard, use in enumerate(uses.tolist()):
            first, end = starts[6 + shard : 8 + shard]
            assert use - 50 <= np.flatnonzero((images >= first) & (images < end))[0]


def test_a_run_of_two_sources_resumes_bit_for_bit(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    write_shards(tmp_path / "shards", 4, 16)
    for number in range(32):
        write_synthetic(tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png", number)
    settings = {"data.source": f"[{tmp_path}/shards, {tmp_path}/photos]"}
    settings |= {"data.order": "window", "data.window": 2, "compute.eval_every": 1}
    assert_resumes_exactly(tmp_path, {**settings, "budget.steps": 20}, step=14)
    said = capsys.readouterr().err
    assert f"96 images of {tmp_path}/shards, {tmp_path}/photos" in said
    assert "k-NN" in said, "by the images that have labels"


def test_a_file_of_labels_is_for_one_source():
    settings = {"data.source": "[a, b]", "data.labels": "x.csv"}
    with pytest.raises(ValueError, match=r"data.labels=x\.csv is a file for one source"):
        load(PretrainConfig, None, [f"{key}={value}" for key, value in settings.items()])
