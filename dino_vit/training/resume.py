"""What must still be as it was when a run resumes, and what is set aside."""

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from dino_vit.config.complete import DecidedRun
from dino_vit.config.facts import CheckpointFacts
from dino_vit.config.inherited import check_same
from dino_vit.core import log
from dino_vit.core.checkpoint import Checkpoint
from dino_vit.core.distributed import world_size
from dino_vit.core.text import plural
from dino_vit.training.inputs import Inputs
from dino_vit.training.state import TrainingState

# The records of a run beside its checkpoints, which are set aside with them.
RECORDS = "config.yaml", "starts.jsonl", "metrics.jsonl", "baseline.json", "unreadable.txt"


def check_same_run(run: DecidedRun, before: CheckpointFacts, inputs: Inputs) -> None:
    """Check that a run resumes with the images, batches and precision that it started with."""
    assert inputs.checkpoint is not None
    check_same(run.config, before.step, [*_changes(run, before, inputs, inputs.checkpoint)])


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
    log.warning("%s was evaluated with other images or labels: its figures so far are set aside", folder)
    state.evaluations.best = state.evaluations.best_written = None
    if state.accelerator.is_main_process:
        _set_aside(folder, ["metrics.jsonl", "baseline.json"])


def set_earlier_run_aside(folder: Path, settings: bytes) -> None:
    """Set aside the records of a run without checkpoints, in the folder of a new run.

    If the same run has begun and logged nothing, there is nothing to lose.
    """
    records = [path for name in RECORDS if (path := folder / name).is_file()]
    lost = [path for path in records if path.name != "starts.jsonl" and path.read_bytes() != settings]
    if lost:
        aside, names = _set_aside(folder, RECORDS), ", ".join(path.name for path in records)
        log.warning("%s has no checkpoint to resume from: moved %s to %s", folder, names, aside)


def _set_aside(folder: Path, names: Iterable[str]) -> Path:
    """Move files in the folder of a run to a new folder in it, and return that."""
    numbered = (folder / f"earlier-{number}" for number in count(1))
    aside = next(path for path in numbered if not path.exists())
    aside.mkdir()
    for name in names:
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    return aside


def _changes(
    run: DecidedRun, checkpoint: CheckpointFacts, inputs: Inputs, resumed: Checkpoint
) -> Iterator[str]:
    """Yield what has changed beside settings: what they stand for, and the batches of a forward pass."""
    config, metadata, before = run.config, resumed.metadata, checkpoint.settings
    wanted = config.compute.precision
    if metadata["precision"] != run.precision and wanted == before["compute.precision"]:
        yield f"compute.precision={wanted} was {metadata['precision']} and is {run.precision} here"
    if metadata["source"] != inputs.source.fingerprint:
        yield f"the images of {config.data.images} are not those that it has learned from so far"
    networks = {"frozen_teacher": f"teacher.weights={config.teacher.weights}"}
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
        "Sinkhorn-Knopp": "ema" not in (config.loss.centering, before["loss.centering"]),
        "KoLeo": config.loss.koleo_weight and before["loss.koleo_weight"],
        "edges": config.loss.edge_weight and before["loss.edge_weight"],
    }
    if then != images and any(used.values()):
        names = ", ".join(name for name, is_used in used.items() if is_used)
        passes = f"{names} had {plural(then, 'image')} per forward pass and would now have {images}"
        yield f"{passes} ({how}){advice}"
