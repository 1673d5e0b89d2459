"""Exports that the disk has no room for: a sentence, and what was there before."""

import os
import subprocess
import sys

from dino_vit import save_backbone
from tests.support.backbones import backbone

# A limit on the size of files stands in for the full disk.
EXPORT = """
import resource, signal, sys
from dino_vit.cli import main
import dino_vit.weights  # whose caches may be larger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
sys.exit(main(["export", "mine.safetensors", sys.argv[1], "--format", sys.argv[2], "--overwrite"]))
"""


def test_a_full_disk_while_exporting_is_a_sentence(tmp_path):
    save_backbone(backbone(), tmp_path / "mine.safetensors")
    (tmp_path / "x.pth").write_text("an older export")
    before = sorted(os.listdir(tmp_path))
    argv = [sys.executable, "-c", EXPORT, "x.pth", "reference"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 2, done.stderr
    assert "dino-vit export: x.pth could not be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert ".x.pth" not in done.stderr, "the name of a temporary file"
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "x.pth").read_text() == "an older export"
