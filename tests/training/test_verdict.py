"""What is said of runs that really happened: their readings, rounded, lie in `recorded`.

Each was a few minutes on a core. flowers: 3,586 photos at 48 pixels, width 96 (small: a ViT-S), recipe=auto;
textures: 4,000 of the generated ones, width 64. mean: loss.centring=ema without KoLeo; good: sinkhorn with it.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.training.readings import BASELINE, READING, Baseline
from dino_vit.training.verdict import STATES, Circumstances, circumstances, diagnose, noise, summarise
from tests.support.readings import HEALTHY

RECORDED = Path(__file__).parent / "recorded"


def recorded(name, *, last=False, labels=True):
    """Return the readings of a run and the circumstances, possibly as if it had no labels."""
    found = json.loads((RECORDED / f"{name}.json").read_text())
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    baseline = found["baseline"] and BASELINE.validate_python(found["baseline"])
    if not labels:
        rows = [{**row, "knn": None, "best_features": None, "best_knn": None} for row in rows]
        baseline = baseline and Baseline(rankme=baseline.rankme)
    readings = [READING.validate_json(json.dumps({**row, "state": ""})) for row in rows]
    given = [f"{key}={json.dumps(value)}" for key, value in found["settings"].items()]
    config = load(PretrainConfig, None, given)
    return readings, lambda so_far: circumstances(config, so_far, baseline, images=3586)


def told(name, **options):
    """Return the states that a run went through, in their order."""
    readings, run = recorded(name, **options)
    states = []
    for count in range(1, len(readings) + 1):
        state = diagnose(readings[:count], run(readings[:count])).state
        if not states or states[-1] != state:
            states.append(state)
    return states


TABLE = {
    "flowers-good": ["learning"],
}


@pytest.mark.parametrize("name", [path.stem for path in sorted(RECORDED.glob("*.json"))])
def test_a_recorded_run_is_called_what_it_was(name):
    print(name, told(name), told(name, labels=False))
    r, run = recorded(name)
    print(summarise(r, run(r)))
