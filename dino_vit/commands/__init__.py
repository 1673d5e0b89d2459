"""The commands of `dino-vit`: a settings class and a function for each; `COMMANDS` names them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from dino_vit.core.text import Result


@dataclass(frozen=True, kw_only=True, repr=False)
class Facts(Result):
    """What a source or a backbone is, by the names that as_json prints."""

    facts: dict[str, Any]


@dataclass(frozen=True, kw_only=True, repr=False)
class Written(Result):
    """The file or folder that was written."""

    path: Path


class Command(NamedTuple):
    """A command: its settings and the function that takes them."""

    config: str  # class of `config/commands.py`, or module:class of `config/`
    function: str  # module:function

    @property
    def config_class(self) -> Any:
        """The settings, which are imported now, without torch."""
        module, _, name = self.config.rpartition(":")
        return resolve_name(f"dino_vit.config.{module or 'commands'}:{name}")

    @property
    def help(self) -> str:
        """The line in `dino-vit --help`."""
        text = str(self.config_class.__doc__).rstrip(".")
        return text[0].lower() + text[1:]

    @property
    def run(self) -> Callable[..., Any]:
        """The function of the settings, which returns a `Result` or None; its import takes seconds."""
        return resolve_name(f"dino_vit.{self.function}")


# Each is `dino-vit NAME` and, with underscores, a function of `dino_vit`.
COMMANDS = {
    "demo": Command("DemoConfig", "commands.demo:run"),
    "inspect-data": Command("InspectConfig", "commands.inspect_data:run"),
    "pack": Command("PackConfig", "commands.pack:run"),
    "pretrain": Command("pretrain:PretrainConfig", "training.pretrain:pretrain"),
    "report": Command("ReportConfig", "commands.report:run"),
    "knn": Command("KnnConfig", "eval.knn:run"),
    "linear": Command("LinearConfig", "eval.linear:run"),
    "predict": Command("PredictConfig", "eval.predict:run"),
    "label": Command("LabelConfig", "commands.label:run"),
    "compare": Command("CompareConfig", "eval.compare:run"),
    "attention": Command("AttentionConfig", "eval.attention:run"),
    "embed": Command("EmbedConfig", "eval.embed:run"),
    "inspect-weights": Command("InspectWeightsConfig", "commands.weights:inspect"),
    "export": Command("ExportConfig", "commands.weights:export"),
}
