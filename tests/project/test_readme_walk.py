"""The commands of the README and of docs/start/, one after the other, in a folder with photos.

Only the sizes are made small.
`make`, `sbatch` and `torchrun` are left to the tests of launching.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from dino_vit import VisionTransformer, export_backbone
from dino_vit.cli import main
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from tests.support.documents import README, ROOT, blocks, commands
from tests.support.images import write_synthetic
from tests.support.runs import TINY

OWN = {"data.source", "data.batch_size", "run.eval_every", "optim.warmup_epochs"}
SMALL = [f"{key}={value}" for key, value in TINY.items() if key not in OWN]
SMALL += ["data.batch_size=4", "run.eval_every=1", "optim.warmup_epochs=0"]
SMALLER = {
    "linear": ["grid.steps=20", "logistic.cs=[1]", "batch_size=8"],
    "finetune": ["epochs=2", "batch_size=4", "workers=0", "warmup_epochs=0", "size=32"],
    "report": ["images=20"],
    "compare": ["measures=[knn]"],
    "dense": ["steps=5"],
}
START = (ROOT / "docs/start/your-photos.md").read_text()
PYTHON = [
    START,
    *((ROOT / "docs" / page).read_text() for page in ("guides/dense.md", "reference/classes.md")),
]
WALKED = [parts for parts in commands(README) if not {"make", "sbatch", "torchrun"} & {*parts}]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    for number in range(32):
        name = f"{('sky', 'grass')[number % 2]}/{number}.png"
        write_synthetic(folder / "photos" / name, number, size=48)
        (folder / "masks" / name).parent.mkdir(parents=True, exist_ok=True)
        with Image.open(folder / "photos" / name) as picture:
            picture.convert("L").point(lambda value: value // 128).save(folder / "masks" / name)
    tags = [f"{('sky', 'grass')[n % 2]}/{n}.png,{'blue' if n % 3 else 'green;dark'}" for n in range(32)]
    (folder / "tags.csv").write_text("\n".join(["name,tags", *tags]))
    shutil.copy(folder / "photos" / "sky" / "0.png", folder / "query.jpg")
    published = VisionTransformer(image_size=32, patch_size=8, width=192, depth=1, heads=3)
    export_backbone(published, folder / "dino_deitsmall16_pretrain.pth", "reference")
    return folder


def small(parts):
    """Return a command of the README with settings behind it that make it small."""
    if parts[0] == "accelerate":
        launched = shlex.split(shlex.join(parts).replace("multi_gpu.yaml", "cpu.yaml").replace("8", "2", 1))
        kept = [part for part in launched if part not in {"--config", "configs/pretrain/vits16.yaml"}]
        return [*kept, *SMALL, "output=runs/accelerate", "run.eval_every=null"]
    if any(part.startswith("budget.minutes") for part in parts):
        auto = ("budget.", "optim.freeze_last_layer_epochs")  # it fits phases to a slow machine
        return [*parts, *(one for one in SMALL if not one.startswith(auto)), "budget.minutes=0.05"]
    if parts[1] == "pretrain" and not any(part.startswith("init.") for part in parts):
        return [*parts, *SMALL]
    if parts[1] == "pretrain":
        own = ("model.", "optim.lr")  # those of the weights, and of a run from weights
        return [*parts, *(one for one in SMALL if not one.startswith(own)), "optim.min_lr=0"]
    return [*parts, *SMALLER.get(parts[1], [])]


def run(parts, place):
    if parts[0] == "dino-vit":
        return main(parts[1:])
    command = [str(Path(sys.executable).with_name(parts[0])), *parts[1:]]
    command = [str(ROOT / part) if part.startswith("launch/") else part for part in command]
    return subprocess.run(command, cwd=place, check=False, capture_output=True, timeout=900).returncode


def test_every_command_works_in_its_order(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    for parts in WALKED:
        code = run(small(parts), place)
        assert code == 0, f"{shlex.join(parts)}: {capsys.readouterr().err}"
    for made in ("views.png", "photos-packed", "runs/pretrain/report.html", "photos.parquet", "vits16"):
        assert (place / made).exists()


def test_the_python_block_works(place, monkeypatch):
    monkeypatch.chdir(place)
    (block,) = (text for text in blocks(README, "python") if "load_b" in text)
    whole = 'recipe="auto", budget={"minutes": 20}'
    assert whole in block
    for name in ("a.jpg", "b.jpg"):
        shutil.copy(place / "query.jpg", name)
    names = {"images": torch.rand(2, 3, 32, 32), "small": load(PretrainConfig, None, SMALL)}
    exec(block.replace(whole, "config=small"), names)
    assert names["run"].folder == Path("runs/photos")
    assert names["result"].top1.images == 32
    assert names["values"].shape == (32, 32)
    assert names["features"].shape == (2, 32)
    assert names["maps"].shape == (2, 2, 17, 17)


def test_the_first_photos_work_as_described(place, tmp_path, monkeypatch, capsys):
    shutil.copytree(place / "photos", tmp_path / "photos")
    for name in ("query.jpg", "a.jpg", "b.jpg"):
        shutil.copy(place / "query.jpg", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for parts in commands(START):
        assert run(small(parts), tmp_path) == 0, f"{shlex.join(parts)}: {capsys.readouterr().err}"
    for made in ("runs/photos/report.html", "maps/sheet-1.png", "similar.png", "duplicates.json"):
        assert Path(made).exists()
    for page in PYTHON:
        names = {}
        for block in blocks(page.replace("runs/pretrain", "runs/photos"), "python"):
            exec(block, names)
        assert len(names.get("features", names.get("maps"))) in (1, 2)
