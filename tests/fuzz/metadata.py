"""Weights whose tensors are good and whose metadata is odd: own files, exports, and folders of the hub."""

import io
import json
import math
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.storage import OWN_KEY, write_tensors
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import load_backbone, save_backbone
from dino_vit.weights.export import export_backbone
from dino_vit.weights.hub import CONFIG, PROCESSOR
from dino_vit.weights.read_file import EXPORT_KEY
from tests.fuzz import damage
from tests.fuzz.commands import command

Tree = dict[str, Any]
Sample = tuple[dict[str, Tensor], dict[str, Tree]]  # tensors, and what is stated of them by its place
MARKER = "executed"  # a file that code in the metadata would write, if it ran
CODE = f"open({MARKER!r}, 'w')"
CODES = [CODE, f"\n{CODE}\n#", f"'); {CODE} #", f'"""\n{CODE}', "{{ 7 * 7 }}", "{x!r}"]
MARKUP = ["<script>alert(1)</script>", "[a](http://b)", "# a", "`|`", "a\n# b"]
INTS = [-(2**63), -1, 0, 1, 2, 3, 16, 64, 224, 65_536, 65_537, 10**9, 2**63, 10**400]
FLOATS = [math.nan, math.inf, -math.inf, 1e308, -0.5, 1e-320, 0.5, 1.5, 16.0]
NESTED = [[], {}, [[]], {"a": 1}, [1], [1, 2], [16, 16], [224, 224], [0.5] * 3, [0] * 3, [math.nan] * 3]
NESTED += [[0.5] * 4, ["a"] * 3, [1] * 1000, [CODE] * 3, {"height": -1, "width": "a"}, [None] * 3]
ODD: list[Any] = [None, True, False, *INTS, *FLOATS, *NESTED, *CODES, *MARKUP, *damage.TEXTS]
KNOWN = ["bicubic", "bilinear", "whole", "crop", "learned", "rotary", "gelu", "swiglu", "timm", "test_resnet"]
DEEP = 100  # lists in lists
SIZE = {"image_size": 16, "patch_size": 8, "width": 64, "depth": 1, "heads": 1}
ROTARY = {"layer_scale": 1.0, "positions": "rotary"}
EXPORTS = {"timm": {}, "reference": {}, "timm rotary": ROTARY}
HUB = {"hub vit": {}, "hub dinov2": {"layer_scale": 1.0}, "hub dinov3": ROTARY}
TIMM = "test_vit", "test_resnet"


