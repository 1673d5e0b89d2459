import os
import socket
import subprocess

import pytest
import torch

import dino_vit.core.runtime
from dino_vit.core.runtime import (
    adopt_slurm,
    check_trackers,
    choose_interface,
    choose_precision,
    cores_of_a_process,
    first_host,
)

STEP = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "123456"}


def adopted(**environ):
    taken = {**STEP, **environ}
    adopt_slurm(taken)
    return {name: value for name, value in taken.items() if not name.startswith("SLURM_")}


def test_srun_is_adopted():
    assert adopted(SLURM_STEP_NUM_TASKS="8", SLURM_STEP_NODELIST="gpu[003-004]") == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": str(10_000 + 123456 % 20_000),
    }


@pytest.mark.parametrize(
    ("environ", "local"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}, "4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, "4"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, "3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1(x10)", "SLURM_NODEID": "5"}, "1"),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}, "8"),
        ({"SLURM_TASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "2"}, "2"),
        ({"SLURM_NTASKS_PER_NODE": "4"}, "4"),
        ({}, None),
    ],
)
def test_the_tasks_of_a_node_are_the_local_processes(environ, local):
    taken = adopted(SLURM_STEP_NUM_TASKS="11", SLURM_STEP_NODELIST="gpu[1-3]", **environ)
    assert taken.get("LOCAL_WORLD_SIZE") == local


# On a node of 64 cores with tasks of srun, as documented: bound to their cores or not.
@pytest.mark.parametrize(
    ("cores", "environ", "expected"),
    [
        (64, {"SLURM_CPUS_ON_NODE": "64"}, 16),
        (16, {"SLURM_CPUS_ON_NODE": "64"}, 16),
        (1, {"SLURM_CPUS_ON_NODE": "4"}, 1),
        (64, {}, 16),
        (64, {"SLURM_CPUS_PER_TASK": "12", "SLURM_CPUS_ON_NODE": "64"}, 12),
        (12, {"SLURM_CPUS_PER_TASK": "12", "SLURM_CPUS_ON_NODE": "48"}, 12),
    ],
)
def test_a_task_of_srun_has_its_share_of_the_cores(monkeypatch, cores, environ, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    taken = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}
    adopt_slurm(taken)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**taken, **environ}.items():
        monkeypatch.setenv(name, value)
    assert cores_of_a_process(8) == expected


def test_a_host_that_is_called_127_0_1_1_is_reached_by_its_default_route(monkeypatch):
    try:
        route = subprocess.run(["ip", "route", "show", "default"], capture_output=True, text=True, check=True)
        expected = {"GLOO_SOCKET_IFNAME": route.stdout.split(" dev ")[1].split()[0]}
    except (OSError, subprocess.CalledProcessError, IndexError):
        pytest.skip("no default route that `ip` knows")
    for address, given, found in (
        ("127.0.1.1", {}, expected),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "ib0"}, {"GLOO_SOCKET_IFNAME": "ib0"}),
        ("10.0.0.5", {}, {}),
    ):
        monkeypatch.setattr(socket, "gethostbyname", lambda _, address=address: address)
        environ = dict(given)
        choose_interface(environ)
        assert environ == found


def test_what_stands_in_the_environment_wins_over_slurm():
    taken = adopted(SLURM_NTASKS="8", MASTER_ADDR="here", MASTER_PORT="1")
    assert (taken["MASTER_ADDR"], taken["MASTER_PORT"], taken["WORLD_SIZE"]) == ("here", "1", "8")
    assert adopted(SLURM_NTASKS="8", RANK="3") == {"RANK": "3"}


def test_a_single_task_or_a_batch_script_is_no_launch():
    assert adopted(SLURM_NTASKS="1") == {}
    assert adopted() == {}
    assert adopted(SLURM_NTASKS="8", SLURM_STEP_NUM_TASKS="1") == {}, "the step counts, not the job"
    outside_of_srun = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    before = dict(outside_of_srun)
    adopt_slurm(outside_of_srun)
    assert outside_of_srun == before


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu1", "gpu1"),
        ("a,b", "a"),
        ("gpu[003-005,9],login", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("rack[1-2]-cluster.org,x[1-3]", "rack1-cluster.org"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


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
        ({"SLURM_CPUS_PER_TASK": "6"}, 16, 6),
        ({"SLURM_CPUS_PER_TASK": "64"}, 16, 8),
        ({"SLURM_CPUS_PER_TASK": "8", "LOCAL_WORLD_SIZE": "4"}, 16, 2),
        ({"SLURM_CPUS_ON_NODE": "64", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, 16, 2),
    ],
)
def test_a_process_has_its_share_of_the_cores(monkeypatch, environ, processes, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
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
