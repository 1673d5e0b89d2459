"""`dino-vit demo --quick`: what it shows, and how long it takes.

    python -m benchmarks.demo --threads 1

The time is that of the processor, since others may use the machine too.
"""

from __future__ import annotations

import time
from tempfile import TemporaryDirectory

import torch

import dino_vit
from benchmarks.measure import Row, Table, arguments, report, where


def main() -> None:
    options = arguments(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder:
        knn = dino_vit.demo(output=folder, quick=True).knn
    note = f"With its page it took {time.process_time():.0f} seconds of processor time."
    levels = {name: knn[name] for name in ("trained", "untrained", "raw pixels", "chance")}
    row = Row("2,000 textures of 32 px", levels, levels["trained"] / levels["untrained"])
    title = f"The quick demo, {where(options.threads)}"
    report([Table(title, "k-NN, per cent", [row], note, ratio="trained / untrained")], options)


if __name__ == "__main__":
    main()
