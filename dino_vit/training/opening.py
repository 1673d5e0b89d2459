"""Build a session from its config: look at the images, fill in what is open, go on where the run stood."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from dino_vit.config.auto import Choice
from dino_vit.config.checks import Plan, check_run
from dino_vit.config.loading import replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import result_changes
from dino_vit.core.checkpoint import Checkpoint, Checkpoints
from dino_vit.core.distributed import all_gather
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import choose_precision
from dino_vit.data.sampling_weights import describe, fingerprint, read_weights
from dino_vit.data.sources.open import Source, open_source
from dino_vit.method.loss import Center
from dino_vit.method.optim import build_optimizer, parameter_groups
from dino_vit.models.pair import Network, build_networks
from dino_vit.models.vit import VisionTransformer
from dino_vit.training.feeding import build_augment, build_loader, choose_workers
from dino_vit.training.placing import resolve_place
from dino_vit.training.resolve import resolve
from dino_vit.training.state import Session
from dino_vit.weights import load_backbone

log = logging.getLogger("dino_vit")


class Opened(NamedTuple):
    """A session ready to run, what was chosen for it and seen of its images, and where it goes on from."""

    session: Session
    choices: list[Choice]
    images: list[str]
    resumed: Checkpoint | None


def open_session(config: PretrainConfig, accelerator: Accelerator) -> Opened:
    """Build a session; one whose output folder holds a run goes on with it."""
    source = open_source(config.data.source, config.data.labels)
    weights = read_weights(source, config.data.weights) if config.data.weights else None
    checkpoints = Checkpoints(Path(config.output), keep_every=config.run.keep_every)
    found = _find(checkpoints, config)
    _agree(found.step if found else 0, config, accelerator.device)
    trained = None if found or not config.init else _load_trained(config)
    architecture = found.metadata["architecture"] if found else trained.architecture if trained else None
    batch = found.metadata["global_batch"] if found else _global_batch(config, accelerator)
    config, choices, images = resolve(
        config, source, batch, architecture if config.init else None, found, accelerator.device
    )
    config, placed = resolve_place(
        config,
        found.metadata["config"]["data"]["photometry"] if found else None,
        source,
        workers=choose_workers(config, accelerator),
        device=accelerator.device,
    )
    if found:
        config = _as_before(config, found, source, weights, accelerator)
    plan = check_run(config, len(source), accelerator.num_processes)
    # A run from trained weights has their architecture, which may have more to it than the config can say.
    architecture = architecture if config.init and architecture else _architecture(config)
    session = _build(config, plan, source, weights, accelerator, checkpoints, architecture)
    if trained:
        for network in (session.student, session.teacher):
            network.backbone.load_state_dict(trained.state_dict())
    if found:
        session.restore(found)
    if weights is not None:
        images.append(describe(weights))
    return Opened(session, [*choices, *placed], images, found)


def _global_batch(config: PretrainConfig, accelerator: Accelerator) -> int:
    return config.data.batch_size * config.optim.accumulate * int(accelerator.num_processes)


def _find(checkpoints: Checkpoints, config: PretrainConfig) -> Checkpoint | None:
    if config.run.resume != "never":
        return checkpoints.newest()
    if checkpoints.paths():
        raise ValueError(
            f"{config.output} holds a run already, and run.resume=never would overwrite it; "
            "give another output, or move that folder away"
        )
    return None


def _agree(step: int, config: PretrainConfig, device: torch.device) -> None:
    """Check that all processes found the same: on a disk of its own, a node would begin anew in silence."""
    found = sorted(set(all_gather(torch.tensor([step], device=device)).tolist()))
    if len(found) > 1:
        raise ValueError(
            f"the processes of this run found it at different steps ({', '.join(map(str, found))}): "
            f"{config.output} must be one folder that all nodes see"
        )


def _load_trained(config: PretrainConfig) -> VisionTransformer:
    """Load the weights that `init` names, at the size and with the channels of the views."""
    assert config.init is not None
    size, channels = config.views.global_shape, config.data.channels
    return load_backbone(config.init.weights, image_size=size, channels=channels)


def _as_before(
    config: PretrainConfig,
    found: Checkpoint,
    source: Source,
    weights: NDArray[np.float64] | None,
    accelerator: Accelerator,
) -> PretrainConfig:
    """Check that a run goes on as it began, and keep its global batch on another number of processes."""
    before = PretrainConfig.model_validate(
        found.metadata["config"], strict=False
    )  # JSON has lists for tuples
    said = [f"{key} was {old} and is {new}" for key, (old, new) in result_changes(config, before).items()]
    precision = choose_precision(config.run.precision, accelerator.device)
    if found.metadata["precision"] != precision and config.run.precision == before.run.precision:
        said.append(
            f"run.precision={config.run.precision} was {found.metadata['precision']} and is {precision} here"
        )
    if found.metadata["source"] != source.fingerprint:
        said.append(f"the images of {config.data.source} are not those that it began with")
    if found.metadata.get("weights") != fingerprint(weights):
        said.append(f"data.weights={config.data.weights} does not weigh the images as it began")
    batch, share = found.metadata["global_batch"], config.data.batch_size * int(accelerator.num_processes)
    if batch % share:
        said.append(
            f"its global batch was {batch}, which {accelerator.num_processes} processes of "
            f"data.batch_size={config.data.batch_size} cannot make up"
        )
    if said and config.run.resume != "changed":
        raise ValueError(
            f"{config.output} holds a run at step {found.step} with other settings: {'; '.join(said)}. "
            "Give another output, or run.resume=changed to go on all the same"
        )
    if batch % share == 0 and batch // share != config.optim.accumulate:
        log.info("the run keeps its global batch of %d: optim.accumulate=%d", batch, batch // share)
        config = replace(config, {"optim.accumulate": batch // share})
    return config


def _architecture(config: PretrainConfig) -> dict[str, Any]:
    """Return the backbone's keywords as the config has them."""
    width, depth, heads = config.model.shape
    return {
        "image_size": config.views.global_shape,
        "patch_size": config.model.patch_size,
        "channels": config.data.channels,
        "width": width,
        "depth": depth,
        "heads": heads,
        "registers": config.model.registers,
    }


