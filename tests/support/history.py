"""Records of a healthy run, a clock of our own, and a short run to show."""

from dataclasses import replace

from dino_vit.reports.metrics import MetricsRecord
from dino_vit.reports.readings import UNIFORM
from dino_vit.reports.states import LEARNING, TOO_EARLY
from dino_vit.reports.verdict import Verdict

ADVICE = "Try head.batch_norm=true."

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
    with progress:
        progress.notice("Resuming runs/demo [at step 1,000].")
        for n, diagnosis in enumerate([TOO_EARLY, LEARNING, UNIFORM, UNIFORM, LEARNING], start=1):
            clock.now += 50
            if n == 3:
                progress.saved_step = 1_120
            for step in range(951 + 50 * n, 1001 + 50 * n):
                progress.advance(step, progress.task.total)
            now = replace(HEALTHY, step=1000 + 50 * n, total_steps=progress.task.total)
            metrics = replace(now, epoch=n / 4, knn=47.5 if n == 2 else None)
            progress.show(metrics, Verdict(diagnosis, "", ADVICE if diagnosis is UNIFORM else ""))
