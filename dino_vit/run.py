"""A pretraining as an object: its figures, its networks, its page."""

from pathlib import Path
from typing import Any, Literal

from dino_vit.commands import report
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.reports.record import RunRecord, outcome, read_run, state
from dino_vit.weights import load_backbone
from dino_vit.weights.loading import LoadedBackbone


class Run:
    """A run by its folder, be it finished, under way or stopped; everything is read when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: PretrainConfig = self._record().config

    def __repr__(self) -> str:
        record = self._record()
        return f"Run({str(self.folder)!r}): step {record.step:,} of {record.total_steps:,}, {self.state}"

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
        written = report.run(load(report.ReportConfig, None, {**settings, "run": self.folder}))
        return written.path if written else Path(settings.get("output") or self.folder / "report.html")

    def backbone(self, network: Literal["teacher", "student"] = "teacher") -> LoadedBackbone:
        """Load a network of the newest checkpoint; `load_backbone` takes any of `checkpoints`."""
        return load_backbone(self.folder, network=network)

    def _record(self) -> RunRecord:
        return read_run(self.folder)
