import fcntl
import math
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
from dataclasses import fields, replace
from io import StringIO

import pytest

from dino_vit.training.diagnosis import LEARNING, STARTING, UNIFORM, Reading
from dino_vit.training.monitor import MetricsFile, Progress, duration
from tests.support.readings import HEALTHY


def test_scalars_are_grouped_and_hold_every_number():
    values = {field.name: 1000.0 + n for n, field in enumerate(fields(Reading))}
    scalars = Reading(**values).scalars()
    assert all(re.fullmatch(r"(loss|teacher|optim|speed|run|eval)/[a-z_]+", name) for name in scalars)
    expected = {v for k, v in values.items() if k not in ("step", "total_steps", "prototypes", "rows")}
    assert set(scalars.values()) == expected | {values["loss"] - math.log(values["prototypes"])}
    assert not {"eval/knn", "eval/rankme"} & set(HEALTHY.scalars())


def test_readings_come_back_from_the_file(tmp_path):
    metrics = MetricsFile(tmp_path / "run", step=0)
    assert metrics.read() == []
    odd = replace(HEALTHY, step=10_050, loss=math.nan, gradient_norm=math.inf, knn=47.5)
    metrics.append(HEALTHY, "learning")
    metrics.append(odd, "non-finite steps")
    first, second = metrics.read()
    assert Reading.from_record(first) == HEALTHY
    assert (first["state"], first["excess"]) == ("learning", HEALTHY.excess)
    assert [second[key] for key in ("loss", "excess", "gradient_norm", "rankme")] == [None] * 4
    back = Reading.from_record(second)
    assert math.isnan(back.loss)
    assert math.isnan(back.gradient_norm)
    assert (back.knn, back.rankme) == (47.5, None)


def written(folder, steps):
    metrics = MetricsFile(folder, step=0)
    for step in steps:
        metrics.append(replace(HEALTHY, step=step), "learning")
    return metrics.path


def test_a_resumed_run_writes_what_it_would_have_written(tmp_path):
    whole = written(tmp_path / "whole", range(50, 501, 50)).read_bytes()
    path = written(tmp_path / "resumed", range(50, 401, 50))
    metrics = MetricsFile(path.parent, step=220)
    assert [record["step"] for record in metrics.read()] == [50, 100, 150, 200]
    for step in range(250, 501, 50):
        metrics.append(replace(HEALTHY, step=step), "learning")
    assert path.read_bytes() == whole
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_a_file_that_needs_no_cut_is_left_alone(tmp_path):
    path = written(tmp_path, [50, 100])
    before = path.stat()
    assert len(MetricsFile(tmp_path, step=100).read()) == 2
    assert path.stat().st_ino == before.st_ino


@pytest.mark.parametrize("length", [1, 20, -1])
def test_a_torn_last_line_is_dropped(tmp_path, length):
    path = written(tmp_path, [50, 100, 150])
    reader = MetricsFile(tmp_path, step=150)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:length])
    assert [record["step"] for record in reader.read()] == [50, 100]
    metrics = MetricsFile(tmp_path, step=1000)
    assert path.read_bytes() == b"".join(lines[:2])
    metrics.append(replace(HEALTHY, step=150), "learning")
    assert [record["step"] for record in metrics.read()] == [50, 100, 150]


