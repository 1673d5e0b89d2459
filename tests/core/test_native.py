import os
import platform
import re
import subprocess
import sys

import pytest

from tests.support.images import broken_files, picture, saved, smooth, tiff, write_synthetic
from tests.support.runs import TINY, command

NOISE = re.compile("Corrupt JPEG|<tifffile|<TiffTag|Warning")
# Python's own line comes through, as does the system's afterwards.
SCRIPT = """
import os, sys
from dino_vit.core.native import separate_stderr, silenced, write_to_stderr
{start}
with silenced(), silenced():
    os.write(2, b"native inside;")
    print("python;", end="", file=sys.stderr, flush=True)
    write_to_stderr(b"signal;")
    if not os.fork():
        os.write(2, b"child;")
        os._exit(0)
    os.wait()
os.write(2, b"native after")
"""


@pytest.mark.parametrize(
    ("start", "written"),
    [
        ("separate_stderr()", "python;signal;child;native after"),
        ("", "native inside;python;signal;child;native after"),
    ],
)
def test_only_native_lines_inside_are_dropped_where_python_has_its_own_stderr(start, written):
    code = SCRIPT.format(start=start)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == written


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Images that libraries have much to say about, and some that are fine."""
    folder = tmp_path_factory.mktemp("damaged")
    jpeg, plain = saved(smooth("RGB", (60, 60)), "JPEG"), saved(smooth("RGB"), "TIFF")
    zipped = tiff(picture(20, 30, 3), compression="zlib")
    files = {"gap.jpg": jpeg[:-60] + bytes(40) + jpeg[-2:], **broken_files()}
    for number in range(8, 120, 6):
        files[f"tag{number}.tif"] = plain[:-number] + b"\xff" + plain[1 - number :]
        files[f"zip{number}.tif"] = zipped[:number] + b"\xff\xff" + zipped[number + 2 :]
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for number in range(20):
        write_synthetic(folder / f"{number}.png", number, size=24)
    return folder


def test_inspection_says_nothing_but_what_it_found(damaged, tmp_path):
    said = command(tmp_path / "log", "inspect-data", damaged, "sheet=null")
    assert NOISE.findall(said) == []
    assert said.startswith(f"{damaged}: {len(list(damaged.iterdir()))} images")
    assert said.splitlines()[-1].startswith("    and ")


@pytest.mark.parametrize("workers", [0, 1])
def test_so_does_pretraining(damaged, tmp_path, workers):
    settings = {**TINY, "budget.steps": 5, "optim.warmup_epochs": 0, "data.max_unreadable": 1}
    settings |= {"data.source": damaged, "data.workers": workers, "output": tmp_path / "run"}
    said = command(tmp_path / "log", "pretrain", *(f"{key}={value}" for key, value in settings.items()))
    assert NOISE.findall(said) == []
    assert len((tmp_path / "run" / "unreadable.txt").read_text().splitlines()) > 5


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again_and_not_cleared_by_the_system():
    script = """
import resource, statistics, torch
from dino_vit.core.native import keep_freed_memory
{call}
pages = []
for _ in range(50):  # a piece that fits is found after a few
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    pages.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median(pages))
"""

    def pages(call: str) -> float:
        command = [sys.executable, "-c", script.format(call=call)]
        small_pages = {**os.environ, "THP_MEM_ALLOC_ENABLE": "0"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=small_pages)
        return float(done.stdout)

    assert pages("keep_freed_memory()") < 100 < 1000 < pages("")
