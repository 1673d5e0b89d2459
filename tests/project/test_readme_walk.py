"""The commands and the Python of the README and of docs/, one after the other, in a folder with photos.

Only the sizes are made small. Not run are programs other than `dino-vit`, and what `ELSEWHERE` matches;
`tests/project/test_docs.py` checks the settings of every command.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import pandas
import pytest
import timm
import torch
from safetensors.torch import save_file
from transformers import Dinov2Config, Dinov2Model

from dino_vit import VisionTransformer, export_backbone
from dino_vit.cli import build_parser, main
from dino_vit.commands import COMMANDS
from dino_vit.config.loading import config_from, load, parse_arguments
from dino_vit.config.pretrain import PretrainConfig
from tests.support.backbones import use_few_penalties
from tests.support.documents import README, ROOT, blocks, commands
from tests.support.hub import offline, snapshot
from tests.support.image_sets import image_file, write_parquet, write_tar
from tests.support.images import write_synthetic
from tests.support.runs import CPU, TINY

DOCS = ROOT / "docs"
START = [
    README,
    *((DOCS / f"start/{name}.md").read_text() for name in ("your-photos", "watch", "label", "predict")),
]
# Object stores, disks of a cluster, a published set; the demo and ONNX take long, and have other tests.
ELSEWHERE = re.compile("dino-vit demo|onnx|s3:|https:|=/|VOCdevkit")
OWN = {"data.source", "data.batch_size", "compute.eval_every", "optim.warmup_epochs"}
OWN |= {"optim.freeze_last_layer_epochs", "budget.steps"}
SMALL = [f"{key}={value}" for key, value in TINY.items() if key not in OWN]
SMALL += ["data.batch_size=4", "compute.eval_every=1", "optim.warmup_epochs=0"]
SMALL += ["optim.freeze_last_layer_epochs=0", "budget.steps=2"]
SUBSTITUTES = {r"budget.minutes=\d+": "budget.minutes=0.03", r"step-\d+": "step-00000002"}
SMALLER = {
    "linear": ["batch_size=8"],
    "attention": ["count=2"],
    "report": ["images=20"],
    "label": ["images=20", "overwrite=true"],
}


def here(parts):
    return parts[0] == "dino-vit" and not ELSEWHERE.search(shlex.join(parts))


EXAMPLES = [
    f"dino-vit {example}" for command in COMMANDS.values() for example in command.config_class.examples
]
PAGES = {str(path.relative_to(DOCS)): path.read_text() for path in sorted(DOCS.rglob("*.md"))}
PAGES["reference/commands"] = "\n".join(["```bash", *EXAMPLES, "```"])
PAGES = {
    page: text
    for page, text in PAGES.items()
    if not page.startswith("start/") and ("```python" in text or any(map(here, commands(text))))
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """What the commands begin with: images of all kinds, labels, a run and published weights."""
    folder = tmp_path_factory.mktemp("walk")
    names = [f"{('sky', 'grass')[number % 2]}/{number}.png" for number in range(32)]
    for number, name in enumerate(names):
        write_synthetic(folder / "photos" / name, number, size=48)
    for number, name in enumerate(names):
        kind, file = name.split("/")
        copy = folder / (f"labelled/{kind}" if number < 20 else "new" if number < 26 else "newer") / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "photos" / name, copy)
    few = [f"{name},{name.split('/')[0]}" for name in names[:20]]
    (folder / "few.csv").write_text("\n".join(["name,label", *few]))
    files = {name: (folder / "photos" / name).read_bytes() for name in names}
    labels = {"tags": ["blue", "green;dark"], "labels": ["a", "b"], "heights": [1.5, 2.25], "ages": [30, 7]}
    for title, values in labels.items():
        lines = [f"{name},{values[number % 3 > 0]}" for number, name in enumerate(names)]
        (folder / f"{title}.csv").write_text("\n".join([f"name,{title}", *lines]))
    for number in range(11):
        write_tar(folder / f"shards/{number:03}.tar", dict([*files.items()][number::11]))
    write_parquet(folder / "flowers/train.parquet")
    held_out = {f"cat/{seed}.png": image_file(seed, f"{seed}.png") for seed in range(10, 14)}
    write_parquet(folder / "flowers/test.parquet", held_out)
    for kind, shape in (("scans", (40, 40)), ("bands", (40, 40, 13))):
        (folder / kind).mkdir()
        for number in range(8):
            np.save(folder / f"{kind}/{number}.npy", np.full(shape, 500 * number, np.uint16))
    for copy in ("query.jpg", "a.jpg", "b.jpg", "cat.jpg", "dog.jpg", "photo.jpg"):
        shutil.copy(folder / "photos/sky/0.png", folder / copy)
    published = VisionTransformer(image_size=32, patch_size=8, width=192, depth=1, heads=3)
    export_backbone(published, folder / "dino_deitsmall16_pretrain.pth", "reference")
    write_published(folder / "hub")
    (folder / "turned.yaml").write_text("augment: {vertical_flip: 0.5, rotation: 90}\n")
    (folder / "configs").symlink_to(ROOT / "configs")
    with chdir(folder):
        assert main(small(["dino-vit", "pretrain", "photos", "runs/pretrain"])[1:]) == 0
    return folder


def write_published(cache):
    """Fill a cache of the hub with small networks in the layouts of those that the pages name."""
    for name in ("facebook/dinov2-small", "facebook/dinov2-large"):
        shape = {"hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 3}
        model = Dinov2Model(Dinov2Config(**shape, image_size=56, patch_size=14))
        model.save_pretrained(folder := snapshot(cache, name))
        (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    name, shape = "vit_small_patch14_dinov2", {"embed_dim": 192, "depth": 1, "num_heads": 3, "img_size": 56}
    folder = snapshot(cache, f"timm/{name}.lvd142m")
    save_file(timm.create_model(name, **shape).state_dict(), folder / "model.safetensors")
    given = {"architecture": name, "model_args": shape, "num_classes": 0}
    given["pretrained_cfg"] = {"input_size": [3, 56, 56], "mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "config.json").write_text(json.dumps(given))


@pytest.fixture
def place(inputs, tmp_path, monkeypatch):
    offline(inputs / "hub", monkeypatch)
    use_few_penalties(monkeypatch.setattr)
    shutil.copytree(inputs, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(parts):
    """Return a command of the documents with settings behind it that make it small."""
    given = shlex.join(parts)
    for written, used in SUBSTITUTES.items():
        given = re.sub(written, used, given)
    parts = shlex.split(given)
    if parts[1] != "pretrain" or "--config runs/" in given:
        return [*parts, *SMALLER.get(parts[1], [])]
    own = ()
    if re.search("init.weights|teacher.weights=hf:", given):  # network and sizes follow theirs
        own = ("model.", "optim.lr", "views.global_size", "views.local_size")
    if "budget.minutes" in given:
        own = (*own, "budget.", "optim.freeze_last_layer_epochs")  # it fits phases to a slow machine
    return [*parts, *(setting for setting in SMALL if not setting.startswith(own)), "optim.min_lr=0"]


def run(parts, capsys):
    """Run a command; a pretraining that does not resume gets an empty folder."""
    if parts[1] == "pretrain" and not re.search("resume=|--config runs/", shlex.join(parts)):
        config = config_from(parse_arguments(build_parser(parts[1:2]), parts[1:]), PretrainConfig)
        shutil.rmtree(config.output, ignore_errors=True)
    assert main(parts[1:]) == 0, f"{shlex.join(parts)}: {capsys.readouterr().err}"


def test_every_command_works_in_its_order(place, capsys):
    walked = [small(parts) for page in START for parts in filter(here, commands(page))]
    for parts in dict.fromkeys(map(tuple, walked)):
        run(parts, capsys)
    made = {"views.png", "runs/photos/report.html", "maps/sheet-1.png", "photos.parquet", "vit.pth"}
    assert {path for path in made if not (place / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_from_its_top_to_its_end(page, place, capsys):
    text, names = PAGES[page], {}
    if any("train=photos/train" in parts for parts in commands(text)):  # a set with splits
        few = Path("few.csv").read_text()
        for path in list(Path("photos").rglob("*.png")):
            folder, label, name = path.parts
            split = Path(folder, "test" if path.stem[-1] in "01" else "train", label)
            split.mkdir(parents=True, exist_ok=True)
            path.rename(split / name)
            few = few.replace(f"\n{label}/{name},", f"\n{split.relative_to(folder)}/{name},")
        Path("few.csv").write_text(few)
        shutil.copytree("photos/test", "photos/val")
    pretrained = [parts for parts in commands(text) if here(parts) and parts[1] == "pretrain"]
    made = {part.removeprefix("output=") for parts in pretrained for part in parts[2:4]}
    for name in {*re.findall(r"runs/\w+", text)} - made - {"runs/pretrain"}:  # what the reader has already
        shutil.copytree("runs/pretrain", name)
    for part in re.split(r"(?=```(?:bash|python)\n)", text):
        for parts in filter(here, commands(part)):
            run(small(parts), capsys)
        for block in blocks(part, "python"):
            exec(block, names)


@pytest.mark.slow
def test_the_launch_works(place):
    launched = commands((DOCS / "multi-node.md").read_text())[0]
    command = shlex.join(launched).replace("launch/pretrain.py", str(ROOT / "launch/pretrain.py"))
    command = command.replace("launch/accelerate_configs/multi_gpu.yaml", str(CPU)).replace(" 8 ", " 2 ")
    program = Path(sys.executable).with_name("accelerate")
    done = subprocess.run(
        [program, *shlex.split(command)[1:], *SMALL, "compute.eval_every=null"], timeout=900
    )
    assert done.returncode == 0
    assert Path("runs/vits16/metrics.jsonl").exists()


def test_the_python_of_labels_works(place):
    (kept,) = blocks((DOCS / "start/predict.md").read_text(), "python")
    exec(kept.replace("runs/photos", "runs/pretrain"), names := {})
    assert len(names["found"].labels) == 12
    assert len(pandas.DataFrame(names["found"].columns)) == 32
    assert names["labels"][0] in ("sky", "grass")


def test_the_python_works(place):
    (block,) = blocks((DOCS / "start/python.md").read_text(), "python")
    block += 'prepared = backbone.embed(["a.jpg", "b.jpg"])\n'
    whole = 'recipe="auto", budget={"minutes": 20}'
    assert whole in block
    names = {"small": load(PretrainConfig, None, SMALL)}
    exec(block.replace(whole, "config=small").replace("runs/photos", "runs/python"), names)
    assert names["run"].folder == Path("runs/python")
    assert names["result"].figure.images == 32
    assert names["values"].shape == (32, 32)
    assert np.array_equal(np.stack(names["table"]["embedding"]), names["values"])
    assert list(names["history"]["step"]) == [1, 2]
    assert names["features"].shape == (2, 32)
    assert torch.equal(names["features"], names["prepared"])
    assert names["maps"].shape == (2, 2, 17, 17)
