"""What a run says of itself before its first step."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import torch

from dino_vit import __version__
from dino_vit.config import yaml
from dino_vit.core.runtime import cores_of_a_process, device_name
from dino_vit.training.diagnosis import Record
from dino_vit.training.opening import Opened


def start_record(opened: Opened) -> Record:
    """Return what `starts.jsonl` keeps of a start: when, from which step, on what, with which choices."""
    session, plan = opened.session, opened.session.plan
    return {
        "step": session.step,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "torch": torch.__version__,
        "device": device_name(session.device),
        "cores": cores_of_a_process(session.accelerator.num_processes),
        "processes": session.accelerator.num_processes,
        "precision": session.precision,
        "workers": session.loader.workers,
        "global_batch": plan.global_batch,
        "images": len(session.source),
        "steps_per_epoch": plan.steps_per_epoch,
        "total_steps": plan.total_steps,
        "parameters": {
            name: sum(parameter.numel() for parameter in part.parameters())
            for name, part in (("backbone", session.student.backbone), ("head", session.student.head))
        },
        "reasons": {choice.key: choice.reason for choice in opened.choices},
    }


def introduction(opened: Opened) -> Iterator[str]:
    """Yield the lines that tell who computes, what is learned from, with which network, and why so."""
    session, config, plan = opened.session, opened.session.config, opened.session.plan
    processes = session.accelerator.num_processes
    many = f"{processes} processes" if processes > 1 else "1 process"
    parts = f"{config.data.batch_size} images × {config.optim.accumulate} passes × {processes} processes"
    yield (
        f"dino-vit {__version__}: {many} on {session.device.type}, "
        f"precision {session.precision}, {session.loader.workers} loader workers each, "
        f"global batch {plan.global_batch} = {parts}"
    )
    yield (
        f"{len(session.source):,} images of {config.data.source}: {plan.steps_per_epoch:,} steps an epoch, "
        f"{plan.total_steps:,} steps ({plan.epochs:.4g} epochs), peak lr {plan.lr:.3g}"
    )
    yield from opened.images
    width, depth, heads = config.model.shape
    backbone, head = (
        sum(parameter.numel() for parameter in part.parameters()) / 1e6
        for part in (session.student.backbone, session.student.head)
    )
    views = config.views
    yield (
        f"ViT/{config.model.patch_size} of width {width}, {depth} blocks, {heads} heads "
        f"({backbone:.1f} M parameters, head {head:.1f} M); "
        f"views {views.global_count} × {views.global_size} px and {views.local_count} × {views.local_size} px"
    )
    for choice in opened.choices:
        yield f"  {choice.key}={yaml.write(choice.value)}: {choice.reason}"
    if opened.resumed:
        yield f"going on after step {session.step:,}, from {opened.resumed.path}"
