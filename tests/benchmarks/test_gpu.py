"""What decides on a GPU, rehearsed on a CPU: it runs, and what fails takes nothing else with it."""

import json
import time

import pytest
import torch

from benchmarks import gpu, gpu_table
from benchmarks.input import Photos
from tests.support.image_sets import write_parquet


def bench(folder, seconds=1000.0, on_gpu=False):
    folder.mkdir(exist_ok=True)
    (folder / "gpu.jsonl").touch()
    return gpu.Bench(torch.device("cpu"), on_gpu, folder / "gpu.jsonl", time.monotonic() + seconds)


def rehearse(folder, *arguments):
    assert gpu.main([*arguments, "--device", "cpu", "--out", str(folder)]) == 0
    return gpu_table.read(folder / "gpu.jsonl")


def of_kind(lines, kind):
    return [line["name"] for line in lines if line["kind"] == kind]


@pytest.mark.filterwarnings("ignore")  # what the compiler's own modules warn of
def test_variants_of_a_step_are_measured_in_turn(tmp_path, capsys):
    lines = rehearse(tmp_path, "--seconds", "9999", "--only", gpu.CASES[0].title, "operations")
    steps = [f"{gpu.CASES[0].title}: {variant}" for variant in gpu.VARIANTS]
    assert of_kind(lines, "warmed") == of_kind(lines, "busy") == steps
    rounds = of_kind(lines, "round")
    assert rounds[:10] == steps * 2
    assert {name.partition(",")[0] for name in rounds[10:]} == {
        "blur of 128 views",
        "gradient of a bias of 384",
        "gradient of a bias of 1536",
        "attention over 37 tokens",
    }
    found = gpu_table.summary(lines)
    assert found[steps[0]]["gflop"] > 0
    assert all(found[name]["busy_ms"] > 0 for name in steps)
    assert len(gpu_table.table(lines).split("\n\n")[0].splitlines()) == 2 + len(found)
    assert gpu_table.table(lines) in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # what the compiler's own modules warn of
@pytest.mark.slow
def test_all_cases_and_the_second_call_run_on_a_cpu(tmp_path):
    lines = rehearse(tmp_path / "out", "--seconds", "9999")
    titles = {name.partition(":")[0] for name in of_kind(lines, "busy")}
    assert titles == {case.title for case in gpu.CASES}
    assert of_kind(lines, "process") == ["tests"]
    photos = Photos(80, 40).files
    for part, own in (("train", photos[:40]), ("test", photos[40:])):
        files = {f"{number % 2}/{part}-{number}.jpg": data for number, data in enumerate(own)}
        write_parquet(tmp_path / f"{part}.parquet", files, classes="01")
    lines = rehearse(tmp_path / "out", "confirm", "--seconds", "9999", "--data", str(tmp_path))
    names = ["tests", "jpegs", "vit_tiny", "vit_tiny, k-NN", "timm:resnet18", "timm:resnet18, k-NN"]
    ended = {line["name"]: line["rc"] for line in lines if line["kind"] == "process"}
    assert ended == {"tests": 0, **dict.fromkeys(names[1:], 0)}


def test_the_fastest_compiled_variant_of_the_first_step_is_taken_for_larger_ones(tmp_path, monkeypatch):
    ours = bench(tmp_path)
    first = gpu.CASES[0].title
    for name, ms in (("plain", 1.0), ("blocks", 3.0), ("networks", 2.0)):
        for number in range(2):
            ours.add("round", f"{first}: {name}", number=number, ms=ms, host_ms=ms, peak_mib=0.0)
    built = []

    def build(bench, variant, changes, images):
        built.append(variant)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "build_step", build)
    gpu.measure_steps(ours, gpu.CASES[2], None)
    assert built == ["plain", "networks"]
    errors = [line for line in gpu_table.read(ours.path) if line["kind"] == "error"]
    assert [error["said"] for error in errors] == ["RuntimeError: out of memory"] * 2


def test_what_takes_too_long_is_ended_and_what_has_no_time_is_left_out(tmp_path):
    ours = bench(tmp_path / "slow", on_gpu=True)
    with ours.attempt("slow", 0.01):
        time.sleep(60)
    (error,) = gpu_table.read(ours.path)
    assert (error["kind"], error["said"]) == ("error", "TimeoutError: it took too long")
    late = bench(tmp_path / "late", seconds=0.0)
    gpu.measure_steps(late, gpu.CASES[0], None)
    assert of_kind(gpu_table.read(late.path), "left out") == [
        f"{gpu.CASES[0].title}: {variant}" for variant in gpu.VARIANTS
    ]


def test_the_table_says_how_long_the_gpu_is_idle_and_what_share_of_its_peak_is_reached():
    name = f"{gpu.CASES[0].title}: plain"
    lines = [{"kind": "round", "name": name, "ms": ms, "host_ms": 9, "peak_mib": 8000} for ms in (40, 50, 44)]
    lines.append({"kind": "warmed", "name": name, "images": 64, "warm_s": 3, "gflop": 4356})
    lines.append({"kind": "busy", "name": name, "busy_ms": 33.0, "kernels": 1200})
    lines.append({"kind": "error", "name": "another", "said": "out of memory"})
    text = gpu_table.table(json.loads(json.dumps(lines)))
    assert f"| {name} | 1,455 | 44.000, 25% | 9.00 | 25% | 10% | 8000 | 3 s |" in text
    assert "out of memory" in text