@cache
def samples() -> dict[str, Sample]:
    """Return good weights of each kind."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        return _of_us(Path(name)) | _of_the_hub(Path(name)) | _of_timm(Path(name))


def _of_us(folder: Path) -> dict[str, Sample]:
    """Return what our files hold: a backbone, a checkpoint and exports."""
    path = folder / "own.safetensors"
    known: Tree = {"mean": (0.1,) * 3, "std": (0.2,) * 3, "bits": 8, "range": (0.0, 9.0), "step": 3}
    config = PretrainConfig().model_dump(mode="json")
    save_backbone(_backbone(), path, **known, network="teacher", config=config)
    tensors, stated = load_file(path), _stated(path, OWN_KEY)
    both = {f"{net}.backbone.{n}": t.clone() for net in ("teacher", "student") for n, t in tensors.items()}
    made: dict[str, Sample] = {"own": (tensors, {OWN_KEY: stated})}
    made["checkpoint"] = both, {OWN_KEY: {**stated, "kind": "checkpoint", "best": None}}
    for title, changes in EXPORTS.items():
        model, written = _backbone(**changes), folder / f"{title}.safetensors"
        model.provenance = load_backbone(path, verbose=False).provenance
        export_backbone(model, written, title.split()[0])
        made[title] = load_file(written), {EXPORT_KEY: _stated(written, EXPORT_KEY)}
    return made


def _of_the_hub(folder: Path) -> dict[str, Sample]:
    """Return folders as transformers writes them."""
    made = dict[str, Sample]()
    for title, changes in HUB.items():
        export_backbone(_backbone(**changes), folder / title, "huggingface")
        texts = {name: (folder / title / name).read_text() for name in (CONFIG, PROCESSOR)}
        stated = {name: json.loads(text) for name, text in texts.items()}
        made[title] = load_file(folder / title / "model.safetensors"), stated
    return made


def _of_timm(folder: Path) -> dict[str, Sample]:
    """Return models of timm, in folders of the hub and in files of ours."""
    made = dict[str, Sample]()
    for name in TIMM:
        tensors = timm.create_model(name, num_classes=0).state_dict()
        stated: Tree = {"input_size": [3, 160, 160], "crop_pct": 0.95, "interpolation": "bicubic"}
        stated |= {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_mode": "center", "first_conv": "conv1"}
        config = {"architecture": name, "model_args": {}, "pretrained_cfg": stated}
        made[f"timm {name}"] = tensors, {CONFIG: config}
        own = {f"model.{key}": tensor for key, tensor in tensors.items()}
        architecture = {"name": name, "image_size": 160, "channels": 3, "drop_path": 0.0, "num_classes": 0}
        made[f"own {name}"] = own, {OWN_KEY: {"kind": "backbone", "version": 1, "architecture": architecture}}
    return made


def _backbone(**changes: Any) -> VisionTransformer:
    return VisionTransformer(**{**SIZE, **changes})


def _stated(path: Path, key: str) -> Tree:
    with safe_open(path, "pt") as file:
        stated: Tree = json.loads(file.metadata()[key])
    return stated


def metadata(rng: Random, folder: Path) -> Callable[[], object]:
    """Odd metadata, which is inspected, exported or loaded."""
    tensors, good = samples()[rng.choice(sorted(samples()))]
    stated = json.loads(json.dumps(good))
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        spoil(rng, stated)
    path = write(rng, folder, tensors, stated)
    return lambda: use(rng, path, folder)


def spoil(rng: Random, tree: Tree) -> None:
    """Change, remove or add a value anywhere in the metadata."""
    place: Any = tree[rng.choice(sorted(tree))]
    while rng.random() > 0.4 and (
        inside := [value for value in place.values() if value and type(value) is dict]
    ):
        place = rng.choice(inside)
    others = ["preparation", "size", "name", "unknown", *damage.TEXTS] if rng.random() < 0.2 else []
    key = rng.choice([*place, *others])
    if rng.random() < 0.1:
        place.pop(key, None)
        return
    value: Any = rng.choice([*ODD, *KNOWN])
    if rng.random() < 0.05:
        for _ in range(DEEP):
            value = [value]
    if key == "preparation" or rng.random() < 0.05:
        names = ["shorter_side", "resize_mode", "interpolation", "size", "pixels", "x"]
        value = {name: rng.choice([*ODD, *KNOWN]) for name in rng.sample(names, 2)}
    place[key] = value


def write(rng: Random, folder: Path, tensors: dict[str, Tensor], stated: dict[str, Tree]) -> Path:
    """Write a file or a folder with these metadata, and a digest that is right."""
    path = folder / "w.safetensors"
    if OWN_KEY in stated:
        write_tensors(path, tensors, json.dumps(stated[OWN_KEY]))
    elif EXPORT_KEY in stated and rng.random() < 0.5:
        save_file(tensors, path, {EXPORT_KEY: json.dumps(stated[EXPORT_KEY])})
    elif EXPORT_KEY in stated:
        plain, path, buffer = OrderedDict(tensors), folder / "w.pth", io.BytesIO()
        text = json.dumps(stated[EXPORT_KEY])
        vars(plain)[EXPORT_KEY] = rng.choice([text, text, stated[EXPORT_KEY]])
        torch.save(plain, buffer)
        path.write_bytes(buffer.getvalue())
    else:
        path = folder / "hub"
        path.mkdir()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        for name, content in stated.items():
            (path / name).write_text(json.dumps(content))
    return path


def use(rng: Random, path: Path, folder: Path) -> None:
    """Do what people do with weights; no code in what they state may run meanwhile."""
    format = rng.choice(["inspect", "load", "timm", "reference", "huggingface"])
    if format == "inspect":
        more = rng.choice([[], ["as_json=true"], [f"image_size={rng.choice([16, 32, 160])}"]])
        command(["inspect-weights", str(path), *more])
    elif format == "load":
        model = load_backbone(path, verbose=False)
        if max(model.transform.size) <= 512 and (model.transform.shorter_side or 0) < 2000:
            model.embed(np.zeros((20, 30, model.channels), np.uint8))
    else:
        suffix = "" if format == "huggingface" else ".pth"
        command(["export", str(path), str(folder / f"out{suffix}"), f"format={format}"])
    executed = [str(each) for each in (Path(MARKER), folder / MARKER) if each.exists()]
    assert not executed, f"code in the metadata ran: {executed}"
