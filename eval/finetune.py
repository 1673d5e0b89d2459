"""Supervised training of a whole network with a classifier, from trained weights.

    python eval/finetune.py imagenet/val train=imagenet/train weights=runs/vits16 output=runs/finetuned
    accelerate launch eval/finetune.py ...

AdamW with a learning rate that decays from the classifier to the patch embedding, a cosine after a warm-up,
label smoothing, stochastic depth (Touvron et al., 2021; Bao et al., 2022). The state is saved after every
epoch, and training resumes from there.

Published top-1 on ImageNet in %: a ViT-S/16 from DINO's weights 81.5 (Caron et al., 2021, table 6).
"""

import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor

from dino_vit.cli import run_program
from dino_vit.config.commands import KnnConfig, Network, SupervisedConfig
from dino_vit.config.loading import load
from dino_vit.config.pretrain import in_steps
from dino_vit.config.sections import PositiveShare, Share
from dino_vit.config.settings import (
    BelowOne,
    Count,
    Dimension,
    FewOrZero,
    NonNegative,
    Positive,
    Probability,
    Side,
    setting,
)
from dino_vit.core import height_width, log
from dino_vit.core.distributed import all_gather, is_main_process, rank, rank_slice, world_size
from dino_vit.core.process import locked
from dino_vit.core.randomness import RngPurpose, derive_seed
from dino_vit.core.runtime import choose_precision, start_processes
from dino_vit.core.text import plural
from dino_vit.eval.knn import judge
from dino_vit.eval.results import EvaluationResult, Judged, conclude, judge_classes
from dino_vit.eval.sets import LabelledFeatures, labelled_features, open_sets
from dino_vit.eval.statistics import TOP_K, Figure, accuracy
from dino_vit.features.frozen import FrozenBackbone, frozen_backbone
from dino_vit.method import optim
from dino_vit.method.optim import warmup_cosine
from dino_vit.models.backbone import Backbone
from dino_vit.models.head import convert_sync_batchnorm
from dino_vit.views.augment import ViewAugment
from dino_vit.views.build import rotated
from dino_vit.views.eval_transform import eval_transform_of
from dino_vit.views.geometry import View
from dino_vit.weights import load_backbone, save_backbone
from supervised import EpochTraining, SupervisedLoader, require_one_class

MIN_LR = 1e-6  # at the end
NEIGHBOURS = 20
RESULTS, WEIGHTS = "eval/finetune.json", "backbone.safetensors"  # in the folder of a run that is done


class FinetuneConfig(SupervisedConfig):
    """Train a whole network with a classifier on labelled images."""

    positional: ClassVar = ("source", "weights")
    resumes: ClassVar = True
    weights: str = Field(description="run folder or weights file to start from")
    network: Network = setting("teacher", "network of a checkpoint to start from")
    size: Side | None = setting(None, "pixels: side, or [height, width]; null: that of the weights")
    output: str = setting("runs/finetune", "folder of the run; an unfinished run resumes", resumable=True)
    batch_size: Dimension = setting(64, "images per process and step")
    workers: FewOrZero | None = setting(None, "DataLoader workers; null: by the cores", resumable=True)
    epochs: Count = setting(100, "passes over the images")
    lr: Positive = setting(5e-4, "peak learning rate of the classifier at a global batch of 256")
    warmup_epochs: NonNegative = setting(5.0, "epochs of linear warm-up")
    layer_decay: PositiveShare = setting(0.75, "factor on lr per block towards the input; 1: none")
    weight_decay: NonNegative = setting(0.05, "of matrices, not of biases")
    clip: Positive = setting(1.0, "maximum norm of all gradients together")
    drop_path: BelowOne = setting(0.1, "stochastic depth of the last block")
    smoothing: BelowOne = setting(0.1, "label smoothing: share of the target spread over all classes")
    crop: Share = setting((0.08, 1.0), "share of the image's area, from and to")
    flip: Probability = setting(0.5, "probability of a horizontal flip")
    vertical_flip: Probability = setting(0.0, "probability of a vertical flip")
    rotation: Annotated[float, Field(ge=0, le=180)] = setting(0.0, "degrees either way; 90: quarter turns")
    precision: Literal["auto", "no", "bf16"] = setting("auto", "auto: bf16 where the hardware has it")


def run(config: FinetuneConfig) -> EvaluationResult:
    """Train from where the output folder left off, and write the results once the last epoch is done."""
    accelerator = start_processes()
    if config.warmup_epochs >= config.epochs:
        config = load(FinetuneConfig, config, {"warmup_epochs": config.epochs / 10})
        log.info("warmup_epochs=%g, in proportion to epochs=%d", config.warmup_epochs, config.epochs)
    with locked(Path(config.output)):
        tuning = Finetuning(config, accelerator)
        results = [Path(config.output) / name for name in (RESULTS, WEIGHTS)]
        if not tuning.history and (existing := next(filter(Path.exists, results), None)):
            raise ValueError(f"{existing} already exists, and is of no run here; give another output")
        # Of the weights as they are at the first start: a run that they are of may go on.
        tuning.before = tuning.before or _before(tuning)
        tuning.run(config.epochs)
    result = _result(tuning)
    accelerator.wait_for_everyone()
    return result


