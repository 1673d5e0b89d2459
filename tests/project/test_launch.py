import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from dino_vit.core.runtime import adopt_slurm
from tests.support.documents import ROOT, commands

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


@pytest.mark.parametrize(
    ("name", "kind", "processes"),
    [
        ("cpu", "MULTI_GPU", 2),
        ("single_gpu", "NO", 1),
        ("multi_gpu", "MULTI_GPU", -1),
        ("multi_node", "MULTI_GPU", -1),
        ("fsdp", "FSDP", -1),
    ],
)
def test_accelerate_takes_the_config(name, kind, processes):
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type.value == kind
    assert config.num_processes == processes  # -1: accelerate insists on --num_processes
    assert config.mixed_precision is None
    assert config.num_machines == (2 if name == "multi_node" else 1)
    assert config.use_cpu == (name == "cpu")


# Stand-ins for SLURM's commands and for the program, which says what it got and does as its environment asks.
SRUN = """
import json, os, signal, subprocess, sys
at = sys.argv.index("python")
options, command = sys.argv[1:at], sys.argv[at:]
tasks = [
    subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)})
    for n in range(int(os.environ["SLURM_NTASKS"]))
]
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
open("srun", "w").write(json.dumps(options))
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print({"node[07-08]": "node07\\nnode08", "node07": "node07"}[sys.argv[3]])
else:
    open("requeued", "a").write(" ".join(sys.argv[1:]))
    sys.exit(int(os.environ.get("REFUSE_REQUEUE", "0")))
"""
PYTHON = """
import json, os, signal, sys, time
signals = []
signal.signal(signal.SIGUSR1, lambda *_: signals.append("USR1"))
names = [name for name in os.environ if name.startswith(("SLURM_", "MASTER_"))]
said = {"argv": sys.argv[1:], **{name: os.environ[name] for name in names}}
file = "task" + os.environ["SLURM_PROCID"]
open(file + ".part", "w").write(json.dumps(said))
os.rename(file + ".part", file)
code = int(os.environ.get("PROGRAM_CODE", "-1"))
deadline = time.monotonic() + 600
while code < 0 and time.monotonic() < deadline:
    time.sleep(0.02)
    if signals:
        time.sleep(0.2)  # saving
        code = 75
sys.exit(code)
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the batch script as SLURM would."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, source in {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON}.items():
        (commands / name).write_text(f"#!{sys.executable} -IS\n{source}")
        (commands / name).chmod(0o755)

    jobs = []

    def start(*arguments, tasks=2, **environment):
        job = {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "70012",
            "SLURM_JOB_NODELIST": "node[07-08]",
            "SLURM_NTASKS": str(tasks),
            "SLURM_CPUS_PER_TASK": "6",
        }
        command, environment = ["bash", BATCH_SCRIPT, *arguments], {**job, **environment}
        with open(tmp_path / "log", "w") as log:
            jobs.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


def test_the_batch_script_hands_arguments_and_places_to_every_task(start, tmp_path):
    assert start(*ARGUMENTS, PROGRAM_CODE="0").wait(600) == 0
    for number in range(2):
        said = json.loads((tmp_path / f"task{number}").read_text())
        assert said["argv"] == ["launch/pretrain.py", *ARGUMENTS]
        assert said["SLURM_PROCID"] == said["SLURM_LOCALID"] == str(number)
        assert said["SLURM_NTASKS"] == "2"
        assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("node07", "20012")
    assert json.loads((tmp_path / "srun").read_text())[:2] == ["--cpus-per-task", "6"]
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("code", "seconds", "refused", "left_with", "requeued"),
    [
        (2, 700, False, 2, False),
        (137, 0, False, 137, False),
        (137, 700, False, 0, True),
        (75, 0, True, 75, True),
    ],
)
def test_what_is_saved_or_was_killed_later_goes_back_into_the_queue(
    start, tmp_path, code, seconds, refused, left_with, requeued
):
    job = start(PROGRAM_CODE=str(code), REFUSE_REQUEUE=str(int(refused)), SECONDS=str(seconds))
    assert job.wait(600) == left_with
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 70012"


def test_a_signal_reaches_the_program_which_saves_and_is_requeued(start, tmp_path):
    job = start()
    deadline = time.monotonic() + 600
    while not all((tmp_path / name).exists() for name in ("srun", "task0", "task1")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    job.send_signal(signal.SIGUSR1)  # once more while it saves
    assert job.wait(600) == 0
    assert (tmp_path / "requeued").read_text() == "requeue 70012"
    assert "back into the queue" in (tmp_path / "log").read_text()


def test_the_batch_script_asks_slurm_for_what_it_needs():
    assert {
        "--open-mode": "append",
        "--requeue": "",
        "--signal": "B:USR1@120",
    }.items() <= directives().items()


def directives():
    """Return the options of the batch script."""
    lines = [line.split()[1] for line in BATCH_SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def submitted():
    """Yield the options and the arguments of the program of each `sbatch` and `srun` that is documented."""
    text = (ROOT / "docs/multi-node.md").read_text() + re.sub(
        "(?m)^#   (.*)", r"```bash\n\1\n```", BATCH_SCRIPT.read_text()
    )
    for program, *words in commands(text):
        if program in ("sbatch", "srun"):
            script = next(at for at, word in enumerate(words) if word.startswith("launch/"))
            options = dict(zip(words[0:script:2], words[1:script:2], strict=False))
            yield (directives() if program == "sbatch" else {}) | options, words[script + 1 :]


def test_every_job_has_as_many_tasks_as_gpus():
    jobs = [options for options, _ in submitted()]
    assert len(jobs) >= 6
    assert [job for job in jobs if job["--ntasks-per-node"] != job["--gpus-per-node"]] == []


def test_one_node_with_four_gpus_is_four_local_processes(start, tmp_path):
    options, arguments = next(job for job in submitted() if job[0]["--nodes"] == "1")
    tasks = int(options["--ntasks-per-node"])
    job = {"SLURM_JOB_NODELIST": "node07", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(tasks)}
    job |= {"SLURM_STEP_TASKS_PER_NODE": str(tasks), "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node07"}
    assert start(*arguments, tasks=tasks, PROGRAM_CODE="0", **job).wait(600) == 0
    assert tasks == 4
    for number in range(tasks):
        environ = json.loads((tmp_path / f"task{number}").read_text())
        assert environ["argv"] == ["launch/pretrain.py", *arguments]
        adopt_slurm(environ)
        assert (environ["RANK"], environ["LOCAL_RANK"]) == (str(number), str(number))
        assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]) == ("4", "4")
        assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("node07", "20012")
