"""Video in, video out, a frame at a time; PyAV reads and writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from dino_vit.core.storage import replacing, sync

SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")


def is_video(source: str) -> bool:
    """Tell whether a source is a video file, going by its name."""
    return Path(source).suffix.lower() in SUFFIXES and Path(source).is_file()


def redraw(source: Path, target: Path, draw: Callable[[Tensor], Tensor]) -> int:
    """Write the video of what `draw` makes of each frame, uint8 (3, H, W) to (3, H', W'); return the frames.

    Sizes must not change on the way; an odd one loses its last row or column, which H.264 cannot hold.
    """
    try:
        import av
    except ImportError:
        raise ValueError(f"{source} is a video, which needs PyAV: pip install 'dino-vit[video]'") from None
    frames = 0
    try:
        with replacing(target) as partial:
            with av.open(str(source)) as reader, av.open(str(partial), "w", format="mp4") as writer:
                stream = None
                for frame in reader.decode(video=0):
                    picture = draw(
                        rearrange(torch.from_numpy(frame.to_ndarray(format="rgb24")), "y x c -> c y x")
                    )
                    if stream is None:
                        rate = reader.streams.video[0].average_rate or 25
                        stream = writer.add_stream("libx264", rate=rate, options={"crf": "18"})
                        stream.height, stream.width = (side // 2 * 2 for side in picture.shape[-2:])
                        stream.pix_fmt = "yuv420p"
                    even = rearrange(picture[:, : stream.height, : stream.width], "c y x -> y x c")
                    writer.mux(
                        stream.encode(av.VideoFrame.from_ndarray(even.contiguous().numpy(), format="rgb24"))
                    )
                    frames += 1
                if stream is None:
                    raise ValueError(f"{source} holds no frames")
                writer.mux(stream.encode(None))
            sync(partial)
    except av.FFmpegError as error:
        raise ValueError(
            f"{source} cannot be read as a video, or {target} not be written: {error}"
        ) from error
    return frames
