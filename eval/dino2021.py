"""Linear classification by the protocol of 2021 (Caron et al., 2021, table 2): a head on augmented views.

    python eval/dino2021.py imagenet/val train=imagenet/train weights=runs/vits16
    accelerate launch eval/dino2021.py ...

The frozen backbone is run at every step, on random resized crops and flips; one head is trained for 100
epochs by SGD with momentum, whose learning rate follows a cosine from epoch to epoch. It reads the CLS tokens
of the last 4 blocks of a ViT-S; for a ViT-B give blocks=1 mean=true. The head is written beside the results
as the reference does, and after every epoch its state to a folder ending in `.state`, from which training
resumes.

Published top-1 on ImageNet in %: ViT-S/16 of 100 epochs 74.0, of 300 epochs 76.0; the released ViT-S/16 77.0,
S/8 79.7, B/16 78.2, B/8 80.1.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.cli import run_program
from dino_vit.config.commands import RESULTS, CachedConfig, JsonFile, SupervisedConfig
from dino_vit.config.outputs import check_outputs
from dino_vit.config.settings import Count, Few, FewOrZero, Positive, setting
from dino_vit.core.distributed import all_reduce_mean, is_main_process
from dino_vit.core.invocation import after_figures
from dino_vit.core.storage import pickled, write_bytes
from dino_vit.core.text import plural
from dino_vit.eval.linear import count_correct, judge_head
from dino_vit.eval.results import EvaluationResult, conclude, output_of
from dino_vit.eval.sets import LabelledSubset, labelled_features, open_sets
from dino_vit.features.frozen import FrozenBackbone, frozen_backbone
from dino_vit.method.optim import warmup_cosine
from dino_vit.models.backbone import FeatureSpec
from dino_vit.models.classifiers import LinearHeads
from dino_vit.views.augment import ViewAugment
from dino_vit.views.geometry import View
from supervised import MOMENTUM, EpochTraining, SupervisedLoader, initial_weight, require_one_class


class Dino2021Config(SupervisedConfig, CachedConfig):
    """Judge a frozen backbone by a linear head that is trained on augmented views."""

    writes: ClassVar = "eval/dino2021"
    blocks: Few = setting(4, "read the CLS tokens of this many last blocks; 4 for a ViT-S, 1 for a ViT-B")
    mean: bool = setting(False, "also read the mean patch token, interleaved; needs blocks=1; for a ViT-B")
    lr: Positive = setting(1e-3, "learning rate at a global batch of 256")
    epochs: Count = setting(100, "passes over the training images")
    workers: FewOrZero | None = setting(None, "DataLoader workers; null: by the cores", resumable=True)
    output: JsonFile | None = RESULTS

    def contradictions(self) -> Iterator[str]:
        """Yield what the published heads do not read."""
        yield from super().contradictions()
        if self.mean and self.blocks != 1:
            yield f"mean=true needs blocks=1, not {self.blocks}"


def run(config: Dino2021Config) -> EvaluationResult:
    """Train the head, evaluate it after every epoch, and write the head and the JSON."""
    frozen = frozen_backbone(config)
    output = output_of(config, frozen.model.provenance.source)
    head = output.with_suffix(".pth")
    if config.output:
        check_outputs(config, head)
    train, val = open_sets(config)
    require_one_class(train, "eval/dino2021.py")
    training = HeadTraining(config, frozen, train, val, output.with_suffix(".state"))
    training.run(config.epochs)
    if is_main_process():  # in the reference's format
        tensors = {f"module.linear.{name}": tensor for name, tensor in training.module.state_dict().items()}
        with after_figures():
            write_bytes(head, pickled({"state_dict": tensors}))
    judged = judge_head(training.head, training.val)
    percents = [epoch["percent"] for epoch in training.history]
    best = max(percents)
    details = {
        "weights": frozen.describe_weights(),
        "settings": config.model_dump(mode="json"),
        "images": len(training.val),
        "classes": len(train.classes),
        "head": str(head),
        "percents": percents,
    }
    text = (
        f"{judged.summary}\n"
        f"trained on {plural(len(train), 'image')} for {plural(config.epochs, 'epoch')}; best after "
        f"epoch {percents.index(best) + 1}: {best:.2f} %, the figure that the 2021 code reports\n{head}"
    )
    return conclude("dino2021", output, "linear top-1", judged, details, [text])


class HeadTraining(EpochTraining):
    """A head in training on augmented views of the images."""

    def __init__(
        self,
        config: Dino2021Config,
        frozen: FrozenBackbone,
        train: LabelledSubset,
        val: LabelledSubset,
        folder: Path,
    ) -> None:
        self.config, self.frozen = config, frozen
        self.spec = FeatureSpec(tokens="cls+mean" if config.mean else "cls", blocks=config.blocks)
        on_val = labelled_features(frozen, val, self.spec, "evaluation features")
        self.val = replace(on_val, features=self.arrange(on_val.features))
        augment = ViewAugment(flip=0.5)
        size = frozen.transform.size
        view = View(size=size, scale=(0.08, 1.0), augment=augment, interpolation="bilinear")
        loader = SupervisedLoader(
            train, frozen, view=view, seed=config.seed, workers=config.workers, keep_last=True
        )
        inputs, classes = self.val.features.shape[1], len(train.classes)
        probe = nn.Linear(inputs, classes, device=frozen.device)
        weight = initial_weight(classes, inputs, config.seed)
        probe.load_state_dict({"weight": weight, "bias": torch.zeros(classes)})
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.0, momentum=MOMENTUM)
        for parameter in probe.parameters():  # a checkpoint has the same tensors after every epoch
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        weights = frozen.describe_weights()
        facts = {
            "weights": [weights["sha256"], weights["network"]],
            "sets": [subset.fingerprint for subset in (train, val)],
            "classes": train.classes,
            "settings": config.model_dump(include={"blocks", "mean", "lr", "epochs", "seed"}),
            "transform": asdict(frozen.transform),
            "global_batch": loader.global_batch,
        }
        super().__init__(folder, loader, probe, optimizer, facts)
        self.head = LinearHeads(probe.weight.detach()[None], probe.bias.detach()[None])  # a view of the probe

    def arrange(self, features: Tensor) -> Tensor:
        """Interleave CLS and mean patch token as the reference's heads read them: c0, p0, c1, p1, ..."""
        return rearrange(features, "b (token d) -> b (d token)", token=2) if self.config.mean else features

    def take_step(self, images: Tensor, targets: Tensor, step: int) -> Tensor:
        # The published code changes the rate once per epoch.
        epoch = step // self.loader.steps_per_epoch
        rate = warmup_cosine(epoch, base=self.config.lr, final=0.0, total=self.config.epochs)
        self.optimizer.param_groups[0]["lr"] = rate * self.loader.global_batch / 256
        features = self.arrange(self.frozen.compute(images, self.spec))
        loss = F.cross_entropy(self.module(features), targets)
        parameters = tuple(self.module.parameters())
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = all_reduce_mean(gradient)
        self.optimizer.step()
        return all_reduce_mean(loss.detach())

    def evaluate(self) -> dict[str, Any]:
        correct = int(count_correct(self.head, self.val.features, self.val.targets))
        return {"percent": 100 * correct / len(self.val)}


if __name__ == "__main__":
    sys.exit(run_program(Dino2021Config, run))
