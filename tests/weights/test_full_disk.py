"""Exports that the disk has no room for: a sentence, and what was there before."""

import os
import subprocess
import sys

import pytest

from dino_vit import save_backbone
from tests.support.backbones import backbone

# A limit on the size of files stands in for the full disk.
EXPORT = """
import resource, signal, sys
from dino_vit.cli import main
import dino_vit.weights, timm, transformers, torchvision  # whose caches may be larger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(["export", "mine.safetensors", sys.argv[1], "--format", sys.argv[2], "--overwrite"]))
"""


@pytest.mark.parametrize(
    ("out", "format"),
    [("x.pth", "reference"), ("x.safetensors", "timm"), ("x.pth", "torchvision"), ("x", "huggingface")],
)
def test_a_full_disk_while_exporting_is_a_sentence(tmp_path, out, format):
    save_backbone(backbone(), tmp_path / "mine.safetensors")
    if format == "torchvision":
        (tmp_path / out).write_text("an older export")
    before = sorted(os.listdir(tmp_path))
    argv = [sys.executable, "-c", EXPORT, out, format]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert f"dino-vit export: {out} could not be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert f".{out}" not in done.stderr, "the name of a temporary file"
    assert sorted(os.listdir(tmp_path)) == before
    if format == "torchvision":
        assert (tmp_path / out).read_text() == "an older export"
