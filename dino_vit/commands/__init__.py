"""The commands of `dino-vit`: a settings class and a function for each; `COMMANDS` names them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pkgutil import resolve_name
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command found or wrote; as text it is what the command prints."""

    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str | None:
        """Return what a notebook shows, or None if the text was printed."""
        return None if "printed" in vars(self) else f"<pre>{escape(self.text)}</pre>"


class Command(NamedTuple):
    """A command: its settings and the function that takes them."""

    config: str  # module:class
    function: str  # module:function

    @property
    def config_class(self) -> Any:
        """The settings, which are imported now, without torch."""
        return resolve_name(f"dino_vit.{self.config}")

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
    "demo": Command("config.commands:DemoConfig", "commands.demo:run"),
    "inspect-data": Command("config.commands:InspectConfig", "commands.inspect_data:run"),
    "pack": Command("config.commands:PackConfig", "commands.pack:run"),
    "pretrain": Command("config.pretrain:PretrainConfig", "training.loop:pretrain"),
    "report": Command("config.commands:ReportConfig", "commands.report:run"),
    "knn": Command("config.commands:KnnConfig", "commands.classification.knn:run"),
    "linear": Command("config.commands:LinearConfig", "commands.classification.linear:run"),
    "finetune": Command("config.commands:FinetuneConfig", "commands.classification.finetune:run"),
    "dense": Command("config.commands:DenseConfig", "commands.maps.dense:run"),
    "compare": Command("config.commands:CompareConfig", "commands.compare:run"),
    "attention": Command("config.commands:AttentionConfig", "commands.maps.attention:run"),
    "embed": Command("config.commands:EmbedConfig", "commands.embeddings.embed:run"),
    "search": Command("config.commands:SearchConfig", "commands.embeddings.search:run"),
    "duplicates": Command("config.commands:DuplicatesConfig", "commands.embeddings.duplicates:run"),
    "inspect-weights": Command("config.commands:InspectWeightsConfig", "commands.weights:inspect"),
    "export": Command("config.commands:ExportConfig", "commands.weights:export"),
}


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
