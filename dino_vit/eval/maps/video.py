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
        raise ValueError("to read or write a video, install PyAV: pip install av") from None
    return av


@contextmanager
def reading_video(path: str, *, grey: bool = False) -> Iterator[tuple[Fraction, Iterator[Tensor]]]:
    """Yield the frames per second of a video, and its frames, as the phone was held; grey ones (1, H, W)."""
    av = import_av()
    try:
        with av.open(path) as reader:
            if not reader.streams.video:
                raise ValueError(f"{path} has no pictures")
            rate = Fraction(reader.streams.video[0].average_rate or 25)
            yield rate, (_upright(frame, "gray" if grey else "rgb24") for frame in reader.decode(video=0))
    except av.FFmpegError as error:
        raise ValueError(f"{path} cannot be read as a video: {error.strerror}") from error


def _upright(frame: Any, kind: str) -> Tensor:
    pixels = torch.from_numpy(frame.to_ndarray(format=kind))
    picture = pixels[None] if pixels.ndim == 2 else rearrange(pixels, "y x c -> c y x")
    return picture.rot90(frame.rotation // 90, (1, 2))


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
