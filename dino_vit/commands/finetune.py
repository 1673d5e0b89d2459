"""Fine-tune a whole network on labelled images, and write the network and its accuracies."""

from __future__ import annotations

from pathlib import Path

from dino_vit.core.distributed import is_main_process
from dino_vit.core.runtime import Interruption, start_processes
from dino_vit.eval.accuracy import Accuracy, write_results
from dino_vit.eval.finetuning import FinetuneConfig, Finetuning
from dino_vit.eval.linear.probes import TOP_K
from dino_vit.weights import save_backbone


def run(config: FinetuneConfig) -> int:
    """Train from where the output folder left off, and write the results once the last epoch is done."""
    accelerator = start_processes(trackers=(), folder=Path(config.output))
    tuning = Finetuning(config, accelerator)
    with Interruption() as interruption:
        finished = tuning.train(interruption)
    if finished and is_main_process():
        _write(tuning)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return 0 if finished else interruption.exit_code


def _write(tuning: Finetuning) -> None:
    """Write the network and the results, and print a summary."""
    folder, last, pixels = Path(tuning.config.output), tuning.history[-1], tuning.preparation.pixels
    facts = tuning.facts()
    save_backbone(
        tuning.model,
        folder / "backbone.safetensors",
        mean=tuning.preparation.mean,
        std=tuning.preparation.std,
        bits=pixels.bits,
        range=pixels.range,
        network="classifier",
        step=tuning.step,
        config={**facts["config"], "classes": facts["classes"]},
    )
    write_results(folder / "eval" / "finetune.json", {**facts, "history": tuning.history, "last": last})
    top1, top5 = (Accuracy(**last[f"top{k}"]) for k in (1, TOP_K))
    classes = len(facts["classes"])
    print(
        f"after {tuning.epoch} {'epoch' if tuning.epoch == 1 else 'epochs'}: top-1 {top1}, top-5 {top5} of "
        f"{top1.images:,} images of {classes} classes\n{folder / 'backbone.safetensors'}: the network, for "
        f"load_backbone({str(folder)!r}, num_classes={classes})"
    )
