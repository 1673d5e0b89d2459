"""A pretraining as an object: its figures, its networks, its page, and what it makes of images."""

from html import escape
from pathlib import Path
from typing import Any, Literal

from PIL import Image

import dino_vit
from dino_vit.commands import report
from dino_vit.commands.classification import Classification
from dino_vit.commands.embeddings.embed import ImageEmbeddings
from dino_vit.config.commands import ReportConfig
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.text import plural
from dino_vit.reports.record import RunRecord, outcome, read_run, state
from dino_vit.weights import load_backbone
from dino_vit.weights.backbones import LoadedBackbone


class Run:
    """A run by its folder, be it finished, under way or stopped; everything is read when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: PretrainConfig = self._record().config

    def __repr__(self) -> str:
        record = self._record()
        return f"Run({str(self.folder)!r}): step {record.step:,} of {record.total_steps:,}; {self.state}"

    def __str__(self) -> str:
        record, config = self._record(), self.config
        images = f" ({record.starts[-1].images:,} images)" if record.starts else ""
        lines = [
            f"{self.folder}: {config.model.title} on {config.data.source}{images}",
            f"step {record.step:,} of {record.total_steps or 0:,}: {self.state}; {state(record)[1]}",
            self.outcome,
            f"{plural(len(self.checkpoints), 'checkpoint')} in {self.folder / 'checkpoints'}",
        ]
        if record.evaluations:
            newest, *others = record.evaluations
            more = f", and {len(others)} more in {self.folder / 'eval'}" if others else ""
            lines.append(f"{newest.figure} {newest.percent} % on {newest.data}{more}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __fspath__(self) -> str:
        return str(self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the history, one for each log line; `pandas.DataFrame` takes them."""
        return [metrics.to_record() for metrics in self._record().history]

    @property
    def state(self) -> str:
        """What the newest reading says of the run, such as "learning"."""
        return state(self._record())[0].state

    @property
    def outcome(self) -> str:
        """The figures of the run so far with what they compare with, and what to try."""
        return outcome(self._record())

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, the oldest step first."""
        return Checkpoints(self.folder).paths()

    def report(self, **settings: Any) -> Path:
        """Write the page about the run, and return its file."""
        written = report.run(load(ReportConfig, None, {**settings, "run": self.folder}))
        return written.path if written else Path(settings.get("output") or self.folder / "report.html")

    def features(self, source: object = None, **settings: Any) -> ImageEmbeddings:
        """Return the embeddings of images, by default those of the run; settings are those of `embed`."""
        return dino_vit.embed(**self._images(source), verbose=False, **settings)

    def knn(self, source: object = None, **settings: Any) -> Classification | Any:
        """Classify labelled images by their neighbours; settings are those of `knn`."""
        return dino_vit.knn(**self._images(source), verbose=False, **settings)

    def show_attention(self, source: object = None, *, count: int = 6, **settings: Any) -> Image.Image:
        """Draw the attention maps of some images on a sheet; settings are those of `attention`."""
        images = source or self.config.data.source
        drawn = dino_vit.attention(images, self, output=None, count=count, verbose=False, **settings)
        sheet = drawn.sheets[0] if drawn else None
        assert isinstance(sheet, Image.Image), "rank 0 draws in memory"
        return sheet

    def backbone(self, network: Literal["teacher", "student"] = "teacher") -> LoadedBackbone:
        """Load a network of the newest checkpoint; `load_backbone` takes any of `checkpoints`."""
        return load_backbone(self.folder, network=network)

    def _images(self, source: object) -> dict[str, Any]:
        """Return what to evaluate the run on: given images, or its own with their labels."""
        own = {"source": self.config.data.source, "labels": self.config.data.labels}
        return {"weights": self, **(own if source is None else {"source": source})}

    def _record(self) -> RunRecord:
        return read_run(self.folder)
