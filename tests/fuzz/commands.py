"""A generator of hostile weights, tried by the command that reads them."""

import io
import struct
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save

from dino_vit.cli import main
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights import save_backbone
from tests.fuzz import damage


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
