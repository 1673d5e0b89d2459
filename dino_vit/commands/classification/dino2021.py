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

from dino_vit.config.commands import Dino2021
from dino_vit.core.distributed import all_reduce_mean, is_main_process
from dino_vit.core.storage import pickled, write_bytes
from dino_vit.core.text import plural
from dino_vit.eval.accuracy import Predictions
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.labelled import LabelledSubset, labelled_features
from dino_vit.eval.linear import MOMENTUM, LinearHeads, count_correct, initial_weight, top_classes
from dino_vit.eval.supervised import EpochTraining, SupervisedLoader
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
    spec = FeatureSpec(tokens="cls+mean" if settings.mean else "cls", blocks=settings.blocks)

    def arrange(features: Tensor) -> Tensor:
        """Interleave CLS and mean patch token as the reference's heads read them: c0, p0, c1, p1, ..."""
        return rearrange(features, "b (token d) -> b (d token)", token=2) if settings.mean else features

    on_val = labelled_features(frozen, val, spec, "evaluation features")
    on_val = replace(on_val, features=arrange(on_val.features))
    loader = SupervisedLoader(
        train,
        frozen,
        view=View(
            size=frozen.transform.size,
            scale=(0.08, 1.0),
            augment=ViewAugment(flip=0.5),
            interpolation="bilinear",
        ),
        seed=seed,
        workers=settings.workers,
        keep_last=True,  # as the published code
    )
    inputs, classes = on_val.features.shape[1], len(train.classes)
    probe = nn.Linear(inputs, classes, device=frozen.device)
    probe.load_state_dict({"weight": initial_weight(classes, inputs, seed), "bias": torch.zeros(classes)})
    parameters = tuple(probe.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.0, momentum=MOMENTUM)
    for parameter in parameters:  # from the start: a checkpoint has the same tensors after every epoch
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
    training = EpochTraining(path.with_suffix(".state"), probe, optimizer, facts)
    head = LinearHeads(probe.weight.detach()[None], probe.bias.detach()[None])  # a view of the probe

    def take_step(images: Tensor, targets: Tensor, step: int) -> Tensor:
        # The published code changes the rate once per epoch.
        epoch = step // loader.steps_per_epoch
        rate = warmup_cosine(epoch, base=settings.lr, final=0.0, total=settings.epochs)
        optimizer.param_groups[0]["lr"] = rate * loader.global_batch / 256
        features = arrange(frozen.compute(images, spec))
        loss = F.cross_entropy(probe(features), targets)
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = all_reduce_mean(gradient)
        optimizer.step()
        return all_reduce_mean(loss.detach())

    def evaluate() -> dict[str, float]:
        correct = int(count_correct(head, on_val.features, on_val.targets))
        return {"percent": 100 * correct / len(on_val)}

    training.run(loader, settings.epochs, take_step=take_step, evaluate=evaluate)
    if is_main_process():  # in the reference's format
        tensors = {f"module.linear.{name}": tensor for name, tensor in probe.state_dict().items()}
        write_bytes(path, pickled({"state_dict": tensors}))
    predictions = on_val.predictions(top_classes(head, on_val.features))
    percents = [epoch["percent"] for epoch in training.history]
    counts, best = {"images": len(on_val), "classes": classes}, max(percents)
    results = {**counts, **predictions.figures(), "head": str(path), "percents": percents}
    text = (
        f"{predictions.summary()}\n"
        f"trained on {plural(len(train), 'image')} for {plural(settings.epochs, 'epoch')}; best after "
        f"epoch {percents.index(best) + 1}: {best:.2f} %, the figure that the 2021 code reports\n{path}"
    )
    return results, text, predictions
