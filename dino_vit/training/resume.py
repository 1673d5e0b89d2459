"""Which checkpoint a run resumes from, and what must still be as it was."""

import os
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from shutil import copyfile
from typing import Any

from dino_vit.config.complete import Run
from dino_vit.config.facts import CheckpointFacts
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.sections import Data
from dino_vit.config.settings import settings_of, values
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoint, Checkpoints
from dino_vit.core.distributed import world_size
from dino_vit.core.storage import replacing, write_bytes
from dino_vit.core.text import plural
from dino_vit.data.image_set import ImageSet
from dino_vit.reports.metrics import METRICS, START_ADAPTER, OnlineFigures, read_records, to_json
from dino_vit.training.facts import Inputs
from dino_vit.training.state import TrainingState

# What a run writes beside its checkpoints.
RECORDS = "config.yaml", "starts.jsonl", "metrics.jsonl", "baseline.json", "unreadable.txt"


def find_checkpoint(config: PretrainConfig) -> Checkpoint | None:
    """Return the checkpoint to resume from, which rank 0 reads."""
    checkpoints = Checkpoints(Path(config.output))
    if config.compute.resume == "never" and checkpoints.exist_on_rank_0():
        raise ValueError(
            f"{config.output} already holds a run, and compute.resume=never does not overwrite it; "
            "give another output, or move that folder away"
        )
    resumed = checkpoints.newest_of_rank_0()
    if resumed and "architecture" not in resumed.metadata:  # as in the folder of a fine-tuning
        text = f"{resumed.path} is not a checkpoint of a pretraining"
        raise ValueError(f"{text}; give another output, or move that folder away")
    return resumed


def check_same_run(run: Run, before: CheckpointFacts, inputs: Inputs) -> None:
    """Check that a run resumes with the settings, images, batches and precision that it started with."""
    config, resumed = run.config, inputs.checkpoint
    assert resumed is not None
    changes = list(_changes(run, before, inputs, resumed))
    if changes and config.compute.resume != "changed":
        raise ValueError(
            f"{config.output} holds a run at step {resumed.step} with other settings: {'; '.join(changes)}. "
            "Give another output, or compute.resume=changed to resume anyway"
        )
    if resumed.metadata["stamp"] != inputs.source.stamp:
        text = (
            "the files of %s were moved, copied or changed since step %d, but have the same names and sizes"
        )
        log.info(text, config.data.images, resumed.step)


def set_figures_aside(state: TrainingState) -> None:
    """Set the figures so far aside: with other images or labels later ones cannot be compared."""
    config, folder = state.config, state.folder
    if config.compute.resume != "changed":
        raise ValueError(
            f"{folder} holds a run at step {state.step} evaluated with other images or labels, so "
            "later figures cannot be compared with its own. Give those, or another output, or "
            "compute.eval_every=null to stop evaluating, or compute.resume=changed to set the figures so far "
            "aside"
        )
    text = "%s was evaluated with other images or labels: its figures so far are set aside"
    log.warning(text, folder)
    best = state.evaluations.best
    state.evaluations.best = state.evaluations.best_written = None
    if not state.accelerator.is_main_process:
        return
    metrics, baseline = folder / "metrics.jsonl", folder / "baseline.json"
    aside = {metrics: "metrics-before-{}.jsonl", baseline: "baseline-before-{}.json"}
    if best:
        aside[state.checkpoints.path(best["step"])] = "best-before-{}.safetensors"
    for path, name in aside.items():
        if path.exists() and not (copy := folder / name.format(state.step)).exists():
            with replacing(copy) as partial:
                copyfile(path, partial)
    nothing: dict[str, Any] = dict.fromkeys(field.name for field in fields(OnlineFigures))
    records = [record for record in read_records(metrics, METRICS) if record.step <= state.step]
    lines = (to_json(replace(record, **nothing).to_record()) for record in records)
    write_bytes(metrics, b"".join(line + b"\n" for line in lines))
    baseline.unlink(missing_ok=True)


