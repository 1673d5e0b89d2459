"""Records of a healthy run, a clock of our own, and a short run to show."""

from dataclasses import replace

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.reports.metrics import Baseline, MetricsRecord
from dino_vit.reports.verdict import Verdict, judge_run

NEWS, ADVICE = "Every image gets the same flat output.", "In a new run, try recipe=auto."

HEALTHY = MetricsRecord(
    step=10_000,
    total_steps=100_000,
    epoch=8.0,
    loss=9.1,
    prototypes=65536,
    mean_output_entropy=8.5,
    output_entropy=6.0,
    entropy_gap=2.5,
    student_divergence=3.1,
    prototypes_in_use=300,
    rows=1024,
    embedding_std=0.8,
    gradient_norm=2.0,
    lr=5e-4,
    weight_decay=0.05,
    momentum=0.996,
    teacher_temp=0.04,
    images_per_second=2310.0,
    data_wait=0.01,
    nonfinite_steps=0,
)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def show_some(progress, clock):
    progress.notice("Resuming runs/demo [at step 1,000].")
    states = ["too early to tell", "learning", "collapsed", "collapsed", "learning"]
    for n, state in enumerate(states, start=1):
        clock.now += 50
        if n == 3:
            progress.saved_step = 1_120
        for step in range(951 + 50 * n, 1001 + 50 * n):
            progress.advance(step, progress.total_steps)
        now = replace(HEALTHY, step=1000 + 50 * n, total_steps=progress.total_steps)
        metrics = replace(now, epoch=n / 4, knn=47.5 if n == 2 else None)
        bad = state == "collapsed"
        progress.show(metrics, Verdict(state, NEWS if bad else "It has learned.", "", ADVICE if bad else ""))


def evaluated(*, settings=(), colours=25.0, before=None, **figures):
    """Judge a finished run of 1,000 steps by three evaluations."""
    default = {"knn": [40.0] * 3, "probe": [40.0] * 3, "rankme": [50.0] * 3}
    columns = {**default, "colour": [0.5] * 3, **figures}
    columns = {"levelled_knn": columns["knn"], **columns}
    history = [
        replace(
            HEALTHY, step=step, total_steps=1000, **{name: values[row] for name, values in columns.items()}
        )
        for row, step in enumerate((400, 700, 1000))
    ]
    at_start = {name: values[0] for name, values in default.items()} | {"colour": 0.8}
    levels = {"largest_class": 24.0, "colours": colours, "queries": 341}
    config = load(PretrainConfig, None, ["recipe=auto", *settings])
    return judge_run(history, config, Baseline(**{**at_start, **levels, **(before or {})}))
