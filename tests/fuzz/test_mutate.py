import ast
import random
from pathlib import Path

from tests.fuzz.mutate import mutate, tried_by

SOURCE = '''
def double(number: int = 3) -> bool:
    """Add 1."""  # a comment
    return not number and (number < 2 or max(number, 1) + 2 == True)
'''


def test_one_place_changes_and_every_place_may():
    mutants = {mutate(SOURCE, random.Random(seed)) for seed in range(200)}
    places = [line.split(": ", 1)[1] for _, line in mutants]
    assert len(mutants) == len(places) == 12, "the 2 is there twice"
    assert {"3 → 4", "not number → not not number", "number < 2 → number <= 2", "max → min"} < set(places)
    assert {"True → False", "max(number, 1) + 2 → max(number, 1) - 2"} < set(places)
    plain = ast.unparse(ast.parse(SOURCE))
    for source, _ in mutants:
        assert source != plain
        assert '"""Add 1."""' in source
    assert mutate("import os", random.Random(0)) is None


def test_a_module_is_tried_by_its_own_tests_and_then_by_those_of_its_package():
    assert tried_by(Path("dino_vit/views/sampler.py")) == ["tests/views/test_sampler.py", "tests/views"]
    assert tried_by(Path("dino_vit/data/stores/files.py")) == ["tests/data"]
    assert tried_by(Path("dino_vit/cli.py")) == ["tests/test_cli.py"]
    assert tried_by(Path("dino_vit/run_folder.py")) == ["tests"]
