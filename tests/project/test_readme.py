"""The README's files, targets and names exist, and its commands parse; `test_readme_walk.py` runs them."""

import re

import pytest

import dino_vit
from dino_vit.cli import build_parser
from dino_vit.config.display import parse_arguments
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training import readings
from tests.support.documents import README, ROOT, commands

COMMANDS = commands(README)
PRETRAINING = [
    parts[parts.index(name) + 1 :]
    for parts in COMMANDS
    for name in ("pretrain", "launch/pretrain.py", "launch/slurm/pretrain.sbatch")
    if name in parts
]


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 8
    assert len(PRETRAINING) >= 4


@pytest.mark.parametrize("arguments", PRETRAINING, ids=" ".join)
def test_every_pretraining_command_has_good_settings(arguments):
    args = parse_arguments(build_parser(["pretrain"]), ["pretrain", *arguments])
    assert load(PretrainConfig, args.config and ROOT / args.config, args.settings).data.source == "photos"


@pytest.mark.parametrize("target", [parts[1] for parts in COMMANDS if parts[0] == "make"])
def test_every_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"(?:launch|configs|docs|benchmarks|eval)/[\w/.-]*\w\.\w+", README)))
)
def test_every_file_that_is_named_exists(name):
    assert (ROOT / name).is_file()


def test_the_table_of_states_has_all_of_them():
    known = {value.state for value in vars(readings).values() if isinstance(value, readings.Diagnosis)}
    table = README.split("The log names the state of the run")[1].split("\n\n")[1]
    assert set(re.findall(r"^\| ([\w() -]+?) \|", table, flags=re.MULTILINE)) - {"state"} == known


def test_python_names_are_public():
    for name in re.findall(r"from dino_vit import (\w+)", README):
        assert hasattr(dino_vit, name)
