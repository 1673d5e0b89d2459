"""A generator of outputs that collide with what a command reads, and with files of others in its folder."""

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fuzz.commands import command, good_run, good_weights
from tests.support.images import saved, smooth

PHOTOS = ("photos/cat/a.png", "photos/cat/b.png", "photos/dog/c.png", "photos/dog/d.png", "query.png")
TEXTS = {
    "photos/labels.json": '{"a.png": "cat"}',
    "labels.csv": "path,label\ncat/a.png,x\ncat/b.png,y\ndog/c.png,x\ndog/d.png,y\n",
    "few.csv": "path,label\ncat/a.png,x\ndog/c.png,y\n",
    "list.txt": "photos/cat/a.png\nphotos/dog/d.png\n",
    "notes.txt": "dino-vit wrote features of these",
    "config.yaml": "k: 2\n",
}
STEMS = (
    "photos",
    "query",
    "labels",
    "e",
    "out",
    "list",
    "maps/sheet-1",
    "maps/sheet-7",
    "maps/0-cat-a",
    "maps/1-knn",
    "maps/comparison",
)
SUFFIXES = (
    ".json",
    ".png",
    ".csv",
    ".parquet",
    ".safetensors",
    ".html",
    ".overlay.png",
    ".attention.npy",
)
COMMANDS: dict[str, tuple[str, str]] = {  # with the setting of what it writes, and how that ends
    "knn photos w.safetensors k=1": ("output", ".json"),
    "knn photos w.safetensors k=1 labels=labels.csv": ("output", ".json"),
    "linear photos w.safetensors steps=2 rates=[0.1] labels=labels.csv": ("output", ".json"),
    "predict photos w.safetensors labels=few.csv": ("output", ".csv"),
    "predict photos w.safetensors labels=few.csv output=new.csv": ("head", ".safetensors"),
    "embed list.txt w.safetensors": ("output", ".parquet"),
    "inspect-data photos": ("sheet", ".png"),
    "report run images=4": ("output", ".html"),
    "attention photos w.safetensors size=16": ("output", "/"),
    "attention list.txt w.safetensors size=16": ("output", "/"),
    "export w.safetensors format=timm": ("out", ".pth"),
    "compare photos w.safetensors untrained measures=[knn]": ("output", "/"),
    "pack photos": ("output", "/"),
}


def outputs(rng: Random, folder: Path) -> Callable[[], object]:
    """A command whose output is what it reads, or a file or a link that was there."""
    files = {name: saved(smooth("RGB"), "PNG") for name in PHOTOS}
    files |= {name: text.encode() for name, text in TEXTS.items()}
    files |= {f"run/{name}": data for name, data in good_run().items()}
    files |= {"w.safetensors": good_weights()["ours.safetensors"]}
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    places = [stem + suffix for stem in STEMS for suffix in SUFFIXES]
    for place in rng.sample(places, rng.randrange(8, 30)):
        _put(rng, folder / place, folder / rng.choice(sorted(files)))
    line = rng.choice(sorted(COMMANDS))
    key, ending = COMMANDS[line]
    chosen = [place for place in (*places, *files) if place.endswith(ending)] or [
        "maps",
        "photos",
        ".",
        "out",
    ]
    spelt = rng.choice(["{}", "./{}", "maps/../{}", f"{folder}/{{}}"]).format(rng.choice(chosen))
    argv = [*line.split(), f"{key}={spelt}"]
    return lambda: _check(folder, argv, twice=rng.random() < 0.3)


def _put(rng: Random, place: Path, target: Path) -> None:
    """Put a file of someone else, or a link, where a command may write."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(place):
        return
    match rng.randrange(4):
        case 0:
            os.link(target, place)
        case 1:
            place.symlink_to(rng.choice([target, target.name, "nowhere"]))
        case _:
            place.write_bytes(target.read_bytes() if target.suffix == ".png" else rng.randbytes(20))


def _check(folder: Path, argv: list[str], *, twice: bool) -> None:
    """Run a command in the folder, perhaps twice; whatever was there stays as it was."""
    before, home = _seen(folder), os.getcwd()
    os.chdir(folder)
    try:
        for _ in range(1 + twice):
            command(argv)
    finally:
        os.chdir(home)
        after = _seen(folder)
        changed = [name for name, seen in before.items() if seen != after.get(name)]
        assert not changed, f"{' '.join(argv)} changed {changed[0]}"


def _seen(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Return the target of each link, and the bytes of each file."""
    found = {}
    for path in folder.rglob("*"):
        link = os.readlink(path) if path.is_symlink() else ""
        # What a link leads to is seen by its own name; a new file may have that of one that led nowhere.
        found[str(path.relative_to(folder))] = link, path.read_bytes() if path.is_file() and not link else b""
    return found
