"""The commands of `dino-vit`: a settings class and a function for each; `COMMANDS` names them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a command found or wrote; as text it is what the command prints."""

    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


class Command(NamedTuple):
    """A command: its line in `dino-vit --help`, its settings and the function that takes them."""

    help: str
    config: str  # module:class
    function: str = ""  # module:function; `run` in the module of the settings if empty

    @property
    def config_class(self) -> Any:
        """The settings; their module is imported now, which may take seconds."""
        return resolve_name(f"dino_vit.{self.config}")

    @property
    def run(self) -> Callable[..., Any]:
        """The function that takes the settings and returns a `Result`, or None."""
        module = self.config.partition(":")[0]
        return resolve_name(f"dino_vit.{self.function or f'{module}:run'}")


# Each is `dino-vit NAME` and, with underscores, a function of `dino_vit`.
COMMANDS = {
    "demo": Command("see a transformer learn without labels, in minutes", "commands.demo:DemoConfig"),
    "inspect-data": Command("show what is in a source of images", "commands.inspect_data:InspectConfig"),
    "pack": Command("write a source of images as tar shards", "commands.pack:PackConfig"),
    "pretrain": Command(
        "train on images without labels", "config.pretrain:PretrainConfig", "training.loop:pretrain"
    ),
    "report": Command("write an HTML page about a run", "commands.report:ReportConfig"),
    "knn": Command("classify images by their nearest neighbours", "commands.classification.knn:KnnConfig"),
    "linear": Command(
        "train linear classifiers on a frozen backbone", "commands.classification.linear:LinearConfig"
    ),
    "finetune": Command(
        "train a backbone and a classifier", "commands.classification.finetune:FinetuneConfig"
    ),
    "dense": Command("classify the pixels of images that have masks", "commands.maps.dense:DenseConfig"),
    "compare": Command("measure several weights on the same images", "commands.compare:CompareConfig"),
    "attention": Command("draw the attention of the CLS token", "commands.maps.attention:AttentionConfig"),
    "embed": Command("write the embeddings of images to a file", "commands.embeddings.embed:EmbedConfig"),
    "search": Command("find embedded images like given ones", "commands.embeddings.search:SearchConfig"),
    "duplicates": Command(
        "list embedded images that are nearly the same", "commands.embeddings.duplicates:DuplicatesConfig"
    ),
    "inspect-weights": Command(
        "show what is in a weights file or run folder",
        "commands.weights:InspectWeightsConfig",
        "commands.weights:inspect",
    ),
    "export": Command(
        "write a backbone for timm, Hugging Face, ONNX or the DINO repository",
        "commands.weights:ExportConfig",
        "commands.weights:export",
    ),
}


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for first, *others in [header, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
