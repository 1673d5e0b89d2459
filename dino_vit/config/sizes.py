"""Choose sizes of patches, views and networks by those of the images, for `recipe=auto`.

The formulas run through two points: the published recipe (images of 224 pixels) and what learns from 20,000
images of 32 pixels within minutes.
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import NamedTuple

from dino_vit.config.draft import Draft
from dino_vit.config.facts import ImageFacts
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import REDUCTION
from dino_vit.core import height_width

PATCHES = (2, 4, 8, 16)
TIMM_PATCH = 32  # pixels of a cell of the last feature map, of nearly all of timm's models
# Largest side of a view, width and depth of the networks that a run of some minutes chooses from.
LADDER = ((48, 96, 4), (64, 128, 6), (64, 192, 6), (96, 192, 12), (128, 256, 12), (224, 384, 12))
# That the smallest network must see. A network r times as expensive needs r times as many to learn better.
ENOUGH_IMAGES = 300_000


class Rung(NamedTuple):
    """A size of the network and of its views, and what an image costs with it, in any unit."""

    settings: dict[str, object]
    cost: float


def network_ladder(draft: Draft, image_size: int) -> list[Rung]:
    """Return the sizes that `budget.minutes` chooses from, the smallest first; none if one was given."""
    config = draft.config
    is_open = all(map(draft.is_open, ("model.arch", "model.width", "model.depth")))
    if config.recipe != "auto" or config.init or not is_open:
        return []
    views, rungs, its_own = config.views, list[Rung](), not draft.is_open("model.patch_size")
    for largest, width, depth in LADDER:
        side = min(3 * image_size // 4, largest)  # images are read whole, and smaller views take less time
        settings: dict[str, object] = {
            "model.arch": None,
            "model.width": width,
            "model.depth": depth,
            "model.heads": width // (32 if depth < 12 else 64),  # at depth 12 those of published ViTs
        }
        if not draft.is_open("views.global_size"):
            side = max(views.global_shape)
        else:
            patch = config.model.patch_size if its_own else nearest_patch(_patches(config), side)
            settings["views.global_size"] = max(side // patch, 2) * patch
        tokens = (side / (config.model.patch_size if its_own else fitting_patch(side))) ** 2
        # As in `view_cost`, of the views of a long run: 8 local ones, and all patches. Those of a short run
        # cost less, but on each rung alike: the ratios between rungs differ by at most 2%.
        passes = 4 * views.global_count * (1 + tokens / (6 * width)) + 3 * views.local_count * (3 / 7) ** 2
        rungs.append(Rung(settings, tokens * passes * width**2 * depth))
    return rungs


def view_cost(global_count: int, local_count: int, patch_drop: float) -> float:
    """Return what the views of an image cost, in passes of a global view through the teacher.

    A global view passes the teacher and, three times as long, the student; local ones are 3/7 as wide.
    """
    return global_count * (1 + 3 * (1 - patch_drop)) + 3 * local_count * (3 / 7) ** 2


def choose_rung(ladder: Sequence[Rung], images: float) -> Rung:
    """Return the largest network that sees enough images, if the smallest sees so many."""
    smallest = ladder[0]
    affordable = [rung for rung in ladder if images * (smallest.cost / rung.cost) ** 2 >= ENOUGH_IMAGES]
    return max(affordable, key=lambda rung: rung.cost, default=smallest)


def choose_sizes(draft: Draft, images: ImageFacts) -> None:
    """Give a small image fewer, smaller patches: 14 x 14 of 16 at 224 pixels, 8 x 8 of 4 at 32.

    Features are read from images larger than a view, which shows a part of an image, and so larger things.
    """
    config, image_size = draft.config, images.size
    is_square, given_sides = True, list[int]()
    if not draft.is_open("views.global_size"):
        given_sides += config.views.global_shape
        image_size, is_square = min(given_sides), len({*given_sides}) == 1
    if not draft.is_open("views.local_size"):
        given_sides += config.views.local_shape
    patch = TIMM_PATCH
    if not config.model.timm:
        sizes = _patches(config)
        fitting = [size for size in sizes if all(side % size == 0 for side in given_sides)] or sizes
        patch = nearest_patch(fitting, image_size)
        patch = draft.choose("model.patch_size", patch, f"for {image_size} pixels: 16 at 224, 4 at 32")
    side = max(min(image_size, 224) // patch, 2) * patch
    reason = f"images of {image_size} pixels in whole patches, up to 224"
    side = min(height_width(draft.choose("views.global_size", side, reason)))
    local = ceil(3 * side / (7 * patch)) * patch
    draft.choose("views.local_size", local, f"3/7 of a global view, in patches of {patch}")
    if draft["augment.module"] is None:
        sigma = (0.1, max(0.1, min(2.0, round(2 * side / 224, 2))))
        draft.choose("augment.blur_sigma", sigma, "in proportion to the view: up to 2 at 224")
    larger = min(5 * images.size // 4, 2 * side, 224) // patch * patch
    if larger > side and is_square and not (config.model.timm or config.init):
        reason = "twice a global view, as it shows things larger; at most 5/4 of the images, and 224"
        draft.choose("model.image_size", larger, reason)


def _patches(config: PretrainConfig) -> Sequence[int]:
    """Return the sizes of patches to choose from."""
    return (REDUCTION,) if config.model.stem == "hybrid" else PATCHES


def nearest_patch(sizes: Sequence[int], image_size: int) -> int:
    """Return the size of patches that fits images of some size best."""
    return min(sizes, key=lambda size: abs(log2(size / fitting_patch(image_size))))


def fitting_patch(image_size: int) -> float:
    """Return the patch size that fits images of some size, which need not be a power of two."""
    return 16 * (min(image_size, 224) / 224) ** (2 / 3)
