import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from tests.support.documents import ROOT
from tests.support.runs import arguments, steps

CONFIGS = ROOT / "launch" / "accelerate_configs"
BATCH_SCRIPT = ROOT / "launch" / "slurm" / "pretrain.sbatch"
ARGUMENTS = ["--config", "a b.yaml", "data.source=/my photos/*", "views.global_scale=[0.4, 1]", 'quo"te$HOME']


def test_pretrain_is_the_console_command(monkeypatch):
    called = []
    monkeypatch.setattr("dino_vit.cli.main", lambda argv: called.append(argv) or 75)
    monkeypatch.setattr(sys, "argv", ["launch/pretrain.py", *ARGUMENTS])
    with pytest.raises(SystemExit, match="75"):
        runpy.run_path(str(ROOT / "launch" / "pretrain.py"), run_name="__main__")
    assert called == [["pretrain", *ARGUMENTS]]
    runpy.run_path(str(ROOT / "launch" / "pretrain.py"), run_name="__mp_main__")  # as a spawned worker does
    assert len(called) == 1


@pytest.mark.parametrize(("name", "kind"), [("multi_gpu", "MULTI_GPU"), ("fsdp", "FSDP")])
def test_accelerate_takes_the_config(name, kind):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type.value == kind
    assert config.num_processes == -1  # accelerate insists on --num_processes
    assert (config.num_machines, config.mixed_precision, config.use_cpu) == (1, None, False)


# Stand-ins for SLURM's commands: each node is a task on this machine.
SRUN = """
import json, os, subprocess, sys
at = sys.argv.index("bash")
nodes = [
    subprocess.Popen(sys.argv[at:], env={**os.environ, "SLURM_NODEID": str(n)})
    for n in range(int(os.environ["SLURM_NNODES"]))
]
open("srun.part", "w").write(json.dumps({"options": sys.argv[1:at], "nodes": [node.pid for node in nodes]}))
os.rename("srun.part", "srun")
sys.exit(max(abs(node.wait()) for node in nodes))
"""
SCANCEL = """
import json, os, signal, sys
assert sys.argv[1:] == ["--signal=TERM", "70012"]
for node in json.load(open("srun"))["nodes"]:
    os.kill(node, signal.SIGTERM)
"""
SCONTROL = """
import sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("127.0.0.1\\nnode08")
else:
    open("requeued", "a").write(" ".join(sys.argv[1:]))
"""
# And for the launcher, which says what it got and does as its environment asks.
ACCELERATE = """
import json, os, signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append("TERM"))
file = "node" + os.environ["SLURM_NODEID"]
open(file + ".part", "w").write(json.dumps(sys.argv[1:]))
os.rename(file + ".part", file)
code = int(os.environ.get("PROGRAM_CODE", "-1"))
deadline = time.monotonic() + 600
while code < 0 and time.monotonic() < deadline:
    time.sleep(0.02)
    if signals:
        time.sleep(0.2)  # saving
        code = 1
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the batch script as SLURM would."""
    commands = tmp_path / "bin"
    commands.mkdir()
    stubs = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL, "accelerate": ACCELERATE}
    for name, source in stubs.items():
        (commands / name).write_text(f"#!{sys.executable} -IS\n{source}")
        (commands / name).chmod(0o755)
    jobs = []

    def start(*arguments, **environment):
        job = {
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "70012",
            "SLURM_JOB_NODELIST": "node[07-08]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_CPUS_PER_TASK": "32",
        }
        command, environment = ["bash", BATCH_SCRIPT, *arguments], {**job, **environment}
        with open(tmp_path / "log", "w") as log:
            jobs.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


def test_the_batch_script_starts_a_launcher_on_every_node(start, tmp_path):
    assert start(*ARGUMENTS, PROGRAM_CODE="0").wait(600) == 0
    for number in range(2):
        said = json.loads((tmp_path / f"node{number}").read_text())
        args = launch_command_parser().parse_args(said[1:])
        assert said[0] == "launch"
        assert (args.training_script, args.training_script_args) == ("launch/pretrain.py", ARGUMENTS)
        assert (args.num_machines, args.num_processes, args.machine_rank) == (2, 8, number)
        assert (args.main_process_ip, args.main_process_port) == ("127.0.0.1", 20012)
    assert json.loads((tmp_path / "srun").read_text())["options"][:2] == ["--cpus-per-task", "32"]
    assert not (tmp_path / "requeued").exists()


def test_a_run_that_fails_is_not_requeued(start, tmp_path):
    assert start(PROGRAM_CODE="2").wait(600) == 2
    assert not (tmp_path / "requeued").exists()


def test_a_run_whose_time_is_over_saves_and_is_requeued(start, tmp_path):
    job = start()
    wait_for(tmp_path / "srun", tmp_path / "node0", tmp_path / "node1")
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)  # once more while it saves
    assert job.wait(600) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 70012"
    assert "back into the queue" in (tmp_path / "log").read_text()


def wait_for(*paths):
    deadline = time.monotonic() + 600
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_two_nodes_train_save_and_resume(start, tmp_path):
    """Two launchers on this machine, over gloo, by the lines of the script."""
    (tmp_path / "bin" / "accelerate").unlink()
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    settings = {"budget.steps": 5000, "compute.checkpoint_every": 100000, "compute.log_every": 1}
    own = {"SLURM_GPUS_ON_NODE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run, said = tmp_path / "run", ""
    for _ in range(2):
        before = steps(run) if run.exists() else []
        job = start(*arguments(run, settings)[1:], **own)
        deadline = time.monotonic() + 600
        while not (run / "metrics.jsonl").exists() or (before and "resuming after step" not in said):
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
            said = (tmp_path / "log").read_text()
        (tmp_path / "log").write_text("")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(600) == 0
        assert (tmp_path / "requeued").exists()
        assert steps(run)[-1] >= max(before, default=1)
    assert "2 processes on cpu" in said
    assert f"resuming after step {before[-1]}" in said
