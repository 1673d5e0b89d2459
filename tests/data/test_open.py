import pickle

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dino_vit.data.open import open_source
from tests.support.image_sets import (
    CLASSES,
    FILES,
    ORDER,
    items,
    write_folder,
    write_parquet,
    write_tar,
    write_zip,
)
from tests.support.remote import serving


def parts(number):
    """The images in two parts, each in an order that is not theirs."""
    names = list(FILES)
    return {name: FILES[name] for name in (names[:2], names[2:])[number]}


def write_list(root):
    write_folder(root)
    rows = "".join(f'"{name}",{name.split("/")[0]}\n' for name in FILES)
    (root / "list.csv").write_text("path,label\n" + rows)
    return root / "list.csv"


def write_shards(root):
    for number in range(2):
        write_tar(root / f"{number:03d}.tar", parts(number))
    return root / "{000..001}.tar"


def write_tables(root):
    for number in range(2):
        write_parquet(root / f"train-{number}.parquet", parts(number))
    return root / "train-*.parquet"


def write_archive_folder(root):
    write_shards(root)
    (root / "README.md").write_text("")
    return root


KINDS = {
    "folder": write_folder,
    "list": write_list,
    "tar": lambda root: write_tar(root / "a.tar"),
    "shards": write_shards,
    "folder of shards": write_archive_folder,
    "zip": lambda root: write_zip(root / "a.zip"),
    "parquet": lambda root: write_parquet(root / "a.parquet"),
    "tables": write_tables,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_images_are_the_same_items(tmp_path, kind):
    (tmp_path / "set").mkdir()
    source = open_source(str(KINDS[kind](tmp_path / "set")))
    expected = [(name, FILES[name], name.split("/")[0]) for name in ORDER]
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert items(one) == expected
        assert one.labels.names == CLASSES
        assert one.name(-1) == "dog/new\\nline.tiff"
        for get in (one.read, one.name, one.label):
            with pytest.raises(IndexError):
                get(5)
    assert source.fingerprint == open_source(str(write_folder(tmp_path / "other"))).fingerprint


def test_a_folder_of_archives_must_be_of_one_kind_and_split(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    assert len(open_source(str(tmp_path))) == 5
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"\(test, train\).*choose one by .* such as '.*data/\*train\*'"):
        open_source(str(tmp_path))
    assert len(open_source(str(tmp_path / "data" / "test*.parquet"))) == 5
    for split in ("train", "val"):
        write_tar(tmp_path / "shards" / split / "0.tar")
    with pytest.raises(ValueError, match=r"\(train, val\).*such as '.*shards/val/\*val\*'"):
        open_source(str(tmp_path / "shards"))
    assert len(open_source(str(tmp_path / "shards" / "val"))) == 5
    write_tar(tmp_path / "a.tar")
    with pytest.raises(ValueError, match=r"kinds or splits \(\.parquet, \.tar\)"):
        open_source(str(tmp_path))


def test_images_beside_archives_are_what_is_taken(tmp_path, caplog):
    write_folder(tmp_path)
    write_tar(tmp_path / "a.tar")
    assert len(open_source(str(tmp_path))) == 5
    assert "without the 1 archive in it, such as a.tar" in caplog.text


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("missing", "does not exist: give a folder"),
        ("*.zip", "matches no file"),
        ("{1..3}.tar", r"2 missing files, such as .*2\.tar"),
        ("*", "files of several kinds"),
        ("*.[jd]*", "files of several kinds"),
        ("a.docx", "is of an unknown kind"),
        ("IMG_*", "is of an unknown kind"),
        ("a.parquet", r"a\.parquet is damaged or not a Parquet file"),
        ("a.npy", "is damaged or not an array of images"),
        ("empty.txt", "lists no images"),
        ("wrong.txt", r"none of the files listed in .* exist"),
    ],
)
def test_what_is_no_source_is_told_what_to_do(tmp_path, spec, said):
    for name in ("a.jpg", "b.jpg", "a.docx", "a.parquet", "a.npy", "1.tar", "empty.txt", "IMG_1", "IMG_2"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "wrong.txt").write_text("nowhere/x.jpg\n")
    with pytest.raises(ValueError, match=said):
        open_source(str(tmp_path / spec))


