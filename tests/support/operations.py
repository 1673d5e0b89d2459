"""What the steps of the recipes take on a GPU that is not here (`rehearsal.py`).

    python -m tests.support.operations

Kernels of each part, the most memory that tensors take meanwhile, the bytes that kernels move, by part and by
kind, and the time that these or their multiplications take at least. The batch is of uint8 views, whose
augmentation is part of the step.
"""

from tempfile import TemporaryDirectory

from benchmarks.measure import Row, Table
from benchmarks.step import FIXED
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training.loop import take_step
from tests.support.kernels import BANDWIDTH, PEAK
from tests.support.rehearsal import rehearsed_run

IMAGES = 64
REHEARSED = {
    "ViT-S/16, DINO": {},
    "ViT-S/16, DINOv2": {"method": "dinov2"},
    "ViT-B/16, DINO": {"model.arch": "vit_base"},
    "ViT-B/16, blocks recomputed": {"model.arch": "vit_base", "model.grad_checkpointing": True},
}


def rehearse(changes, images=IMAGES):
    """Return what a second step takes, as the first one makes the matrix that resamples positions."""
    settings = {**FIXED, "data.source": f"synthetic:{images}:96", "data.batch_size": images, **changes}
    settings |= {"data.augment_on": "device", "data.mean": (0.5,) * 3, "data.std": (0.2,) * 3}
    with TemporaryDirectory() as output:
        config = replace(PretrainConfig(), {**settings, "compute.precision": "bf16", "output": output})
        with rehearsed_run(config) as (rehearsal, state):  # which raises if a step makes the host wait
            batches = state.loader.batches()
            take_step(state, batches)
            rehearsal.restart()
            take_step(state, batches)
    return rehearsal


def kernel_table(steps):
    """Tabulate the kernels and the memory of the parts of each step, and of all of it."""
    first, *_ = steps.values()
    rows = []
    for part in dict.fromkeys(part for step in steps.values() for part in step.by_part):
        kernels = {name: float(step.by_part[part]) for name, step in steps.items()}
        memory = {
            name: step.peaks[part] / 2**20 if part in step.peaks else None for name, step in steps.items()
        }
        rows.append(Row(part, kernels, first.by_part[part] / first.kernels.total(), memory))
    total = {name: float(step.kernels.total()) for name, step in steps.items()}
    rows.append(Row("the whole step", total, 1.0, {name: step.peak / 2**20 for name, step in steps.items()}))
    note = "Operators that launch kernels, those on lists of tensors counted once; memory of tensors alone."
    title = f"A GPU rehearsed: kernels of a step, bf16, {IMAGES} images"
    return Table(title, "kernels", rows, note, ratio="share of the first")


def traffic_table(steps):
    """Tabulate the GB that the parts of each step, and then the kinds of operators, move."""
    first, *_ = steps.values()
    rows = []
    for place in (0, 1):
        moved = {name: step.traffic_by(place) for name, step in steps.items()}
        for part in dict.fromkeys(part for step in moved.values() for part, _ in step.most_common()):
            speed = {name: step[part] / 1e9 for name, step in moved.items()}
            rows.append(Row(part, speed, first.traffic_by(place)[part] / first.traffic.total()))
    rows.append(
        Row("the whole step", {name: step.traffic.total() / 1e9 for name, step in steps.items()}, 1.0)
    )
    least = ", ".join(f"{name} {sum(step.seconds.values()) * 1e3:.1f} ms" for name, step in steps.items())
    note = (
        "Bytes that kernels read and write at least, by part and then by kind. At "
        f"{BANDWIDTH / 1e12:g} TB/s, or {PEAK / 1e12:g} TFLOP/s where a kernel's multiplications take longer "
        f"(an H100's data sheet), a step takes at least: {least}. `compute.compile` would move less."
    )
    title = f"A GPU rehearsed: traffic of a step, bf16, {IMAGES} images"
    return Table(title, "GB", rows, note, ratio="share of the first")


if __name__ == "__main__":
    steps = {name: rehearse(changes) for name, changes in REHEARSED.items()}
    print(kernel_table(steps).markdown(), traffic_table(steps).markdown(), sep="\n\n")
