"""`dino-vit inspect-weights` and `dino-vit export`: describe a backbone, or write it for another library."""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from dino_vit import __version__
from dino_vit.commands import Result
from dino_vit.config.sections import Side, WeightsFormat
from dino_vit.config.settings import Few, Settings, setting
from dino_vit.core import height_width, log
from dino_vit.core.text import brief
from dino_vit.models.backbone import Backbone
from dino_vit.training.metrics import BASELINE, METRICS, read_records
from dino_vit.training.verdict import evaluation_text
from dino_vit.weights import load_backbone
from dino_vit.weights.card import describe, model_card, show, usage
from dino_vit.weights.export import export_backbone
from dino_vit.weights.loading import LoadedBackbone

REASONS = {
    401: "the token is not valid; run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there; use one with write access",
    404: "there is no such repository, or the token may not see it",
}


class _WeightsConfig(Settings):
    source: str = Field(description="weights file (.pth, .pt, .safetensors), run folder or hub folder")
    network: Literal["teacher", "student"] = setting("teacher", "network of a training checkpoint")
    source_format: WeightsFormat | None = setting(
        None, "format of the source where files look alike; null: detected"
    )
    heads: Few | None = setting(None, "attention heads, for a width that does not imply them")
    image_size: Side | None = setting(
        None, "resample the positions to this side, or height and width; null: as stored"
    )

    positional: ClassVar[tuple[str, ...]] = ("source",)

    def load(self) -> LoadedBackbone:
        """Load the backbone."""
        overrides: dict[str, Any] = {"heads": self.heads} if self.heads else {}
        if self.image_size:
            overrides["image_size"] = height_width(self.image_size)
        return load_backbone(self.source, network=self.network, format=self.source_format, **overrides)


class InspectWeightsConfig(_WeightsConfig):
    """Show the format, architecture, normalisation, network and step of a weights file or folder."""

    as_json: bool = setting(False, "print JSON")

    examples: ClassVar = ("inspect-weights runs/pretrain",)


class ExportConfig(_WeightsConfig):
    """Write a backbone in the format of another library, and check that its features agree."""

    out: str = Field(description="file to write (.pth, .pt, .safetensors, .onnx), or folder for huggingface")
    format: Literal["reference", "timm", "huggingface", "onnx"] = Field(description="format to write")
    dynamic: bool = setting(False, "onnx: take images of any size; otherwise of that of the weights")
    overwrite: bool = setting(False, "replace OUT if it exists")
    license: str | None = setting(None, "huggingface: licence for the model card, such as apache-2.0")
    push: str | None = setting(None, "huggingface: upload to this repository of the hub, OWNER/NAME")
    private: bool = setting(False, "with --push: create the repository as a private one")

    positional: ClassVar = ("source", "out")
    examples: ClassVar = ("export runs/pretrain vits16.pth --format timm",)

    def contradictions(self) -> Iterator[str]:
        """Yield settings that would have no effect."""
        if self.dynamic and self.format != "onnx":
            yield f"--dynamic is for --format onnx, not {self.format}"
        for name in ("license", "push"):
            if getattr(self, name) is not None and self.format != "huggingface":
                yield f"--{name} is for --format huggingface, not {self.format}"
        if self.private and self.push is None:
            yield "--private is for --push OWNER/NAME; give both or neither"


@dataclass(frozen=True, kw_only=True)
class WeightsFacts(Result):
    """What a backbone is."""

    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ExportResult(Result):
    """The file or folder that was written, and where on the hub it is; as text, the lines that use it."""

    path: Path
    url: str | None = None


def inspect(config: InspectWeightsConfig) -> WeightsFacts:
    """Return the facts about a backbone; as text, two columns or JSON."""
    facts = describe(config.load())
    lines = [f"{name.replace('_', ' '):<14}  {show(name, facts[name])}" for name in facts if name != "config"]
    return WeightsFacts(facts=facts, text=json.dumps(facts, indent=2) if config.as_json else "\n".join(lines))


def export(config: ExportConfig) -> ExportResult:
    """Write a backbone for another library."""
    if config.push:
        _check_hub(config.push)
    model, path, card = config.load(), Path(config.out), None
    if config.format == "huggingface":
        evaluation = _evaluation(model)
        card = model_card(model, name=config.push or ".", license=config.license, evaluation=evaluation)
    options = {"overwrite": config.overwrite, "dynamic": config.dynamic}
    export_backbone(model, path, config.format, **options, card=card)
    url, text = None, usage(model, path, config.format)
    if config.push:
        url = _push(path, config.push, private=config.private)
        text += f"\n# pushed to {url}"  # a comment, so that the lines stay Python
    return ExportResult(path=path, url=url, text=text)


def _evaluation(model: Backbone) -> str:
    """Return what the run of a checkpoint measured at its step, or nothing."""
    source, step = (model.provenance.source, model.provenance.step) if model.provenance else ("", None)
    if step is None or Path(source).parent.name != "checkpoints":
        return ""
    folder = Path(source).parent.parent
    history = [r for r in read_records(folder / "metrics.jsonl", METRICS) if r.step <= step and r.rankme]
    before = next(iter(read_records(folder / "baseline.json", BASELINE)), None)
    figures = evaluation_text(history, before)
    return f"Measured at step {history[-1].step:,}, on images of the source: {figures}." if figures else ""


def _check_hub(name: str) -> None:
    """Raise if there is no library, no token or no valid name to push with, before any work is done."""
    try:
        from huggingface_hub import get_token
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise ValueError("--push needs the hub's library: pip install 'dino-vit[hub]'") from None
    if name.count("/") != 1:
        raise ValueError(f"push={brief(name)} is not a repository; write OWNER/NAME")
    validate_repo_id(name)
    if get_token() is None:
        raise ValueError("--push needs a token with write access: run `hf auth login`, or set HF_TOKEN")


def _push(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder in one commit, create the repository if there is none, and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants, utils

    log.info("%s: pushing to %s/%s", folder, constants.ENDPOINT, name)
    # Xet, the default where hf_xet is installed, needs storage servers that only huggingface.co has; LFS
    # works with every server of this protocol. The variable of this name is read on import only.
    constants.HF_HUB_DISABLE_XET = True
    if not log.isEnabledFor(logging.INFO):
        utils.disable_progress_bars()
    try:
        api = HfApi(token=True, library_name="dino-vit", library_version=__version__)
        url = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise ValueError("it exists and is public; leave out --private, or choose another name")
        additions = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
        api.create_commit(name, additions, commit_message=f"Export by dino-vit {__version__}")
    except Exception as error:  # of the hub, the network, or an HTTP library that differs between versions
        raise ValueError(
            f"{folder} is exported, but was not pushed to {constants.ENDPOINT}/{name}: {_reason(error)}. "
            "To try again, repeat the command with --overwrite"
        ) from error
    return str(url)


def _reason(error: Exception) -> str:
    """Return why a push failed."""
    cause: Any = error.__cause__ if isinstance(error, RuntimeError) else error  # of the upload of a file
    status = getattr(getattr(cause, "response", None), "status_code", None)
    message = brief(" ".join(str(getattr(cause, "server_message", None) or cause).split()), 300)
    return f"{REASONS.get(status, f'the server answered {status}')} ({message})" if status else message
