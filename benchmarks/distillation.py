"""A narrow student of a frozen wide teacher of ours, beside the same without, in equal time of a core.

    python -m benchmarks.distillation FOLDER --out benchmarks/results/cpu/distillation.json [--minutes 5]

All learn from FOLDER/flowers/train.parquet, without labels; FOLDER/flowers/test.parquet is judged as in
benchmarks.small. The teacher takes --teacher-minutes, once. Then a step with it and one without are timed in
turn, and a student takes the steps that fit into its minutes. A run that has ended is judged as it is.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks.measure import Row, Table, arguments, report
from benchmarks.small import Job, judge, measured_steps, of_set, train

TEACHER = ["model.width=192", "model.depth=4", "model.heads=3"]
STUDENT = ["model.width=96", "model.depth=4", "model.heads=3"]
ALWAYS = ["model.arch=null", "views.global_size=48", "run.eval_every=null"]
FIGURES = "k-NN", "linear", "effective rank"


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=0, threads=1)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=5, help="of a student (default %(default)s)")
    parser.add_argument("--teacher-minutes", type=float, default=50, help="(default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="students of each (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs/distillation"), help="their folders go here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {"flowers": options.folder / "flowers"}
    length = f"budget.minutes={options.teacher_minutes}"
    teacher = Job("flowers", 7, options.runs / "teacher", [*ALWAYS, *TEACHER, length])
    train([teacher], folders)
    settings = [*ALWAYS, *STUDENT]
    variants = {"without": settings, "with": [*settings, f"teacher.weights={teacher.output.resolve()}"]}
    timed = {name: [*of_set("flowers", folders), *given] for name, given in variants.items()}
    steps = measured_steps(timed, options.minutes, options.runs / "steps.json")
    students = [
        Job("flowers", seed, options.runs / f"{name}-{seed}", [*given, f"budget.steps={steps[name]}"])
        for seed in range(options.seeds)
        for name, given in variants.items()
    ]
    train(students, folders)
    found = {job.output: judge(job.output, job.name, folders) for job in (teacher, *students)}
    rows = []
    for figure in FIGURES:
        of = {
            name: [
                found[job.output]["trained"][figure] for job in students if job.output.name.startswith(name)
            ]
            for name in ("without", "with-")
        }
        spread = max(stdev(values) for values in of.values()) if options.seeds > 1 else 0.0
        speed = {
            "student without": mean(of["without"]),
            "student with the teacher": mean(of["with-"]),
            "the teacher": found[teacher.output]["trained"][figure],
            "student untrained": found[students[0].output]["untrained"][figure],
        }
        rows.append(
            Row(
                f"{figure} ± {spread:.1f}",
                speed,
                speed["student with the teacher"] / speed["student without"],
            )
        )
    title = f"Flowers, {options.minutes:g} minutes of one core, {' '.join(STUDENT)}, seeds: {options.seeds}"
    note = f"Steps: {steps['with']} with the teacher, {steps['without']} without."
    report([Table(title, "per cent, or dimensions", rows, note, ratio="with / without")], options)


if __name__ == "__main__":
    main()
