import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dino_vit
from dino_vit.cli import build_parser, main
from dino_vit.commands import COMMANDS, Command
from dino_vit.config.loading import config_from, load, parse_arguments
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import settings_of
from tests.support.runs import ROOT, SETTINGS, arguments, steps

SMALL = [
    "data.source=synthetic:64:32",
    *("model.arch=null", "model.width=32", "model.depth=1", "model.heads=2", "model.patch_size=8"),
    *("head.prototypes=64", "head.hidden_dim=16", "views.global_size=32", "views.local_size=16"),
]


@pytest.mark.parametrize(
    "command", [[str(Path(sys.executable).with_name("dino-vit"))], [sys.executable, "-m", "dino_vit"]]
)
def test_the_console_command_and_the_module_are_the_same(command):
    shown = subprocess.check_output([*command, "--version"], text=True)
    assert shown == f"dino-vit {dino_vit.__version__}\n"


def python(code):
    return subprocess.check_output([sys.executable, "-c", code], text=True).strip()


def test_the_package_shows_its_public_names_and_imports_them_when_used():
    code = "import sys, dino_vit; print(dir(dino_vit) == dino_vit.__all__, 'torch' in sys.modules)"
    assert python(code) == "True False"
    assert all(callable(getattr(dino_vit, name)) for name in dino_vit.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'vit_gigantic'"):
        dino_vit.vit_gigantic  # noqa: B018


def test_help_and_mistakes_of_every_command_need_no_torch():
    code = (
        "import contextlib, io, sys\n"
        "from dino_vit.cli import main\n"
        "from dino_vit.commands import COMMANDS\n"
        "for command in ([name] for name in COMMANDS):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main([*command, '--help'])\n"
        "    with contextlib.redirect_stderr(io.StringIO()):\n"
        "        assert main([*command, 'no_such_setting=1']) == 2\n"
        "with contextlib.redirect_stderr(io.StringIO()):\n"
        "    assert main(['pretrain', 'loss.teacher_temp=0.3']) == 2\n"
        "print(sorted({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
    )
    assert python(code) == "[]"


def test_without_arguments_it_shows_first_commands_that_parse(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [shlex.split(line, comments=True) for line in lines if line.startswith("  dino-vit")]
    assert [name for _, name, *_ in shown] == [
        "demo",
        "inspect-data",
        "pretrain",
        "report",
        "label",
        "predict",
    ]
    for _, name, *rest in shown:
        config_from(parse_arguments(build_parser([name]), [name, *rest]), COMMANDS[name].config_class)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_settings_with_a_meaning_and_a_function(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.partition("settings and their defaults:")[2].splitlines())
    shown = "".join(text.split())
    cls = COMMANDS[name].config_class
    meanings = [info.meaning for info in settings_of(cls).values()]
    assert all(meanings)
    assert all("".join(each.split()) in shown for each in (cls.__doc__, *cls.examples, *meanings))
    assert all(f"{key}=" in shown for key in settings_of(cls))
    assert "Undefined" not in shown
    assert callable(COMMANDS[name].run)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect-weights", "none.pth"], "none.pth does not exist"),
        (["pretrain", "a", "b", "c"], "'c' on the command line is not key=value; write settings as"),
        (["knn", "photos", "weihgts=a"], "weihgts is not a setting; did you mean weights?"),
        (["knn", "photos"], "dino-vit knn: weights is missing: run folder, weights file, "),
        (["knn", "photos", "a", "k=[]"], "k = []: must have at least 1 item"),
        (["pretrain", "model=vit_small"], "model is not a setting; did you mean model.arch?"),
    ],
)
def test_mistakes_are_a_message_and_exit_code_2(argv, message, capsys):
    assert main(argv) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown
    assert main(["--traceback", *argv]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert message.removeprefix("dino-vit knn: ") in shown


def test_what_is_given_may_be_nearly_something_that_exists(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("photos/a.png", "labels.csv", "best.pth", "runs/photos/config.yaml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    for argv, meant in (
        (["inspect-data", "photo"], "'photo' does not exist; did you mean photos?"),
        (
            ["inspect-data", "photos", "labels=lables.csv"],
            "lables.csv does not exist; did you mean labels.csv?",
        ),
        (["inspect-weights", "bets.pth"], "bets.pth does not exist; did you mean best.pth?"),
        (["report", "runs/photo"], "there is no such folder; did you mean runs/photos?"),
        (
            ["pretrain", "--config", "runs/photos/conf.yaml", "photos", "runs/a"],
            "did you mean runs/photos/config",
        ),
    ):
        assert main(argv) == 2
        assert meant in capsys.readouterr().err


def test_a_mistyped_command_leads_to_its_name(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["pretrian", "photos"])
    assert "there is no command pretrian; did you mean pretrain?" in capsys.readouterr().err


FULL = "unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory\nmore"), 2, "out of memory: use a smaller batch, "),
        (RuntimeError("DataLoader worker (pid 7) died. "), 75, "DataLoader worker (pid 7) died. If memory "),
        (RuntimeError("DataLoader worker: Bus error."), 2, "DataLoader worker: Bus error. Give more "),
        (RuntimeError(f"In a worker\nRuntimeError: {FULL}\n"), 2, f"RuntimeError: {FULL}. Give more shared "),
    ],
)
def test_memory_that_runs_out_is_a_sentence(error, code, message, monkeypatch, capsys):
    def run(*_):
        raise error

    monkeypatch.setattr(Command, "run", run)
    assert main(["report", "run"]) == code
    shown = capsys.readouterr().err
    assert shown.startswith(f"dino-vit report: {message}")
    assert shown.count("\n") == 1


