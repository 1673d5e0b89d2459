"""Work for a fresh process, in a module of its own, so that this process imports nothing but torch."""

from collections.abc import Callable

import torch


def build_allocation(mebibytes: int) -> Callable[[], object]:
    torch.ones(4 * mebibytes * 2**18)  # a larger peak before the work, which must not count
    return lambda: torch.ones(mebibytes * 2**18).sum()


def build_attention(function: str) -> Callable[[], object]:
    from dino_vit.eval.maps import attention
    from dino_vit.models.vit import VisionTransformer

    def work(size: int) -> object:
        model = VisionTransformer(image_size=size, patch_size=8, width=24, depth=2, heads=2)
        return getattr(attention, function)(model, torch.zeros(1, 3, size, size))

    work(64)  # what the libraries take for themselves
    return lambda: work(512)
