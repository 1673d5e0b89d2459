"""A backbone with a fitted classifier in one file: labels of new images without the labelled ones.

`dino-vit predict ... classifier=FILE` writes it; it is also a weights file, whose backbone any command reads.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from dino_vit.config.settings import Count, Few, Positive, Task
from dino_vit.core.storage import OWN_KEY, StorageError, read_tensors, read_texts, write_tensors
from dino_vit.models.backbone import FeatureSpec
from dino_vit.models.classifiers import Levelling, LinearScores, NeighbourScores, Scores, score_in_blocks
from dino_vit.views.eval_transform import EvalTransform
from dino_vit.weights.backbones import LoadedBackbone
from dino_vit.weights.loading import load_backbone
from dino_vit.weights.metadata import Stated, WeightsError, check, parse
from dino_vit.weights.read_file import CLASSIFIER, about_backbone, check_finite

_PART = "(cls|mean|cells|edges|pixels)"
_READING = "reading."  # prefix of tensors


class ClassifierFacts(Stated):
    """What a file says of its classifier."""

    kind: Literal["linear", "neighbours"]
    task: Task
    classes: tuple[str, ...] = Field(min_length=1)  # or the names of labels
    tokens: Annotated[str, Field(pattern=rf"^{_PART}(\+{_PART})*$")]  # the parts of a `FeatureSpec`
    blocks: Few
    levelled: bool = False  # whether they are centred and levelled before they are classified
    temperature: Positive | None = None  # None: too few labels were there to say how sure it is
    k: Count | None = None
    tested: tuple[str, ...] = ()  # how well it did in cross-validation, in sentences


class ImageClassifier(nn.Module):
    """What `load_classifier` returns: from normalised images to the probability of each class (n, c).

    Of images with several labels the probability of each label. `classes` names the columns, `transform`
    prepares images, and `predict` does all of it.
    """

    def __init__(
        self,
        backbone: LoadedBackbone,
        scores: Scores,
        facts: ClassifierFacts,
        reading: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.scores, self.facts = backbone, scores, facts
        self.reading = nn.Identity() if reading is None else reading
        self.spec = FeatureSpec(tokens=facts.tokens, blocks=facts.blocks)
        self.classes: tuple[str, ...] = facts.classes

    @property
    def transform(self) -> EvalTransform:
        """What prepares an image for it."""
        return self.backbone.transform

    def forward(self, images: Tensor) -> Tensor:
        scores = self.scores(self.reading(self.spec.extract(self.backbone, images).float()))
        return activate(scores, self.facts.task, self.facts.temperature)

    def of_features(self, features: Tensor) -> Tensor:
        """Return the same from features, of any number of images."""
        scores = score_in_blocks(self.scores, features, self.reading)
        return activate(scores, self.facts.task, self.facts.temperature)

    @torch.no_grad()
    def predict(self, images: object, *, batch_size: int = 64) -> tuple[list[str] | list[list[str]], Tensor]:
        """Return the class of each image, or a list of its labels, and the probabilities (n, c).

        Images are what `load_backbone(...).embed` takes: files, PIL images, arrays, one or several.
        """
        features = self.backbone.read(images, self.spec, batch_size)
        outputs = self.of_features(features.view(-1, features.shape[-1]).to(self.backbone.device)).cpu()
        return labels_of(outputs, self.classes, self.facts.task), outputs


def activate(scores: Tensor, task: Task, temperature: float | Tensor | None) -> Tensor:
    """Return probabilities from scores."""
    calibrated = scores if temperature is None else scores / temperature
    return calibrated.sigmoid() if task == "multilabel" else calibrated.softmax(dim=-1)


def labels_of(outputs: Tensor, classes: Sequence[str], task: Task) -> list[str] | list[list[str]]:
    """Return the class that outputs (n, c) say of each image, or the labels."""
    if task == "multiclass":
        return [classes[number] for number in outputs.argmax(dim=1).tolist()]
    return [[name for name, p in zip(classes, row, strict=True) if p > 0.5] for row in outputs.tolist()]


def confidences_of(outputs: Tensor, task: Task) -> Tensor:
    """Return the probability that the label of each image is right; of several, the least sure one's."""
    return outputs.amax(dim=1) if task == "multiclass" else 0.5 + (outputs - 0.5).abs().amin(dim=1)


