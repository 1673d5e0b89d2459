"""What README and docs/ say is so: commands parse, settings and files exist, tables and code are tried."""

import json
import re
import shutil
import zipfile
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from accelerate.commands.launch import launch_command_parser
from safetensors import safe_open
from torch.distributed.run import get_args_parser

import dino_vit
from dino_vit.cli import build_parser
from dino_vit.commands import COMMANDS as commands_table
from dino_vit.config.loading import add_config_arguments, config_from, load, parse_arguments, write_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import sections, settings_of
from dino_vit.core.storage import read_tensors
from dino_vit.data.open import open_source
from dino_vit.reports.collapse import DiagnosisName
from dino_vit.reports.metrics import MetricsRecord
from eval.dense import DenseConfig
from tests.support.documents import README, ROOT, blocks, commands, quoted, rows
from tests.support.facts import run_of
from tests.support.image_sets import FILES, NAMES, write_folder, write_parquet, write_tar, write_zip
from tests.support.runs import command_here, run

DOCS = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
PAGES = {path.stem: text for path, text in DOCS.items() if len(path.parts) == 2}
ARCHITECTURE = PAGES.pop("architecture")
COMMANDS = [
    parts
    for text in (*DOCS.values(), README)
    for parts in commands(text)
    if parts[0] not in ("make", "pip") and " ".join(parts) not in ("dino-vit", "dino-vit --version")
]
SETTINGS = settings_of(PretrainConfig)
PROGRAMS = {
    "launch/pretrain.py": "pretrain",
    "launch/slurm/pretrain.sbatch": "pretrain",
    "eval/knn.py": "knn",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a run in it, evaluated, one of its images unreadable, the others embedded."""
    folder = tmp_path_factory.mktemp("docs")
    photos = {f"{name}-{number}.png": FILES[NAMES[0]] for name in ("cat/1", "dog/2") for number in range(20)}
    write_folder(folder / "photos", {**photos, "dog/bad.png": b"no image"})
    settings = {"data.source": folder / "photos", "compute.eval_every": 1, "optim.warmup_epochs": 0.5}
    (folder / "runs").mkdir()
    run(folder / "runs" / "pretrain", {**settings, "compute.trackers": "[tensorboard]"})
    settings = [f"weights={folder / 'runs/pretrain'}", f"cache={folder / 'features'}"]
    command_here("knn", folder / "photos", *settings)
    return folder


@pytest.fixture
def inside(trained, monkeypatch):
    """The folder of the run, with the repository's own files in it, as where one is."""
    monkeypatch.chdir(trained)
    if not Path("configs").exists():
        Path("configs").symlink_to(ROOT / "configs")
    return trained


@pytest.mark.parametrize("parts", COMMANDS, ids=" ".join)
def test_every_command_is_understood(parts, inside):
    if parts[:2] == ["python", "eval/dense.py"]:
        add_config_arguments(parser := ArgumentParser(), DenseConfig)
        config_from(parse_arguments(parser, parts[2:]), DenseConfig)
        return
    program = next((part for part in parts if part in PROGRAMS), None)
    job = PROGRAMS[program] if program else parts[1]
    arguments = parts[parts.index(program or job) + 1 :]
    if parts[:2] == ["accelerate", "launch"]:
        assert launch_command_parser().parse_args(parts[2:]).training_script == program
    elif parts[0] == "torchrun":
        assert get_args_parser().parse_args(parts[1:]).training_script == program
    elif parts[0] in ("srun", "sbatch"):
        assert program
    else:
        assert parts[0] == "dino-vit"
    config_from(parse_arguments(build_parser([job]), [job, *arguments]), commands_table[job].config_class)


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist_and_take_what_is_given(page, trained):
    checkpoint = max((trained / "runs/pretrain/checkpoints").iterdir())
    tensors = {name.split(".backbone.")[-1] for name in read_tensors(checkpoint)[0]} | {"cls.center"}
    found = 0
    for text in quoted(PAGES[page]):
        key, equals, _ = text.partition("=")
        if not re.fullmatch(r"\w+\.\w+", key) or key.split(".")[0] not in sections(PretrainConfig):
            continue
        found += 1
        assert key in SETTINGS or key in tensors, text
        if equals:
            load(PretrainConfig, None, [text])
    assert found >= 3 or page in ("evaluation", "race")  # which are about other commands


def test_the_map_names_every_module():
    _, *parts = re.split(r"\n\*\*`(\w+)/`", ARCHITECTURE.split("\n## ")[2])
    texts = dict(zip(parts[::2], parts[1::2], strict=True))
    folders = {path.name for path in (ROOT / "dino_vit").iterdir() if path.is_dir()} - {"__pycache__"}
    assert texts.keys() == folders
    for package, text in texts.items():
        modules = {path.name for path in (ROOT / "dino_vit" / package).rglob("*.py")}
        named = set(re.findall(r"`(\w+\.py)`", text))
        assert modules - {"__init__.py"} <= named <= modules, package
    paths = re.findall(r"`((?:\w+/)+\w+\.(?:py|md))`", ARCHITECTURE)
    assert len(paths) >= 25
    known = [str(path) for path in (ROOT / "dino_vit").rglob("*.py")]
    missing = [p for p in paths if not (ROOT / p).is_file() and not any(k.endswith(f"/{p}") for k in known)]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", *(str(path) for path in DOCS if path.stem != "architecture")])
def test_files_that_a_page_names_exist(page):
    own = (ROOT / page).read_text()
    named = re.findall(r"\b(?:launch|configs|docs|benchmarks|eval)/[\w/.-]*\w\.\w+", own)
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_recipe_has_our_defaults():
    table = rows(PAGES["recipe"].split("## Line by line")[1].split("\n## ")[0])
    shown = {
        key: default
        for settings, defaults, reference in (row for row in table if len(row) == 3)
        for key, default in zip(quoted(settings), quoted(defaults), strict=True)
        if reference
    }
    assert shown == {key: write_yaml(SETTINGS[key].default) for key in shown}
    own = ("model.width", "model.depth", "model.heads", "model.grad_checkpointing")
    parts = ("model", "head", "views", "augment", "loss", "optim", "teacher")
    assert {key for key in SETTINGS if key.split(".")[0] in parts} - set(own) <= shown.keys()
    assert {"seed", "data.batch_size", "data.mean", "data.std", "budget.epochs"} <= shown.keys()


def test_the_recipe_says_all_that_auto_fills():
    table = PAGES["recipe"].split("What `recipe=auto` fills in")[1].split("\n\n")[2]
    alike = {"size": 100, "likeness": 0.5}
    runs = [run_of("recipe=auto"), run_of("recipe=auto", channels=5), run_of("recipe=auto", **alike)]
    runs.append(run_of("recipe=auto", "views.global_size=48", "budget.steps=1000", **alike))
    runs.append(run_of("recipe=auto", "method=dinov2", "loss.patch_weight=0", "budget.steps=1000"))
    chosen = {key for run in runs for key in run.chosen} - {"data.bits"}
    assert {text for text in quoted(table) if text in SETTINGS} == chosen


def test_what_may_change_is_listed():
    said = PAGES["checkpoints"].split("may change freely:")[1].split("\n\n")[0]
    assert set(quoted(said)) == {key for key, setting in SETTINGS.items() if setting.resumable}


def test_sources_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_folder(Path("photos"), {"cat.jpg": FILES[NAMES[1]], "far/off/dog.png": FILES[NAMES[0]]})
    Path("list.txt").write_text("photos/cat.jpg cat\n")
    Path("list.csv").write_text("path,label\nphotos/cat.jpg,cat\n")
    Path("list.tsv").write_text("path\tlabel\nphotos/cat.jpg\tcat\n")
    for number in range(11):
        write_tar(Path(f"shards/{number:03}.tar"), {f"{number}.png": FILES[NAMES[0]]})
    write_zip(Path("photos.zip"), method=zipfile.ZIP_BZIP2)
    write_parquet(Path("train.parquet"))
    shutil.copy("train.parquet", write_parquet(Path("data/train-0.parquet")))
    np.save("images.npy", np.zeros((3, 20, 20, 2), dtype=np.uint16))
    table = PAGES["data"].split("## Sources")[1].split("\n\n")[2]
    found = {}
    for what, _ in rows(table):
        for spec in quoted(what):
            if not spec.startswith("hf:"):
                found[spec] = open_source(spec.replace("LENGTH", "40").replace("SIZE", "16"))
    lengths = {spec: len(source) for spec, source in found.items()}
    assert len(lengths) == 17
    assert (lengths["photos"], lengths["photos/**/*.png"], lengths["shards"]) == (2, 1, 11)
    assert (lengths["synthetic"], lengths["synthetic:LENGTH:SIZE"]) == (20_000, 40)
    assert {found[f"list.{suffix}"].labels.names for suffix in ("txt", "csv", "tsv")} == {("cat",)}


def test_a_run_folder_holds_what_the_page_says(trained):
    table = PAGES["checkpoints"].split("## A run folder")[1].split("\n\n")[1]
    (path,) = (trained / "runs/pretrain/eval").glob("*knn-*photos-*.json")
    assert json.loads(path.read_text())["weights"]["step"] == 20
    said = {quoted(what)[0].rstrip("/") for what, _ in rows(table)}
    assert {path.name for path in (trained / "runs/pretrain").iterdir()} == said - {
        "report.html",
        "earlier-1",
    }


def test_a_checkpoint_holds_what_the_page_says(trained):
    page = PAGES["checkpoints"].split("## A checkpoint")[1].split("## Resuming")[0]
    path = max((trained / "runs/pretrain/checkpoints").iterdir())
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata.keys() == {"dino_vit", "sha256"}
    named = [(quoted(what), quoted(meaning)) for what, meaning in rows(page)]
    entries = {name for what, _ in named for name in what if "." not in name}
    assert json.loads(metadata["dino_vit"]).keys() == entries
    stars = [name for what, _ in named for name in what if "." in name]
    groups = {name: re.compile(re.escape(name).replace(r"\*", ".+")) for name in stars}
    tensors = read_tensors(path)[0]
    assert all(any(group.fullmatch(name) for group in groups.values()) for name in tensors)
    assert all(any(group.fullmatch(name) for name in tensors) for group in groups.values())
    tensor = re.compile(r"(weight|embed|token|bias|_[vg])$")
    examples = [name for _, meaning in named for name in meaning if tensor.search(name)]
    assert len(examples) >= 8
    assert all(any(name.endswith(f".{example}") for name in tensors) for example in examples)


def test_the_python_runs(inside):
    spaces = []
    for code in blocks(PAGES["checkpoints"], "python"):
        spaces.append({})
        exec(code, spaces[-1])
    assert spaces[0]["metadata"]["step"] == 20
    model = spaces[1]["model"].state_dict()
    assert {f"teacher.backbone.{name}" for name in model} == spaces[0]["teacher"].keys()
    described = json.loads(read_tensors(Path("backbone.safetensors"))[1]["dino_vit"])
    said = PAGES["checkpoints"].split("metadata of `kind`")[1].split("`dino-vit export`")[0]
    assert described.keys() - {"kind"} == set(quoted(said)) - {"backbone"}


def test_the_metrics_page_has_every_field_of_a_record():
    table = DOCS[Path("docs/reference/metrics.md")].split("## During a run")[1]
    named = {name for what, _ in rows(table) for name in quoted(what)}
    assert named == {field.name for field in fields(MetricsRecord)} | {"excess"}


def test_the_site_has_a_page_for_every_command():
    config = (ROOT / "mkdocs.yml").read_text()
    shown = re.findall(r"reference/commands/([\w-]+)\.md", config)
    assert shown == ["index", *commands_table]


def test_environment_variables_are_those_that_are_read():
    table = PAGES["multi-node"].split("## Environment variables")[1].split("##")[0]
    named = {name for what, _ in rows(table) for name in re.findall(r"[A-Z][A-Z_]+", what)}
    code = "".join(path.read_text() for path in (ROOT / "dino_vit").rglob("*.py"))
    assert len(named) >= 10
    of_libraries = {"NCCL_SOCKET_IFNAME", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_CPU"}
    assert {name for name in named if name not in code} == of_libraries


def test_the_pages_name_targets_states_and_functions_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = [parts[1] for parts in commands(README) if parts[0] == "make"]
    assert [target for target in targets if f"\n{target}:" not in makefile] == []
    assert blocks(README, "bash")[0].count("\n") == 2
    assert commands(README)[:2] == [["make", "demo"], ["make", "test"]]
    table = DOCS[Path("docs/start/watch.md")].split("## Diagnoses")[1].split("\n\n")[2]
    assert {state for state, _ in rows(table)} == set(get_args(DiagnosisName))
    named = re.findall(r"\bdino_vit\.(\w+)\(", README + DOCS[Path("docs/start/python.md")])
    assert [name for name in named if not hasattr(dino_vit, name)] == []
