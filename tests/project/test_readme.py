"""The README's targets and names exist; `test_docs.py` checks its commands, files and links."""

import re

import pytest

import dino_vit
from dino_vit.training.verdict import STATES
from tests.support.documents import README, ROOT, commands

COMMANDS = commands(README)


@pytest.mark.parametrize("target", [parts[1] for parts in COMMANDS if parts[0] == "make"])
def test_every_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def test_the_table_of_states_has_all_of_them():
    table = README.split("The log names the state of the run")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| ([\w(), -]+?) \|", table, flags=re.MULTILINE)) - {"state"} == set(STATES)


def test_python_names_are_public():
    for name in re.findall(r"\bdino_vit\.(\w+)\(", README):
        assert hasattr(dino_vit, name)