def test_a_signal_while_libraries_are_imported_asks_for_another_start(monkeypatch, capsys):
    monkeypatch.setattr(Command, "run", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    for command in (["pretrain", "photos"], ["demo"]):
        assert main(command) == 75
        assert "stopped; run the same command again" in capsys.readouterr().err


def test_config_prints_settings_that_load_back(tmp_path, capsys):
    settings = ["data.source=my photos", "optim.lr=1e-3", "budget.steps=100", "init.weights=a.pth"]
    assert main(["config", "pretrain", *settings]) == 0
    printed = capsys.readouterr().out
    assert "# peak learning rate" in printed
    (tmp_path / "a.yaml").write_text(printed)
    assert load(PretrainConfig, tmp_path / "a.yaml") == load(PretrainConfig, None, settings)
    as_option = ["--optim.lr", "1e-3", *(text for text in settings if not text.startswith("optim.lr"))]
    for options in (["--config", str(tmp_path / "a.yaml")], as_option):
        assert main(["config", "pretrain", *options]) == 0
        assert capsys.readouterr().out == printed
    assert main(["config", "pretrain", "recipe=auto", "data.source=photos"]) == 0
    (tmp_path / "a.yaml").write_text(capsys.readouterr().out)
    config = load(PretrainConfig, tmp_path / "a.yaml")
    assert config.given == {"recipe", "data.source"}, "the recipe still chooses the others"


def test_an_option_may_be_written_as_its_setting():
    argv = ["pretrain", "--data.batch_size", "32", "--data.max-pixels=9"]
    config = config_from(parse_arguments(build_parser(argv), argv), PretrainConfig)
    assert (config.data.batch_size, config.data.max_pixels) == (32, 9)


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_run_needs_no_standard_streams(tmp_path, closed):
    """Some cron closes them: the log is lost, the run is not."""
    command = [sys.executable, "-m", "dino_vit", *arguments(tmp_path / "run", {"data.workers": 1})]
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *command], cwd=ROOT)
    assert ended.returncode == 0
    assert steps(tmp_path / "run")[-1] == 20


def test_a_program_without_standard_streams_can_train(tmp_path):
    script = tmp_path / "train.py"
    call = f"dino_vit.pretrain(output={str(tmp_path / 'run')!r}, **{SETTINGS!r})"
    script.write_text(f"import dino_vit\n\n{call}\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, str(script)]
    assert subprocess.run(command, env=environ).returncode == 0
    assert steps(tmp_path / "run")[-1] == 20
