import pytest

import dino_vit.training.loop
from tests.support.training import tensors_of


@pytest.fixture
def student_at(monkeypatch):
    """The student's state before each step that was begun, by step."""
    states = {}
    take = dino_vit.training.loop.forward_backward

    def forward_backward(state, *arguments, **keywords):
        states[state.step] = tensors_of(state.student)
        return take(state, *arguments, **keywords)

    monkeypatch.setattr(dino_vit.training.loop, "forward_backward", forward_backward)
    return states
