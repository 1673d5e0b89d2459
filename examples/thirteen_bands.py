"""Pretrain on images in your own format: satellite scenes of 13 bands in .npz files.

    python examples/thirteen_bands.py scenes --minutes 20

A source is any object with a length, `name(i)` and `read(i)`. Here an image is (rows, columns, bands)
of uint16; reflectances up to 10,000 become values from 0 to 1.
"""

import argparse
from pathlib import Path

import numpy as np

import dino_vit


class Scenes:
    """The array `bands` of every .npz file in a folder."""

    def __init__(self, folder):
        self.paths = sorted(Path(folder).glob("*.npz"))

    def __len__(self):
        return len(self.paths)

    def name(self, index):
        return self.paths[index].stem

    def read(self, index):
        return np.load(self.paths[index])["bands"]


if __name__ == "__main__":  # which DataLoader workers on macOS must not run again
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--minutes", type=float, default=20, help="of pretraining (default %(default)s)")
    options = parser.parse_args()
    scenes, budget, data = Scenes(options.folder), {"minutes": options.minutes}, {"channels": 13}
    data["range"] = (0, 10_000)
    run = dino_vit.pretrain(scenes, "runs/scenes", recipe="auto", data=data, budget=budget)
    print(run.outcome, dino_vit.load_backbone(run).embed(scenes.read(0)).shape)
