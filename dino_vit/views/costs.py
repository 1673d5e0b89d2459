"""What images cost a run that waits for them, and what to do about it."""

import math
from collections.abc import Sequence
from statistics import median

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.text import plural, printable
from dino_vit.data.images.reducing import reduced_size
from dino_vit.data.sources.files import is_url
from dino_vit.views.build import MOST_WORKERS, build_views
from dino_vit.views.geometry import View
from dino_vit.views.loader import LoadTimes

# An image costs as much as decoding so many pixels besides its own, which cost this share where it is decoded
# at a smaller scale; advice must save this factor.
OVERHEAD, SCALED, LARGE = 90_000, 0.22, 2


def advice_on_size(
    sizes: Sequence[tuple[int, int]], views: Sequence[View], source: str, *, scaled_decoding: bool
) -> str | None:
    """Return what to do if images of these heights and widths are far larger than the views."""
    # The smallest box of a view, if it is square, then still has a pixel for each of the view's own.
    needed = max(max(view.size) / math.sqrt(view.scale[0]) for view in views)
    side = math.ceil(needed / 64) * 64
    original = median(height * width for height, width in sizes)
    packed = median(math.prod(reduced_size(*size, side)) for size in sizes)
    now = OVERHEAD + (SCALED * original if scaled_decoding else original)
    faster = now / (OVERHEAD + packed)
    if faster < LARGE:
        return None
    height, width = (median(lengths) for lengths in zip(*sizes, strict=True))
    text = (
        f"images of {height:g} × {width:g} pixels (median) are larger than their views need: "
        f"`dino-vit pack {source} packed size={side}` makes them about {faster:.0f} times faster to decode"
    )
    return text if scaled_decoding else f"{text}, data.scaled_decoding=true about {1 / SCALED:.0f} times"


def advice_on_waiting(
    config: PretrainConfig,
    times: LoadTimes,
    sizes: Sequence[tuple[int, int]],
    *,
    workers: int,
    cores: int,
) -> str:
    """Return what a run that waits for images takes for one, and what to do about the longest part.

    `sizes` are heights and widths of some images, `cores` those of this process and its workers.
    """
    seconds = {name: getattr(times, name) / times.images for name in ("read", "decode", "crop", "augment")}
    if not times.augment:
        del seconds["augment"]
    longest = max(seconds, key=lambda name: seconds[name])
    source, scaled = printable(config.data.source), config.data.scaled_decoding
    large = None
    if longest in ("decode", "crop"):
        large = advice_on_size(sizes, build_views(config), source, scaled_decoding=scaled)
    # Processes that wait for a disk or a network leave their cores to others.
    more = min(2 * cores if longest == "read" else cores - 1, MOST_WORKERS)
    remedies = [f"data.workers={more}"] if more > workers else []
    if longest == "augment":
        remedies.append("data.augment_on=device")
    elif longest == "read" and is_url(config.data.source):
        remedies.append("a copy of the images on a local disk, as data.cache_gb makes of shards")
    elif longest == "read":
        remedies.append(f"a faster disk, or shards instead of many files (`dino-vit pack {source} packed`)")
    elif not large:
        remedies.append("more cores" if longest == "decode" else "more cores, or a lower views.local_count")
    *most, last = [f"{1000 * value:.3g} ms to {name}" for name, value in seconds.items()]
    who = plural(workers, "DataLoader worker") if workers else "this process alone"
    return (
        f"an image takes {', '.join(most)} and {last}, by {who} on {plural(cores, 'core')}."
        + (f" Try {', or '.join(remedies)}." if remedies else "")
        + (f" {large[0].upper()}{large[1:]}." if large else "")
    )
