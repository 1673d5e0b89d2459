import os

import pytest
import torch

import dino_vit.core.runtime
from dino_vit.core.runtime import (
    check_trackers,
    choose_precision,
    cores_of_a_process,
)


def test_precision_is_native_bfloat16_or_none(monkeypatch):
    cpu, mps = torch.device("cpu"), torch.device("mps")
    for wanted in ("no", "bf16", "fp16"):
        assert choose_precision(wanted, cpu) == wanted
    for avx, amx, chosen in ((False, False, "no"), (True, False, "bf16"), (False, True, "bf16")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx=avx: avx)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        assert choose_precision("auto", cpu) == chosen
    assert choose_precision("auto", mps) == "no"
    for native, chosen in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation, native=native: native
        )
        assert choose_precision("auto", torch.device("cuda")) == chosen


@pytest.mark.parametrize(
    ("environ", "processes", "cores"),
    [
        ({}, 1, 8),
        ({}, 3, 2),
        ({}, 99, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 16, 2),
    ],
)
def test_a_process_has_its_share_of_the_cores(monkeypatch, environ, processes, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert cores_of_a_process(processes) == cores


def test_trackers_must_be_installed(monkeypatch):
    monkeypatch.setattr(dino_vit.core.runtime, "get_available_trackers", lambda: ["tensorboard"])
    check_trackers(["tensorboard"])
    check_trackers([])
    for name in ("tensorbord", "wandb"):
        with pytest.raises(ValueError, match=rf"{name} is not installed. .* \(tensorboard\)"):
            check_trackers(["tensorboard", name])
