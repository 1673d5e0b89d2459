"""What a checkpoint must hold for a run to resume from it, and what must still be as it was."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, ValidationError

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import result_changes
from dino_vit.core.checkpoint import Checkpoint, Checkpoints
from dino_vit.core.distributed import all_equal
from dino_vit.core.runtime import choose_precision
from dino_vit.core.text import brief, plural
from dino_vit.data.labels import sampling_fingerprint
from dino_vit.training.metrics import Count
from dino_vit.training.resolve import RunContext, started_config


class Best(BaseModel):
    """The best evaluation of a run."""

    figure: str
    value: float
    step: Count


def _stored_config(stored: object) -> object:
    return load(PretrainConfig, None, stored) if isinstance(stored, dict) else stored


class RunMetadata(BaseModel):
    """What a run resumes from, in the metadata of a checkpoint."""

    step: Count
    global_batch: Annotated[Count, Field(gt=0)]
    nonfinite_steps: Count
    precision: str
    source: str
    config: Annotated[PretrainConfig, BeforeValidator(_stored_config)]
    architecture: dict[str, Any]
    scaler: dict[str, float]
    interval: dict[str, FiniteFloat]
    total_steps: Annotated[Count, Field(gt=0)]
    seconds: Annotated[FiniteFloat, Field(ge=0)]
    frozen: str | None = None  # digest of the weights of a frozen teacher
    best: Best | None = None


def find_checkpoint(config: PretrainConfig) -> Checkpoint | None:
    """Return the checkpoint to resume from, which must be the same one in all processes."""
    checkpoints = Checkpoints(Path(config.output))
    if config.run.resume == "never" and checkpoints.paths():
        raise ValueError(
            f"{config.output} already holds a run, and run.resume=never does not overwrite it; "
            "give another output, or move that folder away"
        )
    newest = checkpoints.newest()
    resumed = newest and check_resumable(newest)
    if not all_equal(resumed.step if resumed else 0):
        raise ValueError(
            f"the processes found this run at different steps; {config.output} must be one folder that "
            "all nodes share"
        )
    return resumed


def check_resumable(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint whose metadata has what a run resumes from, or raise."""
    try:
        checked = RunMetadata.model_validate(checkpoint.metadata, strict=False)  # JSON has no tuples
    except ValidationError as error:
        wrong = dict.fromkeys(".".join(map(str, problem["loc"])) for problem in error.errors())
        raise ValueError(
            f"{checkpoint.path} is not a checkpoint of a pretraining: its metadata has no valid "
            f"{brief(', '.join(wrong))}; give another output, or move that folder away"
        ) from error
    values = checked.model_dump(exclude={"config"})
    return replace(checkpoint, metadata={**checkpoint.metadata, **values})


def check_same_run(config: PretrainConfig, context: RunContext, resumed: Checkpoint) -> None:
    """Check that a run resumes with the settings, images and precision that it started with."""
    before = started_config(resumed)
    changes = [f"{key} was {old} and is {new}" for key, (old, new) in result_changes(config, before).items()]
    changes += _changes_outside(config, context, resumed, before)
    changes += _changes_of_batch(config, context, resumed, before)
    if changes and config.run.resume != "changed":
        raise ValueError(
            f"{config.output} holds a run at step {resumed.step} with other settings: {'; '.join(changes)}. "
            "Give another output, or run.resume=changed to resume anyway"
        )
    _check_parts(config, context, resumed, before)


def _changes_outside(
    config: PretrainConfig, context: RunContext, resumed: Checkpoint, before: PretrainConfig
) -> Iterator[str]:
    """Yield what has changed though its setting has not."""
    metadata, wanted = resumed.metadata, config.run.precision
    precision = choose_precision(wanted, context.device)
    if metadata["precision"] != precision and wanted == before.run.precision:
        yield f"run.precision={wanted} was {metadata['precision']} and is {precision} here"
    if metadata["source"] != context.source.fingerprint:
        yield f"the images of {config.data.source} have changed"
    if metadata.get("weights") != sampling_fingerprint(context.sampling):
        yield f"the sampling weights have changed (data.weights={config.data.weights})"
    if metadata.get("frozen") != (context.frozen and context.frozen.sha256):
        yield (
            f"the weights of teacher.weights={config.teacher.weights} have changed (of a run that goes on, "
            "give a checkpoint that is kept)"
        )


def _changes_of_batch(
    config: PretrainConfig, context: RunContext, resumed: Checkpoint, before: PretrainConfig
) -> Iterator[str]:
    """Yield how the batches differ for what looks at all images of a forward pass, or cannot be made up."""
    batch, now = resumed.metadata["global_batch"], config.data.batch_size * context.processes
    then = batch // before.optim.accumulate
    how = f"data.batch_size={config.data.batch_size} on {plural(context.processes, 'process', 'processes')}"
    if batch % now:
        yield f"its global batch was {batch}, which is not a multiple of {now} ({how})"
    if then == now:
        return
    norms = any(name.startswith("student.") and name.endswith(".running_mean") for name in resumed.tensors)
    sinkhorn = config.loss.centering == before.loss.centering == "sinkhorn"
    koleo = config.loss.koleo_weight and before.loss.koleo_weight
    for name, used in (("BatchNorm", norms), ("Sinkhorn-Knopp", sinkhorn), ("KoLeo", koleo)):
        if used:
            yield f"{name} used {plural(then, 'image')} per forward pass and would now use {now} ({how})"


def _check_parts(
    config: PretrainConfig, context: RunContext, resumed: Checkpoint, before: PretrainConfig
) -> None:
    """Check that a run resumes with networks of the same parts."""
    imitates = context.imitated is not None
    now = imitates, imitates and config.teacher.patch_weight > 0, config.loss.patch_weight > 0
    imitated = (f"student.{head}.linear.weight" in resumed.tensors for head in ("head", "patch_head"))
    if (*now, config.head.shared) != (*imitated, before.loss.patch_weight > 0, before.head.shared):
        raise ValueError(
            f"{config.output} holds a run whose networks have other parts: loss.patch_weight adds a mask "
            "token, head.shared=false a head, teacher.weights without heads others, and none can come or go "
            f"halfway. Start another run from its weights: another output and init.weights={config.output}"
        )