def save_classifier(classifier: ImageClassifier, path: Path, transform: EvalTransform) -> None:
    """Write a backbone and its classifier as one safetensors file; images are prepared as they were here."""
    names = "resize_mode", "interpolation", "shorter_side"
    prepared = {name: getattr(transform, name) for name in ("mean", "std", "size")}
    prepared |= {"bits": transform.pixels.bits, "range": transform.pixels.range}
    prepared["preparation"] = {name: getattr(transform, name) for name in names}
    prepared["config"] = {}  # that of a run has local paths, which exports leave out too
    metadata = about_backbone(classifier.backbone, prepared)
    metadata |= {"kind": CLASSIFIER, CLASSIFIER: classifier.facts.model_dump(mode="json")}
    parts: dict[str, nn.Module] = {"backbone.": classifier.backbone, f"{CLASSIFIER}.": classifier.scores}
    if isinstance(classifier.reading, Levelling):
        parts[f"{CLASSIFIER}.{_READING}"] = classifier.reading
    tensors = {
        f"{prefix}{name}": tensor
        for prefix, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    write_tensors(path, tensors, json.dumps(metadata))


def load_classifier(path: str | Path, *, verbose: bool = True) -> ImageClassifier:
    """Return the backbone and the classifier in a file that `dino-vit predict ... classifier=FILE` wrote."""
    return read_classifier(path, load_backbone(path, verbose=verbose))


def read_classifier(path: str | Path, backbone: LoadedBackbone) -> ImageClassifier:
    """Return the classifier in a file, with its backbone, which was loaded from there."""
    facts = read_classifier_facts(path)
    if facts is None:
        text = f"{path} holds weights, but no classifier"
        raise WeightsError(f"{text}; `dino-vit predict` writes one: classifier=FILE")
    tensors = {
        name.removeprefix(f"{CLASSIFIER}."): tensor
        for name, tensor in read_tensors(Path(path))[0].items()
        if name.startswith(f"{CLASSIFIER}.")
    }
    check_finite(tensors, str(path))
    widths = FeatureSpec(tokens=facts.tokens, blocks=facts.blocks).widths(backbone)
    width, outputs = sum(widths), len(facts.classes)
    images, by_neighbours = len(tensors.get("bank", ())), facts.kind == "neighbours"
    shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, width), "bias": (outputs,)}
    if by_neighbours:
        of_targets = (images,) if facts.task == "multiclass" else (images, outputs)
        shapes = {"bank": (images, width), "targets": of_targets}
    if facts.levelled:
        shapes |= {f"{_READING}matrix{number}": (each, each) for number, each in enumerate(widths)}
        shapes[f"{_READING}mean"] = (width,)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != shapes or by_neighbours != bool(facts.k) or (by_neighbours and not images):
        raise WeightsError(f"{path} is damaged: its classifier does not fit its backbone and classes")
    if facts.k:
        scores: Scores = NeighbourScores(tensors["bank"], tensors["targets"], k=facts.k, classes=outputs)
    else:
        scores = LinearScores(tensors["weight"], tensors["bias"])
    reading = None
    if facts.levelled:
        matrices = [tensors[f"{_READING}matrix{number}"] for number in range(len(widths))]
        reading = Levelling(tensors[f"{_READING}mean"], matrices)
    return ImageClassifier(backbone, scores, facts, reading).eval()


def read_classifier_facts(path: str | Path) -> ClassifierFacts | None:
    """Return what a file says of its classifier, None if it has none; its tensors are not read."""
    path = Path(path)
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    try:
        texts = read_texts(path)
    except StorageError as error:
        raise WeightsError(str(error)) from error
    where = f"the metadata of {path}"
    stated = parse(where, texts.get(OWN_KEY, "{}")).get(CLASSIFIER)
    return None if stated is None else check(ClassifierFacts, stated, where)
