"""The commands of the README, of docs/start/ and of guides, one after the other, in a folder with photos.

Only the sizes are made small.
`make`, `pip` and the demo have tests of their own.
"""

import re
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
    "linear": ["steps=20", "cs=[1]", "batch_size=8"],
    "report": ["images=20"],
    "compare": ["measures=[knn]"],
    "dense": ["steps=5"],
}
DOCS = ROOT / "docs"
START = [README, *((DOCS / f"start/{name}.md").read_text() for name in ("your-photos", "watch", "learned"))]
GUIDES = ("guides/large-sets.md", "guides/published-weights.md", "multi-node.md")
ALL = [parts for page in START for parts in commands(page)]
ALL += [commands((DOCS / guide).read_text())[0] for guide in GUIDES]
WALKED = [[*parts] for parts in dict.fromkeys(map(tuple, ALL)) if not {"make", "pip", "demo"} & {*parts[:2]}]


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
    made = {"views.png", "photos-packed", "runs/photos/report.html", "maps/sheet-1.png", "similar.png"}
    made |= {"vits16", "duplicates.json", "runs/accelerate", "runs/continued"}
    assert {path for path in made if not (place / path).exists()} == set()


def test_the_python_works(place, monkeypatch):
    monkeypatch.chdir(place)
    (block,) = blocks((DOCS / "start/python.md").read_text(), "python")
    whole = 'recipe="auto", budget={"minutes": 20}'
    assert whole in block
    for name in ("a.jpg", "b.jpg"):
        shutil.copy(place / "query.jpg", name)
    names = {"images": torch.rand(2, 3, 32, 32), "small": load(PretrainConfig, None, SMALL)}
    exec(block.replace(whole, "config=small").replace("runs/photos", "runs/python"), names)
    assert names["run"].folder == Path("runs/python")
    assert names["result"].top1.images == 32
    assert names["values"].shape == (32, 32)
    assert names["features"].shape == (2, 32)
    assert names["maps"].shape == (2, 2, 17, 17)
    for page in ("start/your-photos.md", "guides/dense.md", "reference/classes.md"):
        names, text = {}, (DOCS / page).read_text()
        for block in blocks(re.sub("runs/(pretrain|photos)", "runs/python", text), "python"):
            exec(block, names)
        assert len(names.get("features", names.get("maps"))) in (1, 2)
