"""What everything may use and what knows no image: processes, launch, random numbers, files, checkpoints."""

import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger("dino_vit")  # of the whole library

Size = tuple[int, int]  # height, width

VIT_SIZES: dict[str, dict[str, Any]] = {
    "vit_tiny": {"width": 192, "depth": 12, "heads": 3, "patch_size": 16},
    "vit_small": {"width": 384, "depth": 12, "heads": 6, "patch_size": 16},
    "vit_base": {"width": 768, "depth": 12, "heads": 12, "patch_size": 16},
    "vit_large": {"width": 1024, "depth": 24, "heads": 16, "patch_size": 16},
    "vit_huge": {"width": 1280, "depth": 32, "heads": 16, "patch_size": 14},
}


def height_width(size: int | Sequence[int]) -> Size:
    """Return (height, width); a single number means a square."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
