"""Objects of a program in the place of a setting's text."""

import gc
from dataclasses import dataclass

import numpy as np
import pytest

from dino_vit.config.objects import find, pass_object


@dataclass(slots=True)
class Slotted:
    """An object that nothing can refer to weakly, as lists."""

    value: int = 0


@pytest.mark.parametrize(
    "value", [[1, 2], range(3), {"a": 1}, Slotted()], ids=lambda value: type(value).__name__
)
def test_objects_of_any_kind_are_found_by_their_name(value):
    spec = pass_object(value, "any")
    assert find(spec) is value
    array = np.zeros(3)
    assert find(pass_object(array, "any")) is array, "the last of a name counts"
    assert find(pass_object(value, "any")) is value


def test_an_array_that_a_program_has_let_go_takes_no_memory():
    spec = pass_object(np.zeros(3), "temporary")
    gc.collect()
    with pytest.raises(ValueError, match="is an object of a Python program, and not known here"):
        find(spec)