@pytest.mark.parametrize("damage", [b"\0\0\0\n", b"[]\n", b'{"epoch": 1}\n', b"\xff\n"])
def test_a_damaged_line_is_dropped_with_a_warning(tmp_path, caplog, damage):
    path = written(tmp_path, [50, 100])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + second)
    assert [record["step"] for record in MetricsFile(tmp_path, step=100).read()] == [50, 100]
    assert "left out" in caplog.text


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    writer = f"""
        from dataclasses import replace
        from pathlib import Path
        from dino_vit.training.monitor import MetricsFile
        from tests.support.readings import HEALTHY
        metrics = MetricsFile(Path({str(tmp_path)!r}), step=0)
        for step in range(1, 10**9):
            metrics.append(replace(HEALTHY, step=step), "learning")
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(writer)], env=environment())
    path = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not path.exists() or path.stat().st_size < 10**5:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    records = MetricsFile(tmp_path, step=10**9).read()
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert len(records) > 100


def environment():
    here = os.path.dirname(__file__)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(here), here]), "FORCE_COLOR": "1"}


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def show_some(progress, clock):
    with progress:
        progress.notice("Resuming runs/demo [at step 1,000].")
        for n, diagnosis in enumerate([STARTING, LEARNING, UNIFORM, UNIFORM, LEARNING], start=1):
            clock.now += 50
            if n == 3:
                progress.saved(1_120)
            for step in range(951 + 50 * n, 1001 + 50 * n):
                progress.advance(step)
            reading = replace(HEALTHY, step=1000 + 50 * n, epoch=n / 4, knn=47.5 if n == 2 else None)
            progress.show(reading, diagnosis)


def test_without_a_terminal_there_are_plain_aligned_lines():
    stream, clock = StringIO(), Clock()
    show_some(Progress(total_steps=125_100, step=1000, stream=stream, clock=clock), clock)
    lines = stream.getvalue().splitlines()
    step = "step   1,050/125,100  epoch   0.2  loss  9.100 (ln K  -1.99)  gap  2.50    2,310 img/s  wait  1%"
    assert lines[0] == "Resuming runs/demo [at step 1,000]."
    assert lines[1] == f"{step}  eta  1d10h  starting"
    assert lines[2].endswith("  learning  k-NN 47.5 %")
    assert lines[3].endswith("  uniform collapse  saved 1,120")
    assert lines[4] == f"step 1,150: uniform collapse. {UNIFORM.advice}"
    assert lines[5].endswith("  uniform collapse")
    assert lines[6].endswith("  learning")
    assert lines[7:] == ["step 1,250: learning again, no more uniform collapse."]
    numbers = [line for line in lines if "img/s" in line]
    assert len({line.index("eta") for line in numbers}) == 1
    assert stream.getvalue().isascii()


def test_the_end_is_estimated_from_the_recent_pace():
    stream, clock = StringIO(), Clock()
    progress = Progress(total_steps=10_000, stream=stream, clock=clock)
    for step in range(100, 10_001, 100):
        clock.now += 100 if step <= 5_000 else 10
        progress.show(replace(HEALTHY, step=step), LEARNING)
    ends = [re.search(r"eta +(\S+)", line)[1] for line in stream.getvalue().splitlines()]
    assert ends[0] == "2h45"
    assert ends[79] == "3m20"
    assert ends[-1] == "0s"


def test_what_came_before_the_first_step_is_not_a_steps_pace():
    stream, clock = StringIO(), Clock()
    progress = Progress(total_steps=1_000, step=200, stream=stream, clock=clock)
    clock.now += 500  # an evaluation
    progress.start_clock()
    clock.now += 100
    progress.show(replace(HEALTHY, step=300), LEARNING)
    assert re.search(r"eta +(\S+)", stream.getvalue())[1] == "11m40"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (45, "45s"), (59.7, "1m00"), (750, "12m30"), (50_520, "14h02"), (284_400, "3d07h")],
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def on_a_terminal(program, *, width=100, stdout=None):
    """Run a program whose stderr, and stdout unless given, is a terminal; return all that it received."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    variables = {**environment(), "TERM": "xterm-256color"}
    variables.pop("COLUMNS", None)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=stdout or theirs,
        stderr=theirs,
        env=variables,
    )
    os.close(theirs)
    received = b""
    try:
        while data := os.read(ours, 65536):
            received += data
    except OSError:  # how Linux reports that the other side was closed
        pass
    finally:
        os.close(ours)
    assert process.wait() == 0
    return received.decode()


def screen(received):
    """Play what a terminal received: lines as they are seen in the end, scrolled-out ones included."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", received):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b"):
            row -= int(token[2:-1])
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return lines


SHOW = """
    import sys
    from dino_vit.training.monitor import Progress
    from tests.training.test_monitor import Clock, show_some
    clock = Clock()
    progress = Progress(total_steps=1250, step=1000, clock=clock)
    show_some(progress, clock)
"""


@pytest.mark.parametrize("width", [60, 110])
def test_on_a_terminal_there_is_one_bar_below_the_notices(width):
    received = on_a_terminal(SHOW, width=width)
    lines = [line for line in screen(received) if line]
    assert max(map(len, lines)) <= width
    *notices, bar, numbers = lines
    assert notices[0] == "Resuming runs/demo [at step 1,000]."
    told = " ".join(line.strip() for line in notices[1:])
    assert told == (
        f"step 1,150: uniform collapse. {UNIFORM.advice} "
        "step 1,250: learning again, no more uniform collapse."
    )
    assert re.fullmatch(r"1,250/1,250  ━+  100%  eta 0s", bar)
    assert numbers.startswith("learning  epoch   1.2  loss  9.100 (ln K  -1.99)")
    assert numbers.endswith("k-NN 47.5 %  saved 1,120" if width == 110 else "…")
    assert received.endswith("\x1b[?25h")  # the cursor is shown again


def test_the_bar_goes_on_between_readings_but_not_at_every_step():
    program = """
        from dino_vit.training.monitor import Progress
        from tests.training.test_monitor import Clock
        clock = Clock()
        with Progress(total_steps=1000, clock=clock) as progress:
            for step in range(1, 1001):
                clock.now += 0.01
                progress.advance(step)
    """
    drawn = set(re.findall(r"[\d,]+/1,000", on_a_terminal(program)))
    assert 15 < len(drawn) < 30


def test_prints_stay_above_the_bar_and_out_of_it_when_stdout_is_a_file(tmp_path):
    program = """
        import sys
        from dino_vit.training.monitor import Progress
        with Progress(total_steps=10) as progress:
            progress.advance(5)
            print("to stdout")
            print("to stderr", file=sys.stderr)
    """
    lines = [line for line in screen(on_a_terminal(program)) if line]
    assert lines[:2] == ["to stdout", "to stderr"]
    assert len(lines) == 4
    with (tmp_path / "out").open("w") as file:
        lines = [line for line in screen(on_a_terminal(program, stdout=file)) if line]
    assert lines[0] == "to stderr"
    assert (tmp_path / "out").read_text() == "to stdout\n"


def test_an_error_gives_the_terminal_back():
    program = """
        from dino_vit.training.monitor import Progress
        try:
            with Progress(total_steps=10) as progress:
                progress.advance(5)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    """
    assert on_a_terminal(program).endswith("\x1b[?25h")


def test_a_log_file_gets_no_control_codes_even_where_colour_is_forced():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SHOW)], capture_output=True, env=environment(), check=True
    )
    assert b"\x1b" not in done.stderr
    assert done.stderr.count(b"img/s") == 5
    assert done.stdout == b""
