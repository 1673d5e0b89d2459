"""Features of a set of images: read, prepared and sent through a backbone, in the order asked for."""

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from dino_vit.core.sizes import Size
from dino_vit.data.images.decode import UnreadableImage
from dino_vit.data.sources.open import Source
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.preparation import Preparation

T = TypeVar("T")
# Batches that are read while the backbone works on one.
_AHEAD = 1


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Which tokens, all normalised, are the features of an image.

    `cls`: the CLS tokens of the last `blocks` blocks in a row, the last block's at the end; `cls+mean`:
    behind them the mean patch token of the last block; `patches`: the last block's patch tokens, (N, D).
    """

    tokens: Literal["cls", "cls+mean", "patches"] = "cls"
    blocks: int = 1

    def shape(self, model: VisionTransformer, size: Size) -> tuple[int, ...]:
        """Return the shape of one image's features."""
        if self.tokens == "patches":
            height, width = model.grid_of(*size)
            return height * width, model.width
        return ((self.blocks + (self.tokens == "cls+mean")) * model.width,)

    def of(self, model: VisionTransformer, images: Tensor) -> Tensor:
        """Return the features of normalised images (B, C, H, W)."""
        first_patch = 1 + model.registers
        if self.tokens == "patches":
            return model.forward_features(images)[:, first_patch:]
        if self.tokens == "cls" and self.blocks == 1:
            return model.forward_cls(images)
        blocks = model.get_intermediate_layers(images, self.blocks)
        parts = [tokens[:, 0] for tokens in blocks]
        if self.tokens == "cls+mean":
            parts.append(blocks[-1][:, first_patch:].mean(dim=1))
        return torch.cat(parts, dim=1)


CLS = FeatureSpec()


@dataclass(frozen=True)
class Features:
    """Features (n, D) in float32, which images they are of, and those left out as they cannot be read."""

    values: Tensor
    indices: Tensor  # int64 (n,), on the device of the values
    unreadable: tuple[UnreadableImage, ...]


class Extraction:
    """Send batches of a source's images through a backbone; each batch is computed as if there were no other.

    Leaves the model as it was: the mode of each module, its gradients, every random state.
    """

    def __init__(
        self,
        model: VisionTransformer,
        source: Source,
        *,
        preparation: Preparation,
        kind: FeatureSpec = CLS,
        autocast: torch.dtype | None = None,
        threads: int | None = None,
    ) -> None:
        self.model, self.source, self.preparation, self.kind = model, source, preparation, kind
        self.autocast, self.threads = autocast, threads
        self.device = model.cls_token.device
        self._idle = _Idle(self.device)

    @property
    def idle(self) -> float:
        """Seconds in which the backbone had nothing to do, for want of images."""
        return self._idle.seconds

    def __call__(self, batches: Iterable[Sequence[int]]) -> Generator[Features]:
        """Yield the features of each batch of indices, reading ahead of the backbone; indices on the host."""
        normalise = self.preparation.normaliser(self.device)
        reading = _read_batches(
            self.source, self.preparation, batches, threads=self.threads, pin=self.device.type == "cuda"
        )
        while True:
            batch = self._idle.until(lambda: next(reading, None))
            if batch is None:
                return
            values = self._compute(normalise(batch.images)) if len(batch.images) else self.nothing()
            self._idle.begin()
            yield Features(values, torch.tensor(batch.indices, dtype=torch.long), batch.unreadable)

    def _compute(self, images: Tensor) -> Tensor:
        kind = self.device.type
        with evaluating(self.model), torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            return self.kind.of(self.model, images).float()

    def nothing(self) -> Tensor:
        """Return the features of no image."""
        shape = self.kind.shape(self.model, self.preparation.size)
        return torch.empty(0, *shape, device=self.device)