def test_lists_may_have_absolute_paths_and_urls_and_some_files_may_be_missing(tmp_path, caplog):
    write_folder(tmp_path / "set")
    fsspec.filesystem("memory").pipe("/far/x.png", b"far")
    (tmp_path / "list.txt").write_text(f"memory://far/x.png\n{tmp_path}/set/cat/é.jpg\nset/nowhere.png\n")
    source = open_source(str(tmp_path / "list.txt"))
    assert [source.read(0), source.read(1), source.label(0)] == [FILES["cat/é.jpg"], b"far", None]
    assert "lists 1 file that cannot be found" in caplog.text
    with pytest.raises(FileNotFoundError):
        source.read(2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "list"])
def test_remote_sources_are_as_local_ones(tmp_path, kind):
    (tmp_path / "set").mkdir()
    spec = KINDS[kind](tmp_path / "set").relative_to(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.rm("/", recursive=True)
    memory.put(f"{tmp_path}/set", "/set", recursive=True)
    source = open_source(f"memory://{spec}")
    assert items(source) == [(name, FILES[name], name.split("/")[0]) for name in ORDER]
    assert items(open_source(f"file://{tmp_path}/{spec}")) == items(source)
    assert items(pickle.loads(pickle.dumps(source))) == items(source)


def test_remote_changes_are_seen_and_losses_are_errors():
    memory = fsspec.filesystem("memory")
    memory.pipe({"/changing/a.png": b"a"})
    assert open_source("memory://changing").name(0) == "a.png"
    memory.pipe({"/changing/b.png": b"bb"})
    source = open_source("memory://changing")
    assert source.read(1) == b"bb"
    memory.rm("/changing/b.png")
    with pytest.raises(OSError, match=r"b\.png"):
        source.read(1)
    with pytest.raises(ValueError, match="does not exist"):
        open_source("memory://nowhere")
    with pytest.raises(ValueError, match="cannot be reached"):
        open_source("nonsense://nowhere")


@pytest.mark.parametrize("spec", ["photos", "photos/", "*.tar", "a/?.jpg"])
def test_a_web_server_is_asked_for_no_list_of_its_files(tmp_path, spec):
    write_folder(tmp_path / "photos")
    with serving(tmp_path) as server:
        with pytest.raises(ValueError, match=r"does not list its files; give shards by their numbers, such"):
            open_source(f"{server.url}/{spec}")
        assert {request.name.rpartition("/")[2] for request in server.requests} <= {
            "catalogue.arrow",
            "*.tar",
        }


def test_tables_without_names_keep_their_order_and_their_folders_are_splits(tmp_path):
    for path in ("train/0", "test/0"):
        write_parquet(tmp_path / f"{path}.parquet", names=False)
    source = open_source(str(tmp_path / "*" / "*.parquet"))
    assert items(source) == [
        (f"{split}/0.parquet/{row:09d}", data, name.split("/")[0])
        for split in ("test", "train")
        for row, (name, data) in enumerate(FILES.items())
    ]
    assert source.split_sizes() == {"test": len(FILES), "train": len(FILES)}
    write_parquet(tmp_path / "train" / "z.parquet", names=False)
    assert open_source(str(tmp_path / "train")).name(5) == "z.parquet/000000000", "another name tells apart"


def test_tables_of_other_makes(tmp_path):
    data = list(FILES.values())
    table = pa.table({"id": range(5), "image": data, "class": ["b", "a", None, "b", "10"]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd")
    source = open_source(str(tmp_path / "a.parquet"))
    assert [item[1:] for item in items(source)] == list(zip(data, ["b", "a", None, "b", "10"], strict=True))
    images = pa.array([*data[:4], None], pa.large_binary())
    names = pa.array(list("edcba"), pa.large_string())
    table = pa.table({"photo": images, "file_name": names, "label": [700, 3, 3, -1, None]})
    pq.write_table(table, tmp_path / "b.parquet")
    source = open_source(str(tmp_path / "b.parquet"))
    assert [source.name(index) for index in range(5)] == list("abcde")
    assert [source.label(index) for index in range(5)] == [None, None, 0, 0, 1]
    assert source.read(0) == b""


def test_tables_that_do_not_say_which_column_or_class(tmp_path):
    def write(**columns):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        return str(tmp_path / "a.parquet")

    with pytest.raises(ValueError, match=r"no column of images: none of x \(int64\), y \(string\)"):
        open_source(write(x=[1], y=["text"]))
    with pytest.raises(ValueError, match=r"several columns of images: front, back. Rename one"):
        open_source(write(front=[b"1"], back=[b"2"]))
    assert open_source(write(depth=[b"1"], image=[b"2"])).read(0) == b"2"
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    with pytest.raises(ValueError, match=r"no image bytes, perhaps only paths"):
        open_source(write(image=pa.array([{"bytes": None, "path": "a.png"}], kind)))
    pq.write_table(pa.table({"image": [b"1"]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"img": [b"1"]}), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"2\.parquet has different columns from .*1\.parquet"):
        open_source(str(tmp_path / "[12].parquet"))
    path = write_parquet(tmp_path / "c.parquet")
    table = pq.read_table(path)
    labels = table.set_column(1, "label", pa.array([0, 1, 2, 3, -1]))
    pq.write_table(labels.replace_schema_metadata(table.schema.metadata), path)
    with pytest.raises(ValueError, match="column label has the label 3, which is none of its 3 classes"):
        open_source(str(path))


@pytest.fixture(autouse=True)
def _cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def test_datasets_of_the_hub(tmp_path, caplog):
    """A local folder in the place of a repository: the library reads both alike."""
    for split, number in (("train", 0), ("test", 1)):
        write_parquet(tmp_path / "set" / f"{split}-0.parquet", parts(number))
    spec = f"hf:{tmp_path / 'set'}"
    with pytest.raises(ValueError, match=r"has no split val, but train, test"):
        open_source(f"{spec}[val]")
    with pytest.raises(
        ValueError, match=r"none cannot be loaded: .*/none.*Check the name .* and the network"
    ):
        open_source(f"hf:{tmp_path / 'none'}")
    caplog.set_level("INFO", "dino_vit")
    source = open_source(f"{spec}[test]")
    assert not list((tmp_path / "cache").rglob("*train*.arrow"))  # which is not used
    assert "set[test]: configuration default, test (" in caplog.text
    assert items(open_source(f"{spec}:test")) == items(source)
    expected = [(name, FILES[name], name.split("/")[0]) for name in ORDER if name in parts(1)]
    assert items(source) == expected
    assert items(pickle.loads(pickle.dumps(source))) == expected
    assert source.labels.names == CLASSES
    both = open_source(spec)
    assert both.split_sizes() == {"test": 3, "train": 2}
    assert sorted(items(both)) == sorted(
        (f"{split}/{name}", FILES[name], name.split("/")[0])
        for split, number in (("train", 0), ("test", 1))
        for name in parts(number)
    )
    write_parquet(tmp_path / "whole" / "train-0.parquet")
    whole = open_source(f"hf:{tmp_path / 'whole'}")
    assert whole.fingerprint == open_source(str(write_folder(tmp_path / "folder"))).fingerprint


def test_a_row_of_the_hub_without_an_image_is_one_that_cannot_be_read(tmp_path):
    images = pa.array([None, {"bytes": None}, {"bytes": b"c"}], pa.struct({"bytes": pa.binary()}))
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"image": images}), tmp_path / "set" / "train-0.parquet")
    source = open_source(f"hf:{tmp_path / 'set'}")
    assert [source.read(index) for index in range(3)] == [b"", b"", b"c"]


def test_the_hub_says_what_it_needs(monkeypatch):
    with pytest.raises(ValueError, match="hf: names no data set: write hf:OWNER/NAME"):
        open_source("hf:")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets"):
        open_source("hf:owner/name")


def test_a_data_set_of_the_hub_has_configurations(tmp_path, monkeypatch):
    root, files = tmp_path / "owner" / "set", ""
    for name, number in (("small", 0), ("large", 1)):
        write_parquet(root / name / "train-0.parquet", parts(number))
        files += f"- config_name: {name}\n  data_files: {name}/train-*\n"
    (root / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    monkeypatch.chdir(tmp_path)  # a folder here, a repository on the hub
    with pytest.raises(ValueError, match=r"available configs: \['small', 'large'\]"):
        open_source("hf:owner/set")
    assert len(open_source("hf:owner/set/small")) == len(parts(0))
    assert len(open_source("hf:owner/set/large[train]@main")) == len(parts(1))
