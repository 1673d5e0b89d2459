"""Pretraining from beginning to end: its processes, its folder, its setup, its loop."""

from collections.abc import Callable
from pathlib import Path

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.cache import SHARDS, below_home, bound_caches, cache_folder
from dino_vit.core.distributed import SETUP_TIMEOUT, limit_waits
from dino_vit.core.process import Interruption, locked
from dino_vit.core.runtime import start_processes
from dino_vit.data.remote import retrying
from dino_vit.reports.metrics import MetricsRecord
from dino_vit.training.loop import train
from dino_vit.training.reporter import Reporter
from dino_vit.training.setup import set_up


def pretrain(
    config: PretrainConfig,
    *,
    on_metrics: Callable[[MetricsRecord], object] | None = None,
    on_checkpoint: Callable[[Path], object] | None = None,
) -> None:
    """Train as configured, resuming where the output folder has a run.

    On rank 0 `on_metrics` is called with each record and `on_checkpoint` with the path of each checkpoint.
    """
    config.check_ready()
    if Path(config.output).resolve() in map(Path.resolve, map(Path, config.data.sources)):
        raise ValueError(f"output={config.output} is the source of the images; give a folder of its own")
    with Interruption() as interruption, retrying(config.data.timeout):
        accelerator = start_processes(trackers=config.compute.trackers, folder=Path(config.output))
        with locked(Path(config.output)):
            run, state = set_up(config, accelerator)
            if config.data.cache_gb and accelerator.is_main_process:
                copies = config.data.cache and below_home(config.data.cache)
                bound_caches(config.data.cache_gb, copies or cache_folder() / SHARDS)
            with Reporter(run, state, on_metrics=on_metrics, on_checkpoint=on_checkpoint) as reporter:
                finished = train(state, reporter, interruption)
                accelerator.wait_for_everyone()
                limit_waits(SETUP_TIMEOUT)  # of what comes next in this process
        if not finished:
            interruption.leave()
