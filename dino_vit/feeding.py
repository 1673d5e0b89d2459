"""What a run is fed with: its views, and the loader that cuts them, as the config has them."""

from __future__ import annotations

from accelerate import Accelerator

from dino_vit.config import PretrainConfig
from dino_vit.data.loader import Loader
from dino_vit.data.sampler import Sampler
from dino_vit.data.sources import Source
from dino_vit.processes import cores_of_a_process
from dino_vit.rules import Plan
from dino_vit.views import Photometry, View


def build_loader(config: PretrainConfig, plan: Plan, source: Source, accelerator: Accelerator) -> Loader:
    sampler = Sampler(
        length=len(source),
        batch_size=plan.global_batch,
        seed=config.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        accumulate=config.optim.accumulate,
    )
    return Loader(
        source=source,
        views=build_views(config),
        sampler=sampler,
        workers=_choose_workers(config.data.workers, accelerator),
        pin=accelerator.device.type == "cuda",
    )


def _choose_workers(wanted: int | None, accelerator: Accelerator) -> int:
    """Return the loader processes of this process: its share of the cores, less the one it needs itself."""
    if wanted is not None:
        return wanted
    return min(cores_of_a_process(accelerator.num_processes) - 1, 16)


def build_views(config: PretrainConfig) -> tuple[View, ...]:
    """Return the views that the config asks for, global ones first."""
    views, p = config.views, config.photometry
    common = p.model_dump(exclude={"blur", "solarise"})
    first, other, local = (
        Photometry(**common, blur=blur, solarise=solarise)
        for blur, solarise in zip(p.blur, p.solarise, strict=True)
    )

    def whole(photometry: Photometry) -> View:
        shape, scale = views.global_shape, views.global_scale
        return View(size=shape, scale=scale, ratio=views.ratio, photometry=photometry)

    part = View(size=views.local_shape, scale=views.local_scale, ratio=views.ratio, photometry=local)
    return (whole(first), *[whole(other)] * (views.global_count - 1), *[part] * views.local_count)
