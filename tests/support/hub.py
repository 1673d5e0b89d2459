"""A cache of the Hugging Face Hub on a machine without a network."""

from pathlib import Path

import pytest
from huggingface_hub import constants

COMMIT = "a" * 40


def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def snapshot(cache: Path, repository: str) -> Path:
    """Make the folder of a repository in a cache, and return that of its files."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    files = folder / "snapshots" / COMMIT
    files.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    return files
