"""Train lightly-train's DINO as long as a run of ours, with its own defaults, on the same images and network.

    python -m benchmarks.small FOLDER --peer --seeds 1 --out benchmarks/results/cpu/small_peer.json
    python -m benchmarks.small_peer RUN OUTPUT --minutes 10 --seed 0

The first measures; it calls the second for each run, on the same core. RUN is the folder of a run of ours:
its images, the size of its views and of its network are taken, everything else is lightly-train's. Its
schedules need the number of steps: two short runs measure how long a step takes. OUTPUT/weights.pth are the
weights of the teacher in timm's layout.
"""

from __future__ import annotations

import argparse
import shutil
import time
from functools import partial
from pathlib import Path

import lightly_train
import torch
from torchvision.io import write_png

from benchmarks.peer import build_timm
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.image_set import ImageSet
from dino_vit.data.images.decode import read_image
from dino_vit.data.sources.open import open_source
from dino_vit.reports.record import read_run

BATCH = 128  # its default
TRIALS = (8, 40)  # steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    config = read_run(options.run).config
    images = options.output / "images"
    source = open_source(config.data.images)
    write_images(source, images)
    train = partial(train_peer, config, images, len(source), seed=options.seed)
    seconds = []
    for steps in TRIALS:
        start = time.perf_counter()
        train(options.output / "trial", steps)
        seconds.append(time.perf_counter() - start)
    step = (seconds[1] - seconds[0]) / (TRIALS[1] - TRIALS[0])
    start = time.perf_counter()
    train(options.output / "run", int(60 * options.minutes / step))
    print(f"{time.perf_counter() - start:.0f} seconds, {step:.3f} a step in the trials", flush=True)
    exported = options.output / "run" / "exported_models" / "exported_last.pt"
    shutil.copyfile(exported, options.output / "weights.pth")


def write_images(source: ImageSet, folder: Path) -> None:
    """Write the images as files, which is what lightly-train reads."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(len(source)):
        write_png(read_image(source, place), str(folder / f"{place:06}.png"))


def train_peer(
    config: PretrainConfig, images: Path, count: int, output: Path, steps: int, *, seed: int
) -> None:
    """Train for so many steps."""
    torch.manual_seed(seed)
    views = config.views
    model = build_timm(config)
    model.pretrained_cfg = {}  # where the export looks for the name of a published model
    lightly_train.pretrain(
        out=output,
        data=images,
        model=model,
        method="dino",
        epochs=-(-steps // (count // BATCH)),
        transform_args={"image_size": views.global_shape, "local_view": {"view_size": views.local_shape}},
        trainer_args={"max_steps": steps},
        accelerator="cpu",
        num_workers=0,
        seed=seed,
        overwrite=True,
    )


if __name__ == "__main__":
    main()
