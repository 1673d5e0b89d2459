"""Several sources in one run, each of which gives its share of the images of an epoch."""

import hashlib
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dino_vit.core.text import plural, printable
from dino_vit.data.sources.source import Source, stamp_of


class MixedSource:
    """The images of several sources, one source after another.

    An epoch ends when the source that is used up first has been seen once, so no image comes twice in it.
    """

    def __init__(
        self, names: Sequence[str], parts: Sequence[Source], shares: Sequence[float] | None = None
    ) -> None:
        lengths = [len(part) for part in parts]
        shares = lengths if shares is None else shares
        if len(shares) != len(parts):
            counted = (
                f"data.mix has {plural(len(shares), 'share')}, data.source {plural(len(parts), 'source')}"
            )
            raise ValueError(f"{counted}; give one for each")
        rate = min(length / share for length, share in zip(lengths, shares, strict=True))
        self.names, self.parts = list(map(printable, names)), parts
        self.counts = [max(1, round(rate * share)) for share in shares]  # of an epoch
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        classes = dict.fromkeys(name for part in parts for name in part.classes)
        self.classes: Sequence[str] = list(classes)
        self._number = {name: number for number, name in enumerate(classes)}

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def images_per_epoch(self) -> int:
        return sum(self.counts)

    def read(self, index: int) -> bytes | Tensor:
        part, row = self._locate(index)
        return self.parts[part].read(row)

    def label(self, index: int) -> int | None:
        part, row = self._locate(index)
        label = self.parts[part].label(row)
        return None if label is None else self._number[self.parts[part].classes[label]]

    def name(self, index: int) -> str:
        part, row = self._locate(index)
        return f"{self.names[part]}/{self.parts[part].name(row)}"

    @property
    def fingerprint(self) -> str:
        text = "\0".join(part.fingerprint for part in self.parts)
        return f"mixed-{len(self)}-{hashlib.sha256(f'{text}{self.counts}'.encode()).hexdigest()[:16]}"

    @property
    def stamp(self) -> str | None:
        stamps = [stamp for part in self.parts if (stamp := stamp_of(part)) is not None]
        return "\0".join(stamps) if len(stamps) == len(self.parts) else None

    def describe_epoch(self) -> str:
        """Say what an epoch is."""
        parts = (
            f"{count:,} of the {len(part):,} of {name} ({count / self.images_per_epoch:.1%})"
            for count, part, name in zip(self.counts, self.parts, self.names, strict=True)
        )
        return f"an epoch is {self.images_per_epoch:,} images, none of them twice: {', '.join(parts)}"

    def _locate(self, index: int) -> tuple[int, int]:
        part = int(np.searchsorted(self.starts, index, side="right")) - 1
        return part, index - int(self.starts[part])


def parts_of(source: Source) -> Sequence[Source]:
    """Return the sources that a run mixes."""
    return source.parts if isinstance(source, MixedSource) else [source]


def images_per_epoch(source: Source) -> int:
    return source.images_per_epoch if isinstance(source, MixedSource) else len(source)


def evaluated_part(source: Source) -> tuple[Source, str | None]:
    """Return the source that a run is evaluated on, with its name if it is one of several.

    It is the first with labels, whose splits and classes are its own.
    """
    if not isinstance(source, MixedSource):
        return source, None
    number = next((number for number, part in enumerate(source.parts) if part.classes), 0)
    return source.parts[number], source.names[number]
