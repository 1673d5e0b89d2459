"""The linear evaluation of 2021: one head on augmented views, the frozen backbone run at every step.

SGD with momentum, a learning rate that follows a cosine from epoch to epoch, random resized crops and flips.
After every epoch the state is saved, from which training resumes; the head at the end, as the reference does.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from dino_vit.commands.classification.supervised import EpochTraining, SupervisedLoader
from dino_vit.config.commands import Dino2021
from dino_vit.core.distributed import all_reduce_mean, is_main_process
from dino_vit.core.storage import pickled, write_bytes
from dino_vit.core.text import plural
from dino_vit.eval.accuracy import Predictions
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.labelled import LabelledSubset, labelled_features
from dino_vit.eval.linear import MOMENTUM, LinearHeads, count_correct, initial_weight, top_classes
from dino_vit.method.schedules import warmup_cosine
from dino_vit.models.tokens import FeatureSpec
from dino_vit.views.augment import ViewAugment
from dino_vit.views.geometry import View


def train_on_views(
    settings: Dino2021,
    frozen: FrozenBackbone,
    train: LabelledSubset,
    val: LabelledSubset,
    seed: int,
    path: Path,
) -> tuple[dict[str, Any], str, Predictions]:
    """Train one head and evaluate it after every epoch; return results, a text and the last predictions.

    The head is written to `path`, and the state to the folder beside it whose name ends in `.state`.
    """
    training = HeadTraining(settings, frozen, train, val, seed, path.with_suffix(".state"))
    training.run(settings.epochs)
    if is_main_process():  # in the reference's format
        tensors = {f"module.linear.{name}": tensor for name, tensor in training.module.state_dict().items()}
        write_bytes(path, pickled({"state_dict": tensors}))
    predictions = training.val.predictions(top_classes(training.head, training.val.features))
    percents = [epoch["percent"] for epoch in training.history]
    counts, best = {"images": len(training.val), "classes": len(train.classes)}, max(percents)
    results = {**counts, **predictions.figures(), "head": str(path), "percents": percents}
    text = (
        f"{predictions.summary()}\n"
        f"trained on {plural(len(train), 'image')} for {plural(settings.epochs, 'epoch')}; best after "
        f"epoch {percents.index(best) + 1}: {best:.2f} %, the figure that the 2021 code reports\n{path}"
    )
    return results, text, predictions


class HeadTraining(EpochTraining):
    """A head in training on augmented views of the images."""

    def __init__(
        self,
        settings: Dino2021,
        frozen: FrozenBackbone,
        train: LabelledSubset,
        val: LabelledSubset,
        seed: int,
        folder: Path,
    ) -> None:
        self.settings, self.frozen = settings, frozen
        self.spec = FeatureSpec(tokens="cls+mean" if settings.mean else "cls", blocks=settings.blocks)
        on_val = labelled_features(frozen, val, self.spec, "evaluation features")
        self.val = replace(on_val, features=self.arrange(on_val.features))
        view = View(
            size=frozen.transform.size,
            scale=(0.08, 1.0),
            augment=ViewAugment(flip=0.5),
            interpolation="bilinear",
        )
        workers = settings.workers
        loader = SupervisedLoader(train, frozen, view=view, seed=seed, workers=workers, keep_last=True)
        inputs, classes = self.val.features.shape[1], len(train.classes)
        probe = nn.Linear(inputs, classes, device=frozen.device)
        probe.load_state_dict({"weight": initial_weight(classes, inputs, seed), "bias": torch.zeros(classes)})
        optimizer = torch.optim.SGD(probe.parameters(), lr=0.0, momentum=MOMENTUM)
        for parameter in probe.parameters():  # a checkpoint has the same tensors after every epoch
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        weights = frozen.describe_weights()
        facts = {
            "weights": [weights["sha256"], weights["network"]],
            "sets": [subset.fingerprint for subset in (train, val)],
            "classes": train.classes,
            "settings": settings.model_dump(exclude={"workers"}),
            "transform": asdict(frozen.transform),
            "global_batch": loader.global_batch,
            "seed": seed,
        }
        super().__init__(folder, loader, probe, optimizer, facts)
        self.head = LinearHeads(probe.weight.detach()[None], probe.bias.detach()[None])  # a view of the probe

    def arrange(self, features: Tensor) -> Tensor:
        """Interleave CLS and mean patch token as the reference's heads read them: c0, p0, c1, p1, ..."""
        return rearrange(features, "b (token d) -> b (d token)", token=2) if self.settings.mean else features

    def take_step(self, images: Tensor, targets: Tensor, step: int) -> Tensor:
        # The published code changes the rate once per epoch.
        epoch = step // self.loader.steps_per_epoch
        rate = warmup_cosine(epoch, base=self.settings.lr, final=0.0, total=self.settings.epochs)
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
