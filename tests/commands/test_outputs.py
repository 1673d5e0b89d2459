"""What a command reads stays, and what exists is replaced with `overwrite=true` alone."""

import json
import os
from pathlib import Path

import pytest

from dino_vit import VisionTransformer, knn, save_backbone
from dino_vit.cli import main
from dino_vit.core.storage import StorageError
from dino_vit.data.synthetic import make_textures
from tests.support.images import saved, smooth
from tests.support.runs import arguments

READ = [  # a command, and a file that it reads
    "knn photos w.safetensors labels=l.json k=1 output=l.json",
    "predict photos w.safetensors labels=few.csv output=few.csv",
    "attention photos/*.png w.safetensors output=photos photos/sheet-1.png",
    "embed photos.parquet w.safetensors output=photos.parquet",
    "inspect-data list.txt labels=l.json sheet=photos/cat/1.png",
    "export w.safetensors format=timm out=w.safetensors",
]
WRITTEN = [  # a command, and a file that it writes
    "knn synthetic:20:16 w.safetensors k=1 output=knn.json",
    "predict photos w.safetensors labels=few.csv output=new.csv new.json",
    "predict photos w.safetensors labels=few.csv classifier=h.safetensors",
    "label photos w.safetensors labels=few.csv output=by.html",
    "compare synthetic:20:16 w.safetensors untrained output=both.json",
    "attention photos w.safetensors output=maps maps/0-3.attention.npy",
    "embed photos w.safetensors output=e2.parquet",
    "inspect-data photos sheet=sheet.png",
    "export w.safetensors format=timm out=other.pth",
]
SHORT = {
    "budget.steps": 2,
    "compute.checkpoint_every": 1,
    "optim.warmup_epochs": 0,
    "optim.freeze_last_layer_epochs": 0,
}
SMALL = ["pretrain=small.yaml", "count=2"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one of everything, where the commands are run."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/cat/1.png", "photos/dog/2.png", "photos/3.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(saved(smooth("RGB"), "PNG"))
    Path("run").mkdir()
    texts = {"l.json": '{"cat/1.png": "a", "dog/2.png": "b"}', "list.txt": "photos/cat/1.png"}
    texts["small.yaml"] = "views: {global_size: 32, local_size: 16, local_count: 1}\n"
    texts["few.csv"] = "path,label\ncat/1.png,x\ndog/2.png,y\n"
    texts |= {"c.yaml": "source: photos\nweights: w.safetensors\n", "run/config.yaml": "seed: 1\n"}
    texts |= dict.fromkeys(("photos.zip", "photos.parquet", "w.csv", "run/metrics.jsonl"), "of a user")
    for name, text in texts.items():
        path = Path(name)
        if not path.exists():
            path.write_text(text)
    save_weights(Path("w.safetensors"))
    return tmp_path


def save_weights(path):
    path.unlink(missing_ok=True)
    model = VisionTransformer(image_size=16, patch_size=8, width=32, depth=1, heads=1)
    save_backbone(model, path, mean=(0.5,) * 3, std=(0.5,) * 3)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def parts(line):
    """Return the arguments of a command, and a file: after them, or in the last one."""
    *argv, last = line.split()
    return (argv, Path(last)) if "=" not in last else ([*argv, last], Path(last.partition("=")[2]))


@pytest.mark.parametrize("line", READ)
def test_what_is_read_is_never_replaced(line, folder, capsys):
    argv, file = parts(line)
    if not file.exists():
        file.write_bytes(Path("photos/3.png").read_bytes())
    before = contents(folder)
    assert main([*argv, "overwrite=true"]) == 2
    said = capsys.readouterr().err
    assert f"{file} would be" in said
    assert "read" in said
    assert contents(folder) == before


@pytest.mark.parametrize("line", WRITTEN)
def test_what_exists_is_replaced_if_asked(line, folder, capsys):
    argv, file = parts(line)
    file.parent.mkdir(exist_ok=True)
    file.write_text("of a user")
    before = contents(folder)
    assert main(argv) == 2
    assert f"{file} already exists; give overwrite=true to replace it, or another" in capsys.readouterr().err
    assert contents(folder) == before
    assert main([*argv, "overwrite=true"]) == 0
    assert file.read_bytes() != b"of a user"


@pytest.mark.parametrize("spelt", ["photos/dog/../cat/1.png", "hard.png", "link.png"])
def test_no_spelling_deceives(spelt, folder, capsys):
    os.link("photos/cat/1.png", "hard.png")
    Path("link.png").symlink_to("photos/cat/1.png")
    before = contents(folder)
    for source in ("photos/cat/1.png", "photos/*/*.png"):
        assert main(["inspect-data", source, f"sheet={spelt}", "overwrite=true"]) == 2
        assert f"would be replaced, but source={source} is read" in capsys.readouterr().err
    assert contents(folder) == before
    assert Path("link.png").is_symlink()


def test_what_is_no_file_is_not_replaced(folder, capsys):
    Path("folder.png").mkdir()
    assert main(["inspect-data", "photos", "sheet=folder.png", "overwrite=true"]) == 2
    assert "folder.png is not a file; give the name of a file as output" in capsys.readouterr().err


def test_what_a_run_has_of_its_own_is_replaced(folder, capsys):
    assert main(arguments(Path("trained"), SHORT)) == 0
    for command in (["report", "trained", "images=4"], ["knn", "synthetic:20:32", "trained", "k=1"]):
        assert main(command) == main(command) == 0
    (result,) = Path("trained/eval").glob("*.json")
    for command in (
        ["report", "trained", "images=4", "output=trained/report.html"],
        ["knn", "synthetic:20:32", "trained", f"output={result}"],
    ):
        assert main(command) == 2
        assert "already exists; give overwrite=true" in capsys.readouterr().err


def test_results_of_other_labels_are_another_file(folder):
    """A few more labels in the same file of labels do not replace what the first were worth."""
    assert main(arguments(Path("trained"), SHORT)) == 0
    for label in "aab":
        Path("l.json").write_text(json.dumps({"cat/1.png": "a", "dog/2.png": "b", "3.png": label}))
        assert main(["knn", "photos", "trained", "labels=l.json", "k=1"]) == 0
    assert len([*Path("trained/eval").glob("*.json")]) == 2


LONG = "a" * 239  # which leaves no room for the name of the partial file beside it
UNWRITABLE = [
    ("knn synthetic:20:16 w.safetensors k=1 output={}.json", "top-1"),
    ("inspect-data photos sheet={}.png", "3 images"),
]


@pytest.mark.parametrize(("command", "figure"), UNWRITABLE)
def test_figures_that_cannot_be_written_are_printed(command, figure, folder, capsys):
    assert main(command.format(LONG).split()) == 2
    said = capsys.readouterr()
    assert figure in said.out
    assert f"{LONG}." in said.err
    assert "could not be written" in said.err


def test_a_file_in_the_place_of_a_folder_is_told_before_the_work(folder, capsys):
    Path("file").write_text("of a user")
    command, figure = UNWRITABLE[0]
    assert main(command.format("file/b/a").split()) == 2
    said = capsys.readouterr()
    assert figure not in said.out
    assert "cannot be written: file is not a folder; give another output" in said.err


class Hindering:
    """Images beside which somebody puts a file where the output is to be, while they are read."""

    images = make_textures(length=20, size=16)
    targets = tuple(map(images.label, range(20)))
    fingerprint = "hindered"  # or some images would be read for one, before the work

    def __len__(self):
        return 20

    def read(self, index):
        Path("file").write_text("of a user")
        return self.images.read(index)


def test_a_result_that_cannot_be_written_comes_with_the_error(folder):
    with pytest.raises(StorageError, match=r"file/a\.json could not be written") as raised:
        knn(Hindering(), "w.safetensors", k=1, output="file/a.json", verbose=False)
    assert raised.value.result.figure.images == 20