def build_untrained(
    config: PretrainConfig, architecture: Mapping[str, Any] | None = None
) -> tuple[Network, Network]:
    """Build student and teacher as a run begins, their parameters drawn from the seed."""
    torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
    known = architecture or _architecture(config)
    return build_networks(
        backbone={key: value for key, value in known.items() if key != "drop_path"},
        drop_path=config.model.drop_path,
        head=config.head.model_dump(),
    )


def _build(
    config: PretrainConfig,
    plan: Plan,
    source: Source,
    weights: NDArray[np.float64] | None,
    accelerator: Accelerator,
    checkpoints: Checkpoints,
    architecture: Mapping[str, Any],
) -> Session:
    """Build what a step touches, its parameters drawn from the seed."""
    device, loss = accelerator.device, config.loss
    student, teacher = build_untrained(config, architecture)
    student.backbone.checkpoint_blocks = config.model.checkpoint_blocks
    _place(student, teacher, config, accelerator)
    precision = choose_precision(config.run.precision, device)
    groups = parameter_groups(student.backbone, student.head, layer_decay=config.optim.layer_decay)
    return Session(
        config=config,
        plan=plan,
        accelerator=accelerator,
        precision=precision,
        source=source,
        loader=build_loader(config, plan, source, weights, accelerator),
        augment=build_augment(config).to(device),
        student=student,
        wrapped=accelerator.prepare_model(student) if accelerator.num_processes > 1 else student,
        teacher=teacher,
        center=Center(prototypes=config.head.prototypes, momentum=loss.center_momentum).to(device),
        optimizer=build_optimizer(config.optim.name, groups),
        scaler=torch.amp.GradScaler(device.type, enabled=precision == "fp16"),
        checkpoints=checkpoints,
    )


def _place(student: Network, teacher: Network, config: PretrainConfig, accelerator: Accelerator) -> None:
    """Put both networks on the device, with the options that change how they compute but not what."""
    if config.head.batch_norm and accelerator.num_processes > 1 and accelerator.device.type != "cuda":
        raise ValueError(
            "head.batch_norm=true over several processes needs GPUs: elsewhere torch cannot take the "
            "statistics over all of them. Use one process, or head.batch_norm=false"
        )
    for network in (student, teacher):
        if config.head.batch_norm and accelerator.num_processes > 1:
            convert = torch.nn.SyncBatchNorm.convert_sync_batchnorm
            network.head = convert(network.head)  # type: ignore[no-untyped-call]
        network.to(accelerator.device)
        if config.run.compile:
            network.compile(dynamic=False)
