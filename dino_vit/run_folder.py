"""A pretraining as an object: its settings, its figures and its checkpoints."""

from html import escape
from pathlib import Path
from typing import Any

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.text import plural
from dino_vit.reports.record import RecordedRun, read_run, verdict


class RunFolder:
    """A run by its folder, be it finished, under way or stopped; everything is read when it is asked for.

    Functions take it where they take weights or a run: `dino_vit.knn("photos", run)`, `dino_vit.report(run)`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.config: PretrainConfig = self._record().config

    def __repr__(self) -> str:
        record = self._record()
        step = f"step {record.step:,} of {record.total_steps or 0:,}"
        return f"RunFolder({str(self.folder)!r}): {step}; {self.diagnosis}"

    def __str__(self) -> str:
        record, config = self._record(), self.config
        images = f" ({record.starts[-1].images:,} images)" if record.starts else ""
        lines = [
            f"{self.folder}: {config.model.title} on {config.data.images}{images}",
            f"step {record.step:,} of {record.total_steps or 0:,}: {self.diagnosis}",
            self.outcome,
            f"{plural(len(self.checkpoints), 'checkpoint')} in {self.folder / 'checkpoints'}",
        ]
        if figures := [evaluation for evaluation in record.evaluations if evaluation.figure]:
            newest, others = figures[0], record.evaluations[1:]
            more = f", and {len(others)} more in {self.folder / 'eval'}" if others else ""
            lines.append(f"{newest.figure} {newest.percent} % on {newest.data}{more}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __fspath__(self) -> str:
        return str(self.folder)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the figures of each log line, for `pandas.DataFrame`.

        Which images an evaluation classified correctly is only in the file.
        """
        return [metrics.figures() for metrics in self._record().history]

    @property
    def diagnosis(self) -> str:
        """The state of the run, such as "learning"."""
        return verdict(self._record()).diagnosis

    @property
    def outcome(self) -> str:
        """What has come of the run so far, its accuracy beside what needs no training, and what to do."""
        return "\n".join(verdict(self._record()).paragraphs)

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, the oldest step first."""
        return Checkpoints(self.folder).paths()

    def _record(self) -> RecordedRun:
        return read_run(self.folder)
