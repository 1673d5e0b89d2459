"""What a command may write: never what it reads, and over a file that exists only with `overwrite=true`."""

import glob
import os
from pathlib import Path

from dino_vit.config.settings import Settings, values
from dino_vit.core.text import plural

RESULTS_FOLDER = "eval"  # in that of a run
RESULTS_VERSION = 2  # of files of results
# The settings of any command that say where it writes.
OUTPUTS = {"output", "out", "classifier", "sheet", "cache"}
FOLDERS = {"weights", "run"}  # and those of folders in which results are, not images
PICTURES = (".png", ".npy")  # what commands write that a folder of images would be read with
LISTS = (".txt", ".csv", ".tsv")


def check_outputs(config: Settings, *paths: Path) -> None:
    """Raise for an output that cannot be written, that is read, or that exists without `overwrite=true`."""
    for path in paths:
        folder = next((parent for parent in path.parents if os.path.lexists(parent)), path.parent)
        if not folder.is_dir():
            raise ValueError(f"{path} cannot be written: {folder} is not a folder; give another output")
        if os.path.lexists(path) and not os.path.isfile(path):
            raise ValueError(f"{path} is not a file; give the name of a file as output")
    existing = [path for path in paths if os.path.exists(path)]
    for key, value in values(config).items():
        name = key.rpartition(".")[2]
        texts = value if isinstance(value, tuple) else (value,)
        for text in texts if existing and name not in OUTPUTS else ():
            if isinstance(text, str) and (read := _read_by(text, existing, name in FOLDERS)):
                raise ValueError(f"{read} would be replaced, but {key}={text} is read; give another output")
    if existing and not getattr(config, "overwrite", False):
        more = f", with {plural(len(existing) - 1, 'other file')}" if len(existing) > 1 else ""
        it = "them" if more else "it"
        raise ValueError(
            f"{existing[0]} already exists{more}; give overwrite=true to replace {it}, or another output"
        )


def _read_by(text: str, paths: list[Path], has_results: bool) -> Path | None:
    """Return the first of some files that a setting names, or a folder, a pattern or a list of images."""
    pictures = [path for path in paths if path.suffix in PICTURES]
    if os.path.isdir(text):
        folder = Path(text).resolve()
        inside = (path for path in pictures if folder in path.resolve().parents)
        return None if has_results else next(inside, None)
    if Path(text).suffix in LISTS and os.path.isfile(text):
        listed = Path(text).read_bytes()
        if path := next((path for path in pictures if os.fsencode(path.name) in listed), None):
            return path
    identities = {os.stat(path)[1:3]: path for path in paths}  # inode and device, whatever the spelling
    matches = [text] if os.path.exists(text) else filter(os.path.exists, glob.iglob(text))
    return next((identities[key] for match in matches if (key := os.stat(match)[1:3]) in identities), None)
