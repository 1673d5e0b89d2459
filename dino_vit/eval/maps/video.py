"""Videos as files: read and write them frame by frame with PyAV.

Frames are uint8 (3, H, W).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from dino_vit.core.storage import replacing

SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".wmv", ".3gp", ".ogv")


def is_video(path: str) -> bool:
    """Tell whether this is a video file, by its name."""
    return Path(path).suffix.lower() in SUFFIXES and Path(path).is_file()


def import_av() -> Any:
    """Return the module of PyAV, or raise."""
    try:
        import av
    except ImportError:
        raise ValueError("to read or write a video, install PyAV: pip install 'dino-vit[video]'") from None
    return av


class VideoFile:
    """The frames of a video, upright, as often as one asks for them."""

    def __init__(self, path: str) -> None:
        self.path, self._av = path, import_av()
        with self._reading() as reader:
            if not reader.streams.video:
                raise ValueError(f"{path} has no pictures")
            self.rate = Fraction(reader.streams.video[0].average_rate or 25)

    def __iter__(self) -> Iterator[Tensor]:
        with self._reading() as reader:
            for frame in reader.decode(video=0):
                picture = rearrange(torch.from_numpy(frame.to_ndarray(format="rgb24")), "y x c -> c y x")
                yield picture.rot90(frame.rotation // 90, (1, 2))  # as the phone was held

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        try:
            with self._av.open(self.path) as reader:
                yield reader
        except self._av.FFmpegError as error:
            raise ValueError(f"{self.path} cannot be read as a video: {error.strerror}") from error


@contextmanager
def writing_video(path: Path, rate: Fraction) -> Iterator[Callable[[Tensor], None]]:
    """Yield a function that appends a picture to an MP4 file, which has its name when all are written."""
    av, stream = import_av(), None
    try:
        with replacing(path) as partial, av.open(str(partial), "w", format="mp4") as writer:

            def write(picture: Tensor) -> None:
                nonlocal stream
                if stream is None:
                    stream = writer.add_stream("libx264", rate=rate, options={"crf": "18"})
                    # H.264 needs even sizes: an odd one loses its last row or column.
                    stream.height, stream.width = (side // 2 * 2 for side in picture.shape[-2:])
                    stream.pix_fmt = "yuv420p"
                even = rearrange(picture[:, : stream.height, : stream.width], "c y x -> y x c")
                frame = av.VideoFrame.from_ndarray(even.contiguous().numpy(), format="rgb24")
                writer.mux(stream.encode(frame))

            yield write
            if stream is None:
                raise ValueError(f"{path} would have no frames")
            writer.mux(stream.encode(None))
    except av.FFmpegError as error:
        raise ValueError(f"{path} cannot be written: {error}") from error
