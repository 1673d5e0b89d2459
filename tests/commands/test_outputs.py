"""What a command reads, and what a user has, stays; results of ours are rewritten."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from dino_vit import VisionTransformer, knn, save_backbone
from dino_vit.cli import main
from dino_vit.core.outputs import claim
from dino_vit.core.storage import StorageError
from dino_vit.data.sources.synthetic import make_textures
from tests.support import embeddings
from tests.support.images import saved, smooth
from tests.support.runs import arguments

READ = {  # by command: what it is given, the setting of its output, files that it reads or that lie there
    "knn photos w.safetensors labels=l.json k=1": ("output", ["l.json", "w.safetensors", "photos/cat/1.png"]),
    "knn list.txt w.safetensors k=1 train=photos": ("output", ["list.txt", "photos/dog/2.png"]),
    "knn --config c.yaml": ("output", ["c.yaml"]),
    "linear photos w.safetensors train=photos.zip": ("output", ["photos.zip", "w.safetensors"]),
    "dense photos w.safetensors masks=masks class_names=names.txt": ("output", ["masks/1.png", "names.txt"]),
    "compare photos w.safetensors untrained=true measures=[knn]": (
        "output",
        [".=comparison.json", ".=comparison.png", ".=1-knn.json", ".=2-knn.json"],
    ),
    "attention photos w.safetensors": ("output", [".=sheet-1.png", ".=1-cat-1.png", ".=2-dog-2.mask.png"]),
    "attention photos/*.png w.safetensors": ("output", [".=sheet-1.png", ".=0-3.attention.npy"]),
    "embed photos.parquet w.safetensors": ("output", ["photos.parquet"]),
    "search e.parquet q.png weights=w.safetensors": ("output", ["q.png", "other.png=other.json"]),
    "duplicates e.parquet": ("output", ["l.json", "other.json=other.png", "o.json=o-split-leaks.png"]),
    "inspect-data photos labels=l.json": ("sheet", ["photos/cat/1.png", "l.json", "w.safetensors"]),
    "inspect-data photos.zip pretrain=c.yaml": ("sheet", ["photos.zip", "c.yaml"]),
    "report run": ("output", ["run/config.yaml", "run/metrics.jsonl", "photos/cat/1.png"]),
    "export w.safetensors format=timm overwrite=true": ("out", ["w.safetensors"]),
    "export w.safetensors format=timm": ("out", ["other.pth"]),
    "pack photos": ("output", ["photos", "photos.zip"]),
}
SMALL = ["pretrain=small.yaml", "count=2"]
CASES = [(command, key, case) for command, (key, cases) in READ.items() for case in cases]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one of everything, where the commands are run."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/cat/1.png", "photos/dog/2.png", "photos/3.png", "q.png", "masks/1.png"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(saved(smooth("RGB"), "PNG"))
    Path("run").mkdir()
    texts = {"l.json": '{"cat/1.png": "a"}', "list.txt": "photos/cat/1.png", "names.txt": "a"}
    texts["small.yaml"] = "views: {global_size: 32, local_size: 16, local_count: 1}\n"
    texts |= {"c.yaml": "source: photos\nweights: w.safetensors\n", "run/config.yaml": "seed: 1\n"}
    texts |= dict.fromkeys(("photos.zip", "photos.parquet", "w.csv", "run/metrics.jsonl"), "of a user")
    for name, text in texts.items():
        path = Path(name)
        if not path.exists():
            path.write_text(text)
    embeddings.write(Path("e.parquet"))
    save_weights(Path("w.safetensors"))
    return tmp_path


def save_weights(path):
    path.unlink(missing_ok=True)
    model = VisionTransformer(image_size=16, patch_size=8, width=32, depth=1, heads=1)
    save_backbone(model, path, mean=(0.5,) * 3, std=(0.5,) * 3)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "key", "case"), CASES)
def test_what_is_read_or_there_stays(command, key, case, folder, capsys):
    output, _, there = case.rpartition("=")
    if not os.path.exists(there):
        Path(there).write_text("of a user")
    before = contents(folder)
    assert main([*command.split(), f"{key}={output or there}"]) == 2
    assert contents(folder) == before
    said = capsys.readouterr().err
    assert Path(there).name in said
    assert "Traceback" not in said


@pytest.mark.parametrize("spelt", ["./photos/cat/1.png", "photos/dog/../cat/1.png", "hard.png", "link.png"])
def test_no_spelling_deceives(spelt, folder, capsys):
    os.link("photos/cat/1.png", "hard.png")
    Path("link.png").symlink_to("photos/cat/1.png")
    before = contents(folder)
    assert main(["inspect-data", "photos/cat/1.png", f"sheet={spelt}"]) == 2
    assert "would be overwritten, but source=photos/cat/1.png is read" in capsys.readouterr().err
    assert contents(folder) == before
    assert Path("link.png").is_symlink()


def test_a_result_is_written_again_through_links_but_never_where_it_is_read(folder, capsys):
    assert main(["inspect-data", "photos", "sheet=photos/sheet.png", *SMALL]) == 2
    assert "would be one of the images of source=photos" in capsys.readouterr().err
    assert main(["inspect-data", "synthetic:2:16", "sheet=photos/sheet.png", *SMALL]) == 0
    for name in ("sheet.png", "link.png"):
        if name == "link.png":
            Path(name).symlink_to("sheet.png")
        assert main(["inspect-data", "photos", f"sheet={name}", *SMALL]) == 0
    assert Path("link.png").is_symlink()
    assert main(["inspect-data", "photos", "sheet=sheet.png", *SMALL]) == 0
    for source in ("photos", "photos/*.png", "photos/sheet.png"):
        assert main(["inspect-data", source, "sheet=photos/sheet.png"]) == 2
        assert f"source={source} is read" in capsys.readouterr().err
    Path("sheets.txt").write_text("photos/sheet.png\n")
    assert main(["inspect-data", "sheets.txt", "sheet=photos/sheet.png"]) == 2
    Path("dangling.png").symlink_to("nowhere.png")
    assert main(["inspect-data", "photos", "sheet=dangling.png"]) == 2
    assert Path("dangling.png").is_symlink()


def test_devices_and_pipes_are_not_opened(folder):
    os.mkfifo("pipe.json")
    for path in ("pipe.json", "/dev/null"):
        with pytest.raises(StorageError, match="already exists"):
            claim(Path(path))


def test_only_sheets_of_earlier_calls_are_removed(folder, monkeypatch):
    monkeypatch.setattr("dino_vit.eval.maps.attention.SHEET_ROWS", 1)
    Path("maps").mkdir()
    Path("maps/sheet-7.png").write_bytes(b"of a user")
    two = ["attention", "synthetic:2:16", "w.safetensors", "output=maps"]
    assert main(two) == main(two) == 0
    assert Path("maps/sheet-2.png").exists()
    assert main(["attention", "synthetic:1:16", "w.safetensors", "output=maps"]) == 0
    assert not Path("maps/sheet-2.png").exists()
    assert Path("maps/sheet-7.png").read_bytes() == b"of a user"


def test_sheets_of_duplicates_go_with_the_pairs(folder):
    command = ["duplicates", "e.parquet", "output=d.json"]
    assert main([*command, "threshold=0.5"]) == 0
    assert Path("d.png").exists()
    assert main([*command, "threshold=1"]) == 0
    assert not Path("d.png").exists()


LONG = "a" * 239  # which leaves no room for the name of the partial file beside it
UNWRITABLE = [
    ("knn synthetic:20:16 w.safetensors k=1 output={}.json", "top-1"),
    ("duplicates e.parquet threshold=0.5 output={}.json", "6 pairs in 1 group"),
    ("search e.parquet q.png weights=w.safetensors output={}.png", "q.png:"),
    ("inspect-data photos sheet={}.png", "3 images"),
]


def output_at(command, place):
    """Return the arguments of a command that writes to a place; `search` gets embeddings of its own."""
    if "search" in command:
        assert main(["embed", "photos", "w.safetensors", "output=photos2.parquet"]) == 0
        command = command.replace("e.parquet", "photos2.parquet")
    return command.format(place).split()


@pytest.mark.parametrize(("command", "figure"), UNWRITABLE)
def test_figures_that_cannot_be_written_are_printed(command, figure, folder, capsys):
    assert main(output_at(command, LONG)) == 2
    said = capsys.readouterr()
    assert figure in said.out
    assert f"{LONG}." in said.err
    assert "could not be written" in said.err


@pytest.mark.parametrize(("command", "figure"), UNWRITABLE)
@pytest.mark.parametrize("place", ["file/a", "file/b/a"])
def test_a_file_in_the_place_of_a_folder_is_told_before_the_work(command, figure, place, folder, capsys):
    Path("file").write_text("of a user")
    arguments = output_at(command, place)
    capsys.readouterr()
    assert main(arguments) == 2
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
    with pytest.raises(StorageError, match="cannot be written: file is not a folder") as raised:
        knn(Hindering(), "w.safetensors", k=1, output="file/a.json", verbose=False)
    assert raised.value.result.figure.images == 20
    Path("a.json").mkdir()
    with pytest.raises(ValueError, match=r"a\.json is a folder; give the name of a file"):
        knn("synthetic:20:16", "w.safetensors", output="a.json", verbose=False)


def test_a_result_is_named_after_the_step_that_was_loaded(folder):
    """The newest checkpoint is damaged, so the one before is judged."""

    short = {"budget.steps": 2, "run.checkpoint_every": 1, "optim.warmup_epochs": 0}
    short |= {"optim.freeze_last_layer_epochs": 0}
    assert main(arguments(Path("trained"), short)) == 0
    newest = Path("trained/checkpoints/step-00000002.safetensors")
    newest.write_bytes(newest.read_bytes()[:-9])
    assert main(["knn", "synthetic:20:32", "trained", "k=1"]) == 0
    (result,) = Path("trained/eval").glob("*.json")
    assert result.name.startswith("step-00000001.knn-")
    assert json.loads(result.read_text())["weights"]["step"] == 1


def test_marks_are_where_others_do_not_look(folder):
    assert main(["attention", "photos", "w.safetensors", "output=maps"]) == 0
    with Image.open("maps/sheet-1.png") as sheet:
        assert "written by dino-vit" in sheet.info["Comment"]
    assert main(["attention", "photos", "w.safetensors", "output=maps"]) == 0