def set_earlier_run_aside(folder: Path, settings: bytes) -> None:
    """Move the records in the folder of a new run aside, of whatever is without checkpoints.

    If the same run has begun and logged nothing, there is nothing to lose.
    """
    records = [path for name in RECORDS if os.path.lexists(path := folder / name)]
    config, logged = folder / RECORDS[0], {path.name for path in records} - {*RECORDS[:2]}
    if not records or (not logged and config.is_file() and config.read_bytes() == settings):
        return
    numbered = (folder / f"earlier-{number}" for number in count(1))
    aside = next(path for path in numbered if not os.path.lexists(path))
    aside.mkdir()
    for path in records:
        path.rename(aside / path.name)
    names = ", ".join(path.name for path in records)
    log.warning("%s has no checkpoints to resume from, but %s, now in %s", folder, names, aside)


def _more_images(config: PretrainConfig, source: ImageSet, step: int) -> str:
    """Return how many images more or fewer a run has than at a step; "" if as many, or unknown."""
    starts = read_records(Path(config.output) / "starts.jsonl", START_ADAPTER)
    before = [start.images for start in starts if start.step < step]
    if not before or source.mix:  # of which a start has the images of an epoch
        return ""
    more = len(source) - before[-1]
    return f"{plural(abs(more), 'image')} {'more' if more > 0 else 'fewer'}" if more else ""


def _changes(run: Run, checkpoint: CheckpointFacts, inputs: Inputs, resumed: Checkpoint) -> Iterator[str]:
    """Yield what has changed: settings, what they stand for, and the batches of a forward pass."""
    config, metadata, before = run.config, resumed.metadata, checkpoint.settings
    now = values(config)
    for key, info in settings_of(PretrainConfig).items():
        if not info.resumable and before.get(key) != now.get(key):
            yield f"{key} was {before.get(key)} and is {now.get(key)}"
    wanted = config.compute.precision
    if metadata["precision"] != run.precision and wanted == before["compute.precision"]:
        yield f"compute.precision={wanted} was {metadata['precision']} and is {run.precision} here"
    if metadata["source"] != inputs.source.fingerprint:
        if config.data.source != before["data.source"]:
            earlier = Data(source=before["data.source"]).images
            yield f"the images of {config.data.images} are not those of {earlier}"
        elif more := _more_images(config, inputs.source, resumed.step):
            yield f"{config.data.images} has {more} than at step {resumed.step}"
        else:
            yield f"the images of {config.data.images} have changed"
    networks = {"fixed_teacher": f"teacher.weights={config.teacher.weights}"}
    networks |= {"gram_teacher": f"gram.weights={config.gram.weights}"} if config.gram else {}
    for key, name in networks.items():
        if metadata[key] not in (None, inputs.weights_read[key]):
            yield f"the weights of {name} have changed; of a run that goes on, give a checkpoint that is kept"
    batch, processes = checkpoint.global_batch, world_size()
    images, then = config.data.batch_size * processes, batch // before["optim.accumulate"]
    how = f"data.batch_size={config.data.batch_size} on {plural(processes, 'process', 'processes')}"
    size, rest = divmod(then, processes)
    advice = "" if rest else f"; data.batch_size={size} keeps it"
    if batch % images:
        yield f"its global batch was {batch}, which is not a multiple of {images} ({how}){advice}"
    # These look at all images of a forward pass.
    used = {
        "BatchNorm": any(name.startswith("student.") and "running_mean" in name for name in resumed.tensors),
        "Sinkhorn-Knopp": config.loss.centering == before["loss.centering"] == "sinkhorn",
        "KoLeo": config.loss.koleo_weight and before["loss.koleo_weight"],
    }
    if then != images and any(used.values()):
        names = " and ".join(name for name, is_used in used.items() if is_used)
        passes = f"{names} had {plural(then, 'image')} per forward pass and would now have {images}"
        yield f"{passes} ({how}){advice}"