class Finetuning(EpochTraining):
    """A fine-tuning run."""

    def __init__(self, config: FinetuneConfig, accelerator: Accelerator) -> None:
        self.config = config
        self.train, self.val = open_sets(config)
        require_one_class(self.train, "eval/finetune.py")
        torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK))
        self.model = build_model(config, len(self.train.classes)).to(accelerator.device)
        bf16 = choose_precision(config.precision, accelerator.device) == "bf16"
        transform = eval_transform_of(self.model)
        self.evaluated = FrozenBackbone(  # as it is at the end of an epoch
            model=self.model,
            transform=transform,
            batch_size=config.batch_size,
            autocast=torch.bfloat16 if bf16 else None,  # without a gradient scaler there is no float16
        )
        # What the steps call: in several processes the model inside DistributedDataParallel.
        self.wrapped = accelerator.prepare_model(self.model) if world_size() > 1 else self.model
        groups = optim.parameter_groups(self.model, layer_decay=config.layer_decay)
        optimizer = optim.build_optimizer("adamw", groups)
        augment = ViewAugment(flip=config.flip, vertical_flip=config.vertical_flip)
        augment = rotated(augment, config.rotation, transform.size)
        view = View(size=transform.size, scale=config.crop, augment=augment)
        loader = SupervisedLoader(
            self.train, self.evaluated, view=view, seed=config.seed, workers=config.workers
        )
        facts = {
            "config": config.model_dump(mode="json", exclude={"output", "workers"}),
            "sets": [subset.fingerprint for subset in (self.train, self.val)],
            "classes": self.train.classes,
            "global_batch": loader.global_batch,
            "precision": str(self.evaluated.autocast),
        }
        super().__init__(Path(config.output) / "state", loader, self.model, optimizer, facts)
        kept = self.history[0].get("knn_before") if self.history else None
        # k-NN before the first step
        self.before = accuracy(kept["correct"], kept["images"]) if kept else None

    def take_step(self, images: Tensor, targets: Tensor, step: int) -> Tensor:
        config, steps = self.config, self.loader.steps_per_epoch
        # Stochastic depth is a function of (seed, step, rank), so that a resumed run draws the same.
        torch.manual_seed(derive_seed(config.seed, RngPurpose.NETWORK, step, rank()))
        rate = warmup_cosine(
            step,
            base=config.lr * self.loader.global_batch / 256,
            final=MIN_LR,
            total=config.epochs * steps,
            warmup=round(in_steps(config.warmup_epochs, steps)),
        )
        optim.set_rates(self.optimizer, lr=rate, weight_decay=config.weight_decay)
        autocast = self.evaluated.autocast
        with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
            logits = self.wrapped(images)
        loss = F.cross_entropy(logits.float(), targets, label_smoothing=config.smoothing)
        torch.autograd.backward(loss)
        norm = optim.clip_gradients([list(self.model.parameters())], mode="global", max_norm=config.clip)
        mean, finite = optim.reduce_loss(loss, norm)
        optim.step_if_finite(self.optimizer, finite)
        self.optimizer.zero_grad(set_to_none=True)
        return mean

    def judge(self) -> Judged:
        """Classify the evaluation images, which the processes share."""
        features = self.evaluated.extract(self.val.images, rank_slice(range(len(self.val))))
        with torch.no_grad():
            ranked = self.model.head(features.values).topk(min(TOP_K, len(self.val.classes))).indices
        rows = all_gather(features.indices).numpy()
        targets = torch.from_numpy(self.val.targets[rows])
        values, indices = all_gather(features.values), self.val.indices[rows]
        return judge_classes(LabelledFeatures(values, targets, indices, self.val.classes), all_gather(ranked))

    def evaluate(self) -> dict[str, Any]:
        """Return the figures after an epoch."""
        figures: dict[str, Any] = self.judge().figures
        return figures if self.history else {**figures, "knn_before": self.before}


def build_model(config: FinetuneConfig, classes: int) -> Backbone:
    """Return the network to start from, with a new classifier."""
    overrides: dict[str, Any] = {"image_size": height_width(config.size)} if config.size else {}
    model = load_backbone(config.weights, network=config.network, drop_path=config.drop_path, **overrides)
    if (token := getattr(model, "mask_token", None)) is not None:  # no patch is masked
        token.requires_grad_(False)
    model.add_classifier(classes)
    convert_sync_batchnorm(model)
    return model.train()


def _before(tuning: Finetuning) -> Figure:
    """Classify the evaluation images by k-NN on the network that the training started from."""
    config = tuning.config
    names = ("source", "weights", "network", "size", "batch_size", "precision")
    frozen = frozen_backbone(KnnConfig(**config.model_dump(include=set(names))))
    bank, queries = (labelled_features(frozen, images) for images in (tuning.train, tuning.val))
    return judge(bank, queries, [NEIGHBOURS], frozen.device)[NEIGHBOURS].measured.figure


def _result(tuning: Finetuning) -> EvaluationResult:
    """Write the network and the results of the last epoch."""
    folder, facts, history = Path(tuning.config.output), tuning.facts, tuning.history
    weights, transform = folder / WEIGHTS, tuning.evaluated.transform
    if is_main_process():
        save_backbone(
            tuning.model,
            weights,
            mean=transform.mean,
            std=transform.std,
            bits=transform.pixels.bits,
            range=transform.pixels.range,
            network="classifier",
            step=len(history) * tuning.loader.steps_per_epoch,
            config={**facts["config"], "classes": facts["classes"]},
        )
    judged, before = tuning.judge(), tuning.before
    assert before
    details = {**facts, "settings": facts["config"], "history": history, "knn_before": before}
    low = ": fine-tuning ends below it, so try more epochs, or classify with `dino-vit linear`"
    advice = low if judged.measured.figure.value < before.value else ""
    text = (
        f"after {plural(len(history), 'epoch')}: {judged.summary}\n"
        f"k-NN of the network before fine-tuning: {before} %{advice}\n"
        f"{weights}: the network, for load_backbone({str(folder)!r}, num_classes={len(facts['classes'])})"
    )
    return conclude("finetune", folder / RESULTS, "top-1", judged, details, [text])


if __name__ == "__main__":
    sys.exit(run_program(FinetuneConfig, run))
