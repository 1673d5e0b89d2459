"""The first minutes on a GPU, rehearsed: its parts run, and one that fails or is killed leaves the others."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.gpu_profile import union
from benchmarks.gpu_record import Record
from benchmarks.gpu_summary import H200_FIGURES, page

STEP = {"kind": "step", "name": "ViT-S/16, DINO, 64 images", "images_s": 3675.0, "ms": 20.0, "ms_host": 9.0}


def rehearse(folder, *parts, seconds):
    command = [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--seconds", str(seconds)]
    command += ["--out", str(folder), "--parts", *parts]
    done = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True)
    lines = Record(folder / "results.jsonl").lines()
    assert not [line for line in lines if line["kind"] == "error"]
    assert done.returncode == 0, done.stdout + (folder / "log.txt").read_text()
    assert done.stdout.endswith((folder / "summary.md").read_text() + "\n")
    return lines


def of_kind(lines, *kinds):
    return [line["name"] for line in lines if line["kind"] in kinds]


def test_facts_and_steps_are_measured_on_a_cpu(tmp_path):
    lines = rehearse(tmp_path, "facts", "steps", seconds=5000)
    assert of_kind(lines, "part") == ["facts", "steps"]
    assert len(of_kind(lines, "machine")) == len(of_kind(lines, "host")) == 1
    assert (len(of_kind(lines, "product")), len(of_kind(lines, "attention"))) == (9, 5)
    assert len(set(of_kind(lines, "step"))) == 10
    names = {(line["kind"], line["name"]) for line in lines}
    measured = [what for what in H200_FIGURES if what.kind in ("copy", "host", "product", "step")]
    assert names >= {(what.kind, what.name) for what in measured if "nothing compiled" not in what.name}
    assert "A rehearsal on a CPU" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_all_other_parts_run_on_a_cpu(tmp_path):
    lines = rehearse(tmp_path, "profile", "compiled", "input", "cifar10", seconds=1000)
    assert of_kind(lines, "part") == ["profile", "compiled", "input", "cifar10"]
    assert (len(of_kind(lines, "profile")), len(of_kind(lines, "compiled"))) == (3, 5)
    assert len(of_kind(lines, "loader")) == 3
    assert of_kind(lines, "cifar10") == ["CIFAR-10, vit_tiny", "CIFAR-10, timm:resnet18"]
    assert "ms of operations in a step of" in (tmp_path / "profile.txt").read_text()


def test_a_part_is_killed_with_its_processes_and_what_it_measured_is_kept(tmp_path, monkeypatch):
    program = (
        "import os, time\n"
        "if not os.fork(): time.sleep(1000)\n"
        f'print({json.dumps(STEP)!r}, \'{{"kind": "step", "na\', sep=\'\\n\', flush=True)\n'
        "time.sleep(1000)\n"
    )
    reading, writing = os.pipe()
    with open(reading, encoding="utf-8") as pipe:
        lines = []

        class Measured(subprocess.Popen):
            """A process whose limit is over once it has measured."""

            def wait(self, timeout=None):
                if timeout != 3:
                    return super().wait(timeout)
                lines.append(pipe.readline())
                raise subprocess.TimeoutExpired(self.args, timeout)

        with monkeypatch.context() as patches:
            patches.setattr(gpu.subprocess, "Popen", Measured)
            assert gpu.killed_after(3, [sys.executable, "-c", program], os.environ, writing) is None
        exits = [sys.executable, "-c", "raise SystemExit(3)"]
        assert gpu.killed_after(1000, exits, os.environ, writing) == 3
        os.close(writing)
        lines += pipe  # which ends when all processes have ended
    (tmp_path / "results.jsonl").write_text("".join(lines))
    assert Record(tmp_path / "results.jsonl").lines() == [STEP]


def test_parts_that_fail_or_have_no_time_take_no_other_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.Part(f"benchmarks:{name}", 100) for name in "abc"})
    status = {"a": 1, "b": None, "c": 0}

    def ended(limit, command, environ, log):
        return status[command[command.index("--only") + 1]]

    monkeypatch.setattr(gpu, "killed_after", ended)
    record = Record(tmp_path / "results.jsonl")
    assert gpu.run(["a", "b", "c"], record, 100, {})
    assert not gpu.run(["c", "b"], record, 100, {})
    assert [line["ended"] for line in record.lines()] == [
        "failed with 1",
        "killed at its limit",
        "done",
        "done",
        "killed at its limit",
    ]
    gpu.run(["a"], record, gpu.KEPT + gpu.SHORTEST - 1, {})
    assert (record.lines()[-1]["kind"], record.lines()[-1]["name"]) == ("left out", "a")


def test_the_summary_sets_measurements_beside_those_of_an_h200():
    attention = {"kind": "attention", "name": "shape", "chosen_is": "cudnn_attention", "fastest": "flash"}
    attention |= {name: {"both_us": us} for name, us in (("chosen", 40), ("flash", 30), ("cudnn", 41))}
    compiled = {"kind": "compiled", "name": "ViT-S/16, DINO, 64 images, blocks compiled"}
    compiled |= {"ms": 15.0, "ms_host": 9.0, "compile_s": 20.0, "images_s": 4266.0}
    text = page([STEP, attention, compiled, {"kind": "error", "name": "a part", "said": "of this"}])
    assert "| step: ViT-S/16, DINO, 64 images, images/s | 903 | 3675 | 4.07 |" in text
    assert "flash is faster than cuDNN" in text
    assert "| 20 | 15 | 4,000 |" in text  # 20 s by 5 ms a step
    assert "- error: a part: of this" in text
    assert "not measured" in text
    assert "faster than cuDNN" not in page([{**attention, "flash": {"both_us": 42}}])


def test_an_error_is_written_down_and_the_next_measurement_is_made(tmp_path):
    record = Record(tmp_path / "results.jsonl")
    with record.attempt("step", "a"):
        raise RuntimeError("out of memory")
    with record.attempt("step", "b"):
        record.add("step", "b", ms=1.0)
    first, second = record.lines()
    assert (first["kind"], first["name"], first["said"]) == (
        "error",
        "step: a",
        "RuntimeError: out of memory",
    )
    assert (second["name"], second["ms"]) == ("b", 1.0)


def test_time_in_which_kernels_overlap_counts_once():
    assert union([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
