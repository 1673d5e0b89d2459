"""`dino-vit inspect-weights` and `dino-vit export`: describe a backbone, or write it for another library."""

import json
from pathlib import Path
from typing import Any

from dino_vit.commands import Facts, Written
from dino_vit.config.commands import ExportConfig, InspectWeightsConfig, WeightsConfig
from dino_vit.config.settings import Task
from dino_vit.core import height_width
from dino_vit.core.text import public_values
from dino_vit.weights import load_backbone
from dino_vit.weights.backbones import LoadedBackbone
from dino_vit.weights.card import describe_backbone, show
from dino_vit.weights.classifier import ImageClassifier, load_classifier
from dino_vit.weights.export import export_backbone
from dino_vit.weights.usage import usage

# The last line that uses the graph of a classifier.
SHOWN: dict[Task, str] = {
    "multiclass": 'print(about["classes"][probabilities[0].argmax()], probabilities[0].max())',
    "multilabel": 'print([name for name, p in zip(about["classes"], probabilities[0]) if p > 0.5])',
}


def _load(config: WeightsConfig) -> LoadedBackbone:
    overrides: dict[str, Any] = {"heads": config.heads} if config.heads else {}
    if config.image_size:
        overrides["image_size"] = height_width(config.image_size)
    return load_backbone(config.source, network=config.network, format=config.source_format, **overrides)


def inspect(config: InspectWeightsConfig) -> Facts:
    """Return the facts about a backbone; as text, two columns or JSON."""
    facts: dict[str, Any] = public_values(describe_backbone(_load(config)))
    lines = [f"{name.replace('_', ' '):<17}  {show(name, facts[name])}" for name in facts if name != "config"]
    return Facts(facts=facts, text=json.dumps(facts, indent=2) if config.as_json else "\n".join(lines))


def export(config: ExportConfig) -> Written:
    """Write a backbone for another library; as text, the lines that use it."""
    path = Path(config.out)
    if config.classifier:
        classifier = load_classifier(config.source)
        _refuse_source(classifier.backbone, path)
        export_backbone(classifier, path, config.format, overwrite=config.overwrite)
        return Written(path=path, text=_classifier_usage(classifier, path))
    model = _load(config)
    _refuse_source(model, path)
    export_backbone(model, path, config.format, overwrite=config.overwrite)
    return Written(path=path, text=usage(model, path, config.format))


def _classifier_usage(classifier: ImageClassifier, path: Path) -> str:
    """Return lines of Python that label a photo by the graph of a classifier."""
    transform = classifier.transform
    height, width = transform.size
    given = f"images = ...  # (n, {transform.pixels.channels}, {height}, {width}), float32, normalised"
    lines = [
        "import json, onnxruntime",
        f"session = onnxruntime.InferenceSession({str(path)!r})",
        'about = json.loads(session.get_modelmeta().custom_metadata_map["dino_vit"])["classifier"]',
        transform.code() or given,
        'probabilities, = session.run(None, {"images": images})',
        SHOWN[classifier.facts.task],
    ]
    return "\n".join(lines)


def _refuse_source(model: LoadedBackbone, path: Path) -> None:
    """Raise if the weights that were loaded would be overwritten."""
    read = Path(model.provenance.source)
    if path.exists() and read.exists() and (path.samefile(read) or path.samefile(read.parent)):
        raise ValueError(f"{path} would be overwritten, but the weights are read from it; give another name")