class _Idle:
    """Count the seconds between two pieces of work of a device, on its own clock where it works by itself."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.seconds = 0.0
        self.worked: torch.cuda.Event | None = None
        self.gaps: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def until(self, arrives: Callable[[], T]) -> T:
        """Return what arrives, counting how long it took."""
        start = time.perf_counter()
        arrived = arrives()
        if self.stream is None:
            self.seconds += time.perf_counter() - start
        elif self.worked is not None:
            self.gaps.append((self.worked, self._event(self.stream)))
            while self.gaps and self.gaps[0][1].query():  # type: ignore[no-untyped-call]
                end, next_start = self.gaps.popleft()
                self.seconds += end.elapsed_time(next_start) / 1000
        return arrived

    def begin(self) -> None:
        """Begin a gap behind the work that the device was given."""
        if self.stream is not None:
            self.worked = self._event(self.stream)

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def extract_features(
    model: VisionTransformer,
    source: Source,
    indices: Sequence[int],
    *,
    preparation: Preparation,
    batch_size: int,
    kind: FeatureSpec = CLS,
    autocast: torch.dtype | None = None,
) -> Features:
    """Return the features of images in memory, on the model's device, in the order of the indices."""
    extraction = Extraction(model, source, preparation=preparation, kind=kind, autocast=autocast)
    parts = list(extraction(in_batches(indices, batch_size)))
    if not parts:
        return Features(extraction.nothing(), torch.empty(0, dtype=torch.long, device=extraction.device), ())
    return Features(
        torch.cat([part.values for part in parts]),
        torch.cat([part.indices for part in parts]).to(extraction.device),
        tuple(image for part in parts for image in part.unreadable),
    )


def pixel_features(source: Source, indices: Sequence[int], *, preparation: Preparation) -> Features:
    """Return the pixels themselves, normalised and in a row: what any features must be better than."""
    normalise = preparation.normaliser(torch.device("cpu"))
    batches = list(_read_batches(source, preparation, in_batches(indices, 256)))
    return Features(
        torch.cat([normalise(batch.images).flatten(1) for batch in batches]),
        torch.tensor([index for batch in batches for index in batch.indices], dtype=torch.long),
        tuple(image for batch in batches for image in batch.unreadable),
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch every module to evaluation and gradients off, then each back to the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: what a module caches must serve training too
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def in_batches(indices: Sequence[int], batch_size: int) -> Iterator[Sequence[int]]:
    """Cut indices into batches; the last may be smaller."""
    return (indices[start : start + batch_size] for start in range(0, len(indices), batch_size))


class _Batch(NamedTuple):
    images: Tensor  # (readable, C, h, w), on the host
    indices: list[int]  # of the readable ones
    unreadable: tuple[UnreadableImage, ...]


def _read_batches(
    source: Source,
    preparation: Preparation,
    batches: Iterable[Sequence[int]],
    *,
    threads: int | None = None,
    pin: bool = False,
) -> Iterator[_Batch]:
    """Yield batches in order, reading the next ones while the caller works on one."""
    ahead: deque[tuple[Sequence[int], Tensor, list[Future[UnreadableImage | None]]]] = deque()
    # Threads suffice: decoding and resampling, 95 % of the work on an image of 500 × 375, hold no lock. More
    # threads than this would crowd out the other processes, unless the caller knows better.
    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        try:
            for indices in batches:
                images = preparation.empty(len(indices), pin=pin)
                reading = [
                    pool.submit(_read_into, place, preparation, source, index)
                    for place, index in zip(images, indices, strict=True)
                ]
                ahead.append((indices, images, reading))
                if len(ahead) > _AHEAD:
                    yield _finish(*ahead.popleft())
            while ahead:
                yield _finish(*ahead.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # the caller may have had enough


def _read_into(place: Tensor, preparation: Preparation, source: Source, index: int) -> UnreadableImage | None:
    try:
        place.copy_(preparation.read(source, index))
    except UnreadableImage as error:
        return error
    return None


def _finish(
    indices: Sequence[int], images: Tensor, reading: Sequence[Future[UnreadableImage | None]]
) -> _Batch:
    """Wait for a batch, and leave out what cannot be read."""
    failures = [one.result() for one in reading]
    readable = [place for place, failure in enumerate(failures) if failure is None]
    if len(readable) < len(indices):
        images = images[readable]
    kept = [int(indices[place]) for place in readable]
    return _Batch(images, kept, tuple(failure for failure in failures if failure is not None))
