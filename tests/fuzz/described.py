"""Generators of files that are whole, digest and all, but say something odd of themselves."""

import json
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from dino_vit.eval.features.store import weights_digest
from dino_vit.weights import load_backbone
from tests.fuzz import damage
from tests.fuzz.commands import command, good_run, good_weights
from tests.support import embeddings as sample
from tests.support.images import write_synthetic
from tests.support.runs import arguments, rewrite

Action = Callable[[], object]
HUB = {
    "model_type": "vit",
    "architecture": "vit",
    "num_attention_heads": 1,
    "image_size": 16,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu",
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "model_args": {"num_heads": 1},
    "pretrained_cfg": {"input_size": [3, 16, 16], "mean": [0.5] * 3, "std": [0.5] * 3},
}


def edit(rng: Random, path: Path) -> None:
    """Have one of our files say something odd."""

    def change(metadata: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        found = damage.edited(rng, metadata)
        if isinstance(found, dict):
            metadata.clear()
            metadata.update(found)

    rewrite(path, change)


def embed(weights: Path, folder: Path) -> Action:
    """Compute features, which needs all that a file says of its weights."""
    output, cache = folder / "out.npy", folder / "features"
    argv = ["embed", "synthetic:3:16", f"weights={weights}", f"output={output}", f"cache={cache}"]
    return lambda: command([*argv, "precision=no", "readers=1"])


def described(rng: Random, folder: Path) -> Action:
    """A backbone file of ours with odd metadata."""
    path = folder / "ours.safetensors"
    path.write_bytes(good_weights()["ours.safetensors"])
    edit(rng, path)
    return embed(path, folder)


def pickles(rng: Random, folder: Path) -> Action:
    """A state dict of odd strides, types, shapes, attributes or wrappers."""
    (folder / "plain.pth").write_bytes(good_weights()["plain.pth"])
    named: Any = OrderedDict(torch.load(folder / "plain.pth"))
    for name in rng.sample(sorted(named), rng.choice([0, 1, 3])):
        tensor, size = named[name], rng.choice([1, 2**10, 2**17])
        odd = [
            tensor.flatten()[:1].expand(size, size),
            tensor.new_empty(rng.choice([(), (0,), (1, 0, 3), (2,) * 20])),
            tensor.to(rng.choice([torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])),
            tensor.t() if tensor.ndim == 2 else tensor.to_sparse(),
            tensor.to("meta"),
            rng.choice([None, 5, "x", [tensor], {"x": tensor}]),
        ]
        named[name] = rng.choice(odd)
    if rng.random() < 0.5:
        about = {"format": "timm", "heads": 1, "image_size": [16, 16]}
        odd_text = rng.choice([json.dumps(damage.edited(rng, about)), rng.choice(damage.ODD)])
        vars(named).update({rng.choice(["dino_vit_export", "dino_vit", "x"]): odd_text})
    for wrapper in rng.choices(
        ["model", "state_dict", "teacher", "student", "x"], k=rng.choice([0, 0, 1, 20])
    ):
        named = {wrapper: named}
    torch.save(named, folder / "odd.pth")
    return lambda: command(["inspect-weights", str(folder / "odd.pth"), "heads=1"])


def hubs(rng: Random, folder: Path) -> Action:
    """A folder of Hugging Face or timm with an odd config.json."""
    (folder / "hub").mkdir()
    (folder / "hub" / "model.safetensors").write_bytes(good_weights()["plain.safetensors"])
    (folder / "hub" / "config.json").write_text(json.dumps(damage.edited(rng, HUB)))
    return embed(folder / "hub", folder)


@cache
def good_digest() -> str:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "ours.safetensors"
        path.write_bytes(good_weights()[path.name])
        return weights_digest(load_backbone(path))


def embeddings(rng: Random, folder: Path) -> Action:
    """An embedding file that is damaged or says something odd, of which images and duplicates are found."""
    path = folder / f"e.{rng.choice(['npy', 'parquet', 'safetensors'])}"
    (folder / "w.safetensors").write_bytes(good_weights()["ours.safetensors"])
    weights = {"path": f"{folder}/w.safetensors", "sha256": good_digest()}
    whole = {**sample.METADATA, "weights": {**sample.METADATA["weights"], **weights}, "shape": [64]}
    odd = damage.edited(rng, whole)
    sample.write(path, odd if isinstance(odd, dict) and rng.random() < 0.7 else whole, width=64)
    if rng.random() < 0.4:
        hit = rng.choice([each for each in folder.iterdir() if each.stem == "e"])
        hit.write_bytes(damage.damaged(rng, hit.read_bytes()))
    write_synthetic(folder / "a.png", 0, size=16)
    commands = [["duplicates", str(path), "threshold=0.5"], ["search", str(path), str(folder / "a.png")]]
    argv = rng.choice(commands)
    return lambda: command([*argv, f"output={folder / ('d.json' if argv[0] == 'duplicates' else 's.png')}"])


def resumes(rng: Random, folder: Path) -> Action:
    """The folder of a run in which a file is damaged or says something odd, and which goes on."""
    output = folder / "run"
    for name, data in good_run().items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_bytes(data)
    checkpoint = max((output / "checkpoints").iterdir())
    name = rng.choice(
        ["checkpoint", "checkpoint", "metrics.jsonl", "starts.jsonl", "baseline.json", "config.yaml"]
    )
    if name == "checkpoint":
        edit(rng, checkpoint)
    elif name == "config.yaml" or rng.random() < 0.3:
        (output / name).write_bytes(damage.damaged(rng, (output / name).read_bytes()))
    else:
        lines = [json.loads(line) for line in (output / name).read_text().splitlines()]
        lines[-1] = damage.edited(rng, lines[-1])
        (output / name).write_text("\n".join(map(json.dumps, lines)))
    changed = {"budget.steps": 10, "run.eval_every": 1, "run.resume": rng.choice(["auto", "changed"])}
    return lambda: command(arguments(output, changed))
