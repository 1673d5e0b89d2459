"""Photos that are larger than their views: as they are, decoded at a smaller scale, and packed with `size=`.

    python -m benchmarks.photos --repeats 9

What a worker does for 2 × 224 and 8 × 96 pixel views, in one process on one thread.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.input import Photos
from benchmarks.measure import Table, arguments, compare, report
from dino_vit import pack
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.custom import wrap
from dino_vit.data.sources.open import open_source
from dino_vit.views.build import build_views
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler


def run(*, repeats: int, threads: int) -> list[Table]:
    """Measure everything on one thread, as a loader's worker has one; `threads` changes nothing."""
    del threads
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [scaled_table(repeats), packed_table(repeats)]
    finally:
        torch.set_num_threads(before)


def scaled_table(repeats: int, images: int = 12) -> Table:
    """Measure photos of several sizes, decoded no larger than their views need it, and as they are."""
    views, rows = build_views(PretrainConfig()), []
    for width in (500, 1600, 4000):
        photos = wrap(Photos(images, width))
        sampler = Sampler(length=images, batch_size=images, seed=0)
        work: dict[str, Callable[[], object]] = {
            name: partial(
                next, Loader(source=photos, views=views, sampler=sampler, scaled_decoding=scaled).batches()
            )
            for name, scaled in (("as small as the views allow", True), ("as they are", False))
        }
        rows.append(compare(f"{width} × {width * 3 // 4} pixels", work, items=images, repeats=repeats))
    note = "Decoding and cutting of JPEGs."
    return Table("Large photos, CPU, one thread", "images a second", rows, note)


def packed_table(repeats: int, images: int = 12, width: int = 4000) -> Table:
    """Measure large photos as they are, and packed with `size=`."""
    views, rows, notes = build_views(PretrainConfig()), [], []
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "photos"
        folder.mkdir()
        for number, data in enumerate(Photos(images, width).files):
            (folder / f"{number}.jpg").write_bytes(data)
        for side in (448, 640):
            packed = folder.with_name(str(side))
            began = time.perf_counter()
            pack(folder, packed, size=side, verbose=False)
            seconds = time.perf_counter() - began
            sampler = Sampler(length=images, batch_size=images, seed=0)
            work: dict[str, Callable[[], object]] = {}
            for name, source in (("packed", packed), ("photos", folder)):
                opened = open_source(str(source))
                loader = Loader(source=opened, views=views, sampler=sampler, scaled_decoding=True)
                work[name] = partial(next, loader.batches())
            rows.append(compare(f"size={side}", work, items=images, repeats=repeats))
            before, after = (sum(path.stat().st_size for path in of.iterdir()) for of in (folder, packed))
            notes.append(
                f"size={side} takes {1000 * seconds / images:.0f} ms a photo once, and leaves "
                f"{after / images / 1024:.0f} KiB of {before / images / 1024:,.0f}."
            )
    note = "A worker's share, with JPEG decoded as small as the views allow. " + " ".join(notes)
    title = f"Photos of {width} × {width * 3 // 4} pixels, packed with `size=`, CPU, one thread"
    return Table(title, "images a second", rows, note)


if __name__ == "__main__":
    parser = arguments(__doc__.splitlines()[0])
    options = parser.parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)
