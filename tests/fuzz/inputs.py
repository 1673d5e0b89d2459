"""Hostile inputs: each function makes one in a folder from random numbers, and returns a command on it."""

import io
import json
import os
import random
import shutil
import string
import struct
import tempfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save

from dino_vit.cli import COMMANDS, config_class, main
from dino_vit.config.settings import settings_of
from dino_vit.models.vit import VisionTransformer
from dino_vit.weights.export import save_backbone
from tests.support import image_sets
from tests.support.images import broken_files
from tests.support.runs import arguments

Input = Callable[[random.Random, Path], list[str]]

NUMBERS = (0, 1, -1, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1)
WORDS = ("", "nan", "-1", "1e999", "9" * 5000, "null", "[]", "{}", "é", "\u202e", "\x1b[2J", "a" * 5000, "\0")


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Change some bytes: flipped, cut, doubled, zeroed, or numbers made huge."""
    content = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        change = rng.choice([flip, cut, end, double, noise, number, digits])
        change(rng, content, rng.randrange(len(content) + 1), rng.choice([1, 2, 4, 8, 64, 1000]))
    return bytes(content)


def flip(rng: random.Random, content: bytearray, start: int, length: int) -> None:
    for place in range(start, min(start + length, len(content))):
        content[place] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, content: bytearray, start: int, length: int) -> None:
    del content[start : start + length]


def end(rng: random.Random, content: bytearray, start: int, length: int) -> None:
    del content[start:]


def double(rng: random.Random, content: bytearray, start: int, length: int) -> None:
    content[start:start] = content[start : start + length] * rng.choice([1, 1, 200])


def noise(rng: random.Random, content: bytearray, start: int, length: int) -> None:
    content[start : start + length] = rng.choice([bytes(length), rng.randbytes(length)])


def number(rng: random.Random, content: bytearray, start: int, length: int) -> None:
    kind = rng.choice("HIQ")
    value = rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(kind))
    content[start : start + struct.calcsize(kind)] = struct.pack(rng.choice("<>") + kind, value)


def digits(rng: random.Random, content: bytearray, start: int, length: int) -> None:
    if places := [place for place, byte in enumerate(content) if byte in b"0123456789"]:
        place = rng.choice(places)
        content[place : place + 1] = str(rng.choice(NUMBERS)).encode()


@cache
def good_images() -> dict[str, bytes]:
    """Return images of every format by suffix, and files that only begin as images do."""
    files = {**image_sets.FILES, **broken_files()}
    return {f"{number}{Path(name).suffix}": data for number, (name, data) in enumerate(files.items())}


def images(rng: random.Random, folder: Path) -> list[str]:
    """Make a folder of images, most of them damaged, with names of any bytes."""
    letters = string.ascii_letters.encode() + b" \n\x1b\xff\xc3\xa9'\"$<&[]{}%,;=#"
    for _ in range(rng.randrange(1, 4)):
        name, data = rng.choice(list(good_images().items()))
        place = os.fsencode(folder / "images" / rng.choice("ab"))
        os.makedirs(place, exist_ok=True)
        stem = bytes(rng.choice(letters) for _ in range(rng.randrange(1, 12)))
        with open(place + b"/" + stem + os.fsencode(Path(name).suffix), "wb") as file:
            file.write(mutated(rng, data) if rng.random() < 0.8 else data)
    return ["inspect-data", str(folder / "images"), "sheet=null"]


@cache
def good_containers() -> dict[str, bytes]:
    """Return archives, tables and arrays of images."""
    array = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        image_sets.write_tar(root / "a.tar")
        image_sets.write_zip(root / "a.zip")
        image_sets.write_parquet(root / "a.parquet")
        np.save(root / "a.npy", array)
        np.savez(root / "a.npz", array)
        np.savez_compressed(root / "b.npz", array)
        return {path.name: path.read_bytes() for path in root.iterdir()}


def containers(rng: random.Random, folder: Path) -> list[str]:
    """Make a damaged archive, table or array."""
    name, data = rng.choice(sorted(good_containers().items()))
    (folder / name).write_bytes(mutated(rng, data))
    return ["inspect-data", str(folder / name), "sheet=null"]


def lists(rng: random.Random, folder: Path) -> list[str]:
    """Make a list of images, or a file of labels, of strange text."""
    image_sets.write_folder(folder)
    names = [*image_sets.NAMES, "../a.png", "/dev/zero", "none.png", "a\0b.png", *WORDS]
    pieces = [
        *names,
        ",",
        '"',
        "'",
        "\t",
        " " * 1000,
        "\n",
        "\r",
        "name,label",
        "name",
        "label",
        "0",
        "[",
        "{",
    ]
    lines = ["".join(rng.choices(pieces, k=rng.randrange(6))) for _ in range(rng.randrange(30))]
    text = rng.choice(
        [
            "\n".join(lines),
            "name,label\n" + "\n".join(f"{rng.choice(names)},{rng.choice(names)}" for _ in range(9)),
            json.dumps({rng.choice(names): rng.choice([0, 1.5, None, [], "cat", {}]) for _ in range(9)}),
            json.dumps([{"name": rng.choice(names), "label": rng.choice(names)}, rng.choice(names)]),
            "[" * rng.choice([10, 100_000]) + "1",
        ]
    )
    data = text.encode(rng.choice(["utf-8", "utf-8", "utf-16", "latin-1"]), "replace")
    path = folder / rng.choice(["list.txt", "list.csv", "list.json"])
    path.write_bytes(mutated(rng, data) if rng.random() < 0.3 else data)
    if path.suffix == ".txt" or rng.random() < 0.3:
        return ["inspect-data", str(path), "sheet=null"]
    return ["inspect-data", str(folder / "cat"), f"labels={path}", "sheet=null"]


@cache
def good_weights() -> dict[str, bytes]:
    """Return the weights of a small network, in each kind of file."""
    torch.manual_seed(0)
    model = VisionTransformer(image_size=16, patch_size=8, width=64, depth=1, heads=1)
    tensors = model.state_dict()
    with tempfile.TemporaryDirectory() as name:
        save_backbone(model, Path(name) / "ours.safetensors")
        found = {"ours.safetensors": (Path(name) / "ours.safetensors").read_bytes()}
    for title, content in {"plain.pth": tensors, "teacher.pth": {"teacher": tensors, "epoch": 3}}.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        found[title] = buffer.getvalue()
    return {**found, "plain.safetensors": save(tensors)}


def weights(rng: random.Random, folder: Path) -> list[str]:
    """Make a damaged file of weights; in one without a digest mostly the description is damaged."""
    name, data = rng.choice(sorted(good_weights().items()))
    if name == "plain.safetensors" and rng.random() < 0.8:
        length = struct.unpack("<Q", data[:8])[0]
        header = mutated(rng, data[8 : 8 + length])
        data = struct.pack("<Q", len(header)) + header + data[8 + length :]
    elif name != "plain.safetensors" or rng.random() < 0.5:
        data = mutated(rng, data)
    (folder / name).write_bytes(data)
    more = [f"image_size={rng.choice(NUMBERS)}"] if rng.random() < 0.2 else []
    return ["inspect-weights", str(folder / name), "heads=1", *more]


def settings(rng: random.Random, folder: Path) -> list[str]:
    """Make settings of wrong types, signs and sizes, for a command that prints them."""
    command = rng.choice(sorted(COMMANDS))
    known = settings_of(config_class(command))
    needed = [f"{key}={'timm' if info.choices else 'photos'}" for key, info in known.items() if info.required]
    tags = (
        "!!bool x",
        "!!timestamp x",
        "!!python/object:os.system x",
        "*a",
        "&a [*a]",
        "? x",
        "0x1F",
        "1_000",
    )
    values = [*map(str, NUMBERS), *WORDS, *tags, "true", "1.5", "-1.5", "[1, 2]", "[[]]", "{a: 1}", "a: b"]
    values += ["1e30", "9223372036854775807", "auto", "photos", "[1, a, null]", "2026-01-01", "~", "%", "@"]
    given = [f"{rng.choice(sorted(known))}={rng.choice(values)}" for _ in range(rng.randrange(1, 5))]
    if rng.random() < 0.3:
        path = folder / "config.yaml"
        path.write_bytes(mutated(rng, "\n".join(each.replace("=", ": ", 1) for each in given).encode()))
        given = ["--config", str(path)]
    return ["config", command, *needed, *(each.replace("\0", "") for each in given)]


@cache
def good_run() -> Mapping[str, bytes]:
    """Return the files of a short run, by their paths in its folder."""
    with tempfile.TemporaryDirectory() as name, redirect_stderr(io.StringIO()):
        output = Path(name) / "run"
        assert main(arguments(output, {"budget.steps": 9, "run.eval_every": 1})) == 0
        found = (path for path in output.rglob("*") if path.is_file())
        return {str(path.relative_to(output)): path.read_bytes() for path in sorted(found)}


def runs(rng: random.Random, folder: Path) -> list[str]:
    """Make the folder of a run with a damaged file, and write its page."""
    damaged = rng.choice(["metrics.jsonl", "starts.jsonl", "baseline.json", "config.yaml", "checkpoint"])
    for name, data in good_run().items():
        path = folder / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        hit = name == damaged or (damaged == "checkpoint" and path.suffix == ".safetensors")
        path.write_bytes(mutated(rng, data) if hit else data)
    return ["report", str(folder / "run"), "images=50"]


def remove(folder: Path) -> None:
    shutil.rmtree(os.fsencode(folder), ignore_errors=True)


KINDS: dict[str, Input] = {
    each.__name__: each for each in (images, containers, lists, weights, settings, runs)
}
