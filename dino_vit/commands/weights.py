"""`dino-vit inspect-weights` and `dino-vit export`: describe a backbone, or write it for another library."""

import json
import shlex
from pathlib import Path
from typing import Any

from dino_vit.commands import Facts, Written
from dino_vit.config.commands import ExportConfig, InspectWeightsConfig, WeightsConfig
from dino_vit.config.settings import Task
from dino_vit.core import height_width
from dino_vit.core.text import public_values
from dino_vit.models.backbone import Backbone
from dino_vit.reports.metrics import BASELINE, METRICS, Baseline, read_records
from dino_vit.reports.significance import figures_text
from dino_vit.weights import load_backbone
from dino_vit.weights.backbones import LoadedBackbone
from dino_vit.weights.card import code, describe, model_card, show
from dino_vit.weights.classifier import Classifier, load_classifier
from dino_vit.weights.export import export_backbone
from dino_vit.weights.formats.builders import is_folder
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
    facts: dict[str, Any] = public_values(describe(_load(config)))
    lines = [f"{name.replace('_', ' '):<17}  {show(name, facts[name])}" for name in facts if name != "config"]
    return Facts(facts=facts, text=json.dumps(facts, indent=2) if config.as_json else "\n".join(lines))


def export(config: ExportConfig) -> Written:
    """Write a backbone for another library; as text, the lines that use it."""
    path, card = Path(config.out), None
    if config.head:
        classifier = load_classifier(config.source)
        _refuse_source(classifier.backbone, path)
        export_backbone(classifier, path, config.format, overwrite=config.overwrite)
        return Written(path=path, text=_classifier_usage(classifier, path))
    model = _load(config)
    _refuse_source(model, path)
    for_hub = is_folder(path, config.format)
    if config.license and not for_hub:
        raise ValueError(f"license is for the card of a folder, but {path} is a file")
    if for_hub:
        evaluation = _evaluation(model, config)
        card = model_card(model, config.format, license=config.license, evaluation=evaluation)
    export_backbone(model, path, config.format, overwrite=config.overwrite, card=card)
    text = usage(model, path, config.format)
    if for_hub:  # a comment, so that the lines stay Python
        text += f"\n# to share the folder: hf upload OWNER/NAME {shlex.quote(str(path))}"
        if config.format == "timm":
            text += '; then timm.create_model("hf-hub:OWNER/NAME", pretrained=True)'
    return Written(path=path, text=text)


def _classifier_usage(classifier: Classifier, path: Path) -> str:
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


def _evaluation(model: Backbone, config: ExportConfig) -> str:
    """Return what the run of a checkpoint measured at its step, if that is of this network."""
    source, step = model.provenance.source, model.provenance.step
    if step is None or Path(source).parent.name != "checkpoints":
        return ""
    if config.network != "teacher" or config.image_size is not None:
        return ""
    folder = Path(source).parent.parent
    history = [r for r in read_records(folder / "metrics.jsonl", METRICS) if r.step <= step and r.rankme]
    before = next(iter(read_records(folder / "baseline.json", BASELINE)), Baseline())
    figures = figures_text(history, before)
    if not figures:
        return ""
    where = f"Measured at step {history[-1].step:,}, on images of the source"
    return f"{where}: {code(figures, 1000)}."
