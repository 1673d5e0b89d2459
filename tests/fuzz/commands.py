"""Generators of hostile weights, settings and run folders: each is tried by the command that reads it."""

import io
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save

from dino_vit.cli import main
from dino_vit.commands import COMMANDS
from dino_vit.config.settings import settings_of
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import save_backbone
from tests.fuzz import damage
from tests.support.runs import arguments


def command(argv: list[str]) -> None:
    """Run a command; raise what it says as a ValueError if it refuses, as an error if it fails."""
    errors = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(errors):
        code = main(argv)
    text = errors.getvalue().strip()
    if code == 2:
        raise ValueError(text.replace("\n  - ", " "))
    if code:
        raise AssertionError(text)


@cache
def good_weights() -> dict[str, bytes]:
    """Return the weights of a small network, in each kind of file."""
    torch.manual_seed(0)
    model = VisionTransformer(image_size=16, patch_size=8, width=64, depth=1, heads=1)
    tensors = model.state_dict()
    with tempfile.TemporaryDirectory() as name:
        save_backbone(model, Path(name) / "ours.safetensors")
        files = {"ours.safetensors": (Path(name) / "ours.safetensors").read_bytes()}
    for title, content in {"plain.pth": tensors, "teacher.pth": {"teacher": tensors, "epoch": 3}}.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        files[title] = buffer.getvalue()
    return {**files, "plain.safetensors": save(tensors)}


def weights(rng: Random, folder: Path) -> Callable[[], object]:
    """A damaged file of weights; in one without a digest mostly the description is damaged."""
    name, data = rng.choice(sorted(good_weights().items()))
    if name == "plain.safetensors" and rng.random() < 0.8:
        length = struct.unpack("<Q", data[:8])[0]
        header = damage.damaged(rng, data[8 : 8 + length])
        data = struct.pack("<Q", len(header)) + header + data[8 + length :]
    elif name != "plain.safetensors" or rng.random() < 0.5:
        data = damage.damaged(rng, data)
    (folder / name).write_bytes(data)
    more = [f"image_size={rng.choice(damage.EDGES)}"] if rng.random() < 0.2 else []
    return lambda: command(["inspect-weights", str(folder / name), "heads=1", *more])


def settings(rng: Random, folder: Path) -> Callable[[], object]:
    """Settings of wrong types, signs and sizes, for a command that prints them."""
    name = rng.choice(sorted(COMMANDS))
    known = settings_of(COMMANDS[name].config_class)
    needed = [f"{key}={'timm' if info.choices else 'photos'}" for key, info in known.items() if info.required]
    yaml = "!!bool x|!!timestamp x|*a|&a [*a]|? x|~|true|1.5|-1.5|[1, 2]|[[]]|{a: 1}|1e30|auto|2026-01-01"
    values = [*map(str, damage.EDGES), *damage.TEXTS, *yaml.split("|")]
    given = [f"{rng.choice(sorted(known))}={rng.choice(values)}" for _ in range(rng.randrange(1, 5))]
    if rng.random() < 0.3:
        path = folder / "config.yaml"
        text = "\n".join(each.replace("=", ": ", 1) for each in given)
        path.write_bytes(damage.damaged(rng, text.encode(errors="replace")))
        given = ["--config", str(path)]
    argv = ["config", name, *needed, *(each.replace("\0", "") for each in given)]
    return lambda: command(argv)


@cache
def good_run() -> Mapping[str, bytes]:
    """Return the files of a short run, by their paths in its folder."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "run"
        command(arguments(output, {"budget.steps": 9, "compute.eval_every": 1}))
        found = (path for path in output.rglob("*") if path.is_file())
        return {str(path.relative_to(output)): path.read_bytes() for path in sorted(found)}


def _damaged_run(rng: Random, folder: Path) -> Path:
    """Write the run with one damaged file, which may be its newest checkpoint."""
    newest = max(name for name in good_run() if name.endswith(".safetensors"))
    damaged = rng.choice(["metrics.jsonl", "starts.jsonl", "baseline.json", "config.yaml", newest])
    for name, data in good_run().items():
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(damage.damaged(rng, data) if name == damaged else data)
    return folder / "run"


def runs(rng: Random, folder: Path) -> Callable[[], object]:
    """The folder of a run with a damaged file, of which the page is written."""
    output = _damaged_run(rng, folder)
    return lambda: command(["report", str(output), "images=50"])


def resumes(rng: Random, folder: Path) -> Callable[[], object]:
    """The folder of a run in which a file is damaged, and which goes on."""
    output = _damaged_run(rng, folder)
    changed = {"budget.steps": 10, "compute.eval_every": 1, "compute.resume": rng.choice(["auto", "changed"])}
    return lambda: command(arguments(output, changed))
