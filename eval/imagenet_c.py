"""Classification of corrupted images, ImageNet-C (Hendrycks and Dietterich, 2019), by frozen features.

    python eval/imagenet_c.py imagenet-c train=imagenet/train val=imagenet/val weights=runs/vitb16
    accelerate launch eval/imagenet_c.py imagenet-c train=... val=... weights=... classifier=knn

`imagenet-c` is the published folder: KIND/SEVERITY/CLASS/*.JPEG with 15 kinds of corruption, such as
gaussian_noise, and severities 1 to 5; any folder of this form will do, with fewer kinds too. The classifier
is made from clean images of `train`: a linear one, whose learning rate is the best on a held-out tenth of
them, or weighted k-NN (k = 20). The error of a kind is the mean over its severities; mCE is the mean over the
kinds of (error / AlexNet's error). Images are cut as for other evaluations; those of ImageNet-C have 224
pixels already.

Published mCE: AlexNet 100 by definition, ResNet-50 76.7 (both supervised); linear classifiers on frozen
features (Oquab et al., 2023): DINO ViT-B/8 56.6, iBOT ViT-L/16 43.9, DINOv2 ViT-L/14 31.5, ViT-g/14 28.2.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from dino_vit.cli import run_program
from dino_vit.commands import Written
from dino_vit.config.commands import RESULTS, CachedConfig, JsonFile
from dino_vit.config.settings import NonEmpty, Positive, Seed, setting
from dino_vit.core import log
from dino_vit.core.text import format_table
from dino_vit.data.sources.open import open_source
from dino_vit.eval.classification.probes import count_correct, top_classes, train_heads
from dino_vit.eval.features import FrozenBackbone, frozen_backbone
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.results import output_of, write_results
from dino_vit.eval.sets import LabelledFeatures, LabelledSubset, hold_out, labelled_features, open_subset

# Mean error of AlexNet over the severities, as published.
ALEXNET = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}
NEIGHBOURS = 20

Classifier = Callable[[LabelledFeatures], Tensor]  # the classes of images, by their features


class ImageNetCConfig(CachedConfig):
    """Judge a frozen backbone by the classification of corrupted images."""

    train: str = Field(description="clean labelled images that the classifier is made from")
    val: str | None = setting(None, "clean labelled images, to compare with")
    classifier: Literal["linear", "knn"] = setting("linear", "what is made from the features")
    rates: NonEmpty[Positive] = setting(
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), "learning rates at a batch of 256"
    )
    seed: Seed = setting(0, "of all random numbers")
    output: JsonFile | None = RESULTS
    writes: ClassVar = "eval/imagenet-c"


def make_classifier(
    config: ImageNetCConfig, train: LabelledFeatures, classes: int, device: torch.device
) -> Classifier:
    """Return a classifier made from features of clean images."""
    if config.classifier == "knn":
        return lambda images: weighted_knn(
            train.features, train.targets, images.features, k=[NEIGHBOURS], device=device
        )[NEIGHBOURS][:, 0]
    rest, held_out = hold_out(train, config.seed)
    (heads,) = train_heads(
        rest.features,
        rest.targets,
        columns=[slice(rest.features.shape[1])],
        rates=config.rates,
        classes=classes,
        steps=None,
        seed=config.seed,
        device=device,
    )
    correct = count_correct(heads, held_out.features, held_out.targets)
    best = int(correct.argmax())
    log.info("learning rate %g is the best on %d held-out images", config.rates[best], len(held_out))
    return lambda images: top_classes(heads, images.features, head=best, k=1)[:, 0]


def error_of(frozen: FrozenBackbone, spec: str, train: LabelledSubset, classify: Classifier) -> float:
    """Return the share in per cent of the images of a source that are classified wrongly."""
    features = labelled_features(
        frozen, open_subset(spec, open_source(spec)).with_classes_of(train), title=spec
    )
    wrong = classify(features).cpu() != features.targets.cpu()
    return 100 * float(wrong.double().mean())


def run(config: ImageNetCConfig) -> Written:
    """Classify the images of every kind and severity, and write the JSON."""
    folders: dict[str, list[Path]] = {}
    for folder in sorted(Path(config.source).glob("*/*/")):
        folders.setdefault(folder.parent.name, []).append(folder)
    if not folders:
        raise ValueError(f"{config.source} has no folders KIND/SEVERITY/CLASS, as ImageNet-C has")
    frozen = frozen_backbone(config)
    path = output_of(config, frozen.model.provenance.source)
    train = open_subset(config.train, open_source(config.train))
    features = labelled_features(frozen, train, title="features of the training images")
    classify = make_classifier(config, features, len(train.classes), frozen.device)
    clean = error_of(frozen, config.val, train, classify) if config.val else None
    errors = {
        kind: {folder.name: error_of(frozen, str(folder), train, classify) for folder in severities}
        for kind, severities in folders.items()
    }
    means = {kind: mean(by_severity.values()) for kind, by_severity in errors.items()}
    unpublished = [kind for kind in errors if kind not in ALEXNET]
    mce = None if unpublished else mean(means[kind] / ALEXNET[kind] for kind in means)
    results = {"mCE": mce, "clean": clean, "errors": errors}
    write_results(path, {"settings": config.model_dump(mode="json"), "results": results})
    names = sorted({name for by_severity in errors.values() for name in by_severity})
    rows = [
        [kind, *(f"{row[name]:.1f}" if name in row else "-" for name in names), f"{means[kind]:.1f}"]
        for kind, row in errors.items()
    ]
    table = format_table(["error in %, severity", *names, "mean"], rows)
    no_mce = f"no mCE, as AlexNet's error is not published for {', '.join(unpublished)}"
    lines = [no_mce if mce is None else f"mCE {mce:.1f} %", str(path)]
    if clean is not None:
        lines.insert(0, f"clean images {clean:.1f} %")
    return Written(path=path, text="\n".join([table, "", *lines]))


if __name__ == "__main__":
    sys.exit(run_program(ImageNetCConfig, run))
