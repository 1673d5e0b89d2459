"""The terms of the loss: what each adds to DINO of 2021, and all together, in equal time of a core.

    python -m benchmarks.terms FOLDER --out benchmarks/results/cpu/terms.json [--minutes 3] [--seeds 3]

FOLDER is that of benchmarks.small, which trains and judges the CLS token. First the step of each variant is
timed, all in turn; a run takes the steps that its variant takes in the minutes, so what else the machine does
meanwhile changes nothing. Scenes are judged by their patches too: 300 scenes to learn from and 300 others, of
a seed that no run has seen. A run that has ended is judged as it is, so the program goes on where it was;
tables of other sets in the file stay.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from itertools import product, repeat
from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks.measure import Result, Row, Table, arguments, machine, report
from benchmarks.small import SIDES, Job, measured_steps, of_set, train
from benchmarks.small import judge as judge_run
from dino_vit.config.commands import BackboneConfig
from dino_vit.data.sources.synthetic import make_scenes
from dino_vit.eval.features import frozen_backbone
from dino_vit.eval.figures import summed
from dino_vit.eval.maps.dense import choose_steps, judge_pixels, patch_bank, train_head
from dino_vit.eval.maps.windows import pixel_accuracy
from dino_vit.models.backbone import FeatureSpec
from dino_vit.reports.record import read_run
from dino_vit.training.setup import build_untrained
from dino_vit.views.build import normalisation
from dino_vit.weights import save_backbone

# By set, what is fixed for all. A patch of 12 pixels shows two periods of a pattern of scenes.
SETS = {
    "cifar10": ["views.global_size=32"],
    "flowers": ["views.global_size=48"],
    "textures": ["views.global_size=32"],
    "scenes": ["views.global_size=96", "model.patch_size=12", "views.local_size=36"],
}
# And for all sets; the time is for training alone. The last two recipe=auto would choose by the terms.
ALWAYS = [
    *("model.arch=null", "model.width=96", "model.depth=4", "model.heads=3", "run.eval_every=null"),
    *("model.patch_drop=0", "views.local_count=8"),
]
CENTRE, BALANCED = ["loss.centering=ema"], ["loss.centering=sinkhorn"]
SPREAD, NOT_SPREAD = ["loss.koleo_weight=0.03"], ["loss.koleo_weight=0"]
PATCHES = ["loss.patch_weight=1"]
VARIANTS: dict[str, Sequence[str]] = {
    "DINO of 2021": [*CENTRE, *NOT_SPREAD],
    "Sinkhorn-Knopp": [*BALANCED, *NOT_SPREAD],
    "KoLeo": [*CENTRE, *SPREAD],
    "patches": [*CENTRE, *NOT_SPREAD, *PATCHES],
    "all": [*BALANCED, *SPREAD, *PATCHES],
}
DENSE = 300  # scenes to learn from, and as many to judge
FIGURES = "k-NN", "linear", "effective rank", "patch k-NN", "mIoU by k-NN", "mIoU by a linear layer"


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(repeats=0, threads=1)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=3, help="of a run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=SETS, metavar="SET")
    parser.add_argument("--runs", type=Path, default=Path("runs/terms"), help="their folders go here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folders = {name: options.folder / name for name in ("cifar10", "flowers")}
    steps = {}
    for name in options.sets:
        variants = {one: [*of_set(name, folders), *settings_of(name, one)] for one in VARIANTS}
        steps[name] = measured_steps(variants, options.minutes, options.runs / f"{name}.steps.json")
    jobs: dict[tuple[str, str, int], Job] = {}
    for seed, name, (number, variant) in product(range(options.seeds), options.sets, enumerate(VARIANTS)):
        settings = [*settings_of(name, variant), f"budget.steps={steps[name][variant]}"]
        jobs[name, variant, seed] = Job(name, seed, options.runs / f"{name}-{number}-{seed}", settings)
    train(list(jobs.values()), folders)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        judged = dict(zip(jobs, pool.map(figures, jobs.values(), repeat(folders)), strict=True))
    earlier = Result.read(options.out).tables if options.out and options.out.exists() else []
    tables = {table.title.partition(",")[0]: table for table in earlier}
    for name in options.sets:
        found = {
            variant: [judged[name, variant, seed]["trained"] for seed in range(options.seeds)]
            for variant in VARIANTS
        }
        found["untrained"] = [judged[name, "all", seed]["untrained"] for seed in range(options.seeds)]
        rows = [row_of(figure, found) for figure in FIGURES if figure in found["all"][0]]
        how = " ".join(["recipe=auto", *ALWAYS, *SETS[name]])
        title = f"{name}, {options.minutes:g} minutes of one core, {how}, seeds: {options.seeds}"
        taken = ", ".join(f"{variant} {count}" for variant, count in steps[name].items())
        # The other tables may be of another day.
        note = f"Steps: {taken}. Measured on {date.today()}, on {machine()}."
        tables[name] = Table(title, "per cent, or dimensions", rows, note, ratio="all / DINO of 2021")
    report([tables[name] for name in SETS if name in tables], options)


def settings_of(name: str, variant: str) -> list[str]:
    """Return the settings of a variant on a set."""
    return [*ALWAYS, *SETS[name], *VARIANTS[variant]]


def figures(job: Job, folders: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return the figures of a run, and those of its network before the first step."""
    found = judge_run(job.output, job.name, folders)
    if job.name == "scenes":
        config, first = read_run(job.output).config, job.output / "untrained.safetensors"
        mean, std = normalisation(config)
        save_backbone(build_untrained(config)[1].backbone, first, mean=mean, std=std)
        for title, weights in (("trained", job.output), ("untrained", first)):
            found[title] |= of_patches(weights)
    return found


def of_patches(weights: Path) -> dict[str, float]:
    """Return what the patches of scenes are worth."""
    side = SIDES["scenes"]
    scenes = make_scenes(length=2 * DENSE, size=side, seed=1)
    frozen = frozen_backbone(BackboneConfig(source="synthetic:scenes", weights=str(weights)))
    spec = FeatureSpec(tokens="patches")
    bank = patch_bank(frozen, scenes, range(DENSE), spec, patches=50_000)
    head = train_head(frozen, scenes, bank, spec, choose_steps(DENSE))
    by_knn, by_head = judge_pixels(frozen, scenes, range(DENSE, 2 * DENSE), bank, head, spec, k=20)
    return {
        "patch k-NN": 100 * replace(by_knn, metric=summed(pixel_accuracy)).mean,
        "mIoU by k-NN": 100 * by_knn.mean,
        "mIoU by a linear layer": 100 * by_head.mean,
    }


def row_of(figure: str, found: dict[str, list[dict[str, float]]]) -> Row:
    """Return the means over the seeds of a figure, and the largest deviation of a variant."""
    values = {variant: mean(one[figure] for one in runs) for variant, runs in found.items()}
    spreads = [stdev(one[figure] for one in runs) for runs in found.values() if len(runs) > 1]
    deviation = f" ± {max(spreads):.1f}" if spreads else ""
    return Row(f"{figure}{deviation}", values, values["all"] / values["DINO of 2021"])


if __name__ == "__main__":
    main()
