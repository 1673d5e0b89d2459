"""A checkpoint is written once its copies from the GPU are there, whichever tensors lie on the host."""

from pathlib import Path

import pytest
import torch

from dino_vit.core.checkpoint import BackgroundWriter, Checkpoints
from tests.support.rehearsal import CUDA, Rehearsal


class Copies:
    """Stand in for the stream of a GPU and its event: the copies are there once it is waited for."""

    def __init__(self) -> None:
        self.recorded, self.complete = 0, False

    def record_event(self) -> "Copies":
        self.recorded += 1
        return self

    def synchronize(self) -> None:
        self.complete = True


@pytest.mark.parametrize("places", ["g", "h", "gh", "hg", "ghh", "hgh", "hhg"])
def test_no_checkpoint_is_written_before_its_copies_are_there(tmp_path, monkeypatch, places):
    copies, written = Copies(), []

    def save(_: Checkpoints, step: int, tensors: dict[str, torch.Tensor], __: object) -> Path:
        written.append((step, list(tensors), copies.complete))
        return tmp_path

    monkeypatch.setattr(Checkpoints, "save", save)
    with Rehearsal():
        monkeypatch.setattr("torch.cuda.current_stream", lambda *_: copies)
        state = [
            (str(number), torch.zeros(9, device=CUDA if place == "g" else "cpu"))
            for number, place in enumerate(places)
        ]
        with BackgroundWriter(Checkpoints(tmp_path)) as writer:
            writer.begin(5, state, {})
            writer.finish(wait=True)
    has_gpu_tensors = "g" in places
    assert written == [(5, [name for name, _ in state], has_gpu_tensors)]
    assert copies.recorded == has_gpu_tensors
