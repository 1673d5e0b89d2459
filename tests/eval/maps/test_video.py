from fractions import Fraction

import pytest
import torch

from dino_vit.eval.maps.video import reading_video, writing_video


def matrix(a, b, c, d):
    """The first two rows of the matrix by which players turn the frames of an MP4 file."""
    return b"".join((value << 16).to_bytes(4, "big", signed=True) for value in (a, b, 0, c, d))


@pytest.mark.parametrize(
    ("written", "turns"), [((1, 0, 0, 1), 0), ((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_frames_are_turned_as_players_show_them(tmp_path, written, turns):
    """Phones store how they were held; `turns` is in quarters, counterclockwise."""
    picture = torch.zeros(3, 64, 96, dtype=torch.uint8)
    picture[0, :16, :16], picture[2, 48:, :16] = 255, 255  # red in the top left corner, blue below
    path = tmp_path / "clip.mp4"
    with writing_video(path, Fraction(10)) as write:
        for _ in range(3):
            write(picture)
    data = path.read_bytes()
    track = data.index(b"tkhd")
    path.write_bytes(data[:track] + data[track:].replace(matrix(1, 0, 0, 1), matrix(*written), 1))
    with reading_video(str(path)) as (rate, reader):
        frames = list(reader)
    assert (rate, len(frames)) == (10, 3)
    for frame in frames:
        assert (frame.float() - picture.rot90(turns, (1, 2))).abs().mean() < 8
