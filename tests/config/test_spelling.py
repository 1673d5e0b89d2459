import random

import pytest

from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import settings_of
from dino_vit.config.spelling import distance, nearest

KEYS = {key: PretrainConfig.also_known_as.get(key, "").split() for key in settings_of(PretrainConfig)}


def naive_distance(a: str, b: str) -> int:
    """The definition, by recursion: edits and swaps of neighbours."""
    if not a or not b:
        return len(a) + len(b)
    ways = [
        naive_distance(a[:-1], b) + 1,
        naive_distance(a, b[:-1]) + 1,
        naive_distance(a[:-1], b[:-1]) + (a[-1] != b[-1]),
    ]
    if len(a) > 1 and len(b) > 1 and a[-2:] == b[-2:][::-1]:
        ways.append(naive_distance(a[:-2], b[:-2]) + 1)
    return min(ways)


def test_distance_equals_its_definition() -> None:
    rng = random.Random(0)
    words = ["", "ab", "ba", *("".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(12))]
    for a in words:
        for b in words:
            assert distance(a, b) == naive_distance(a, b)


@pytest.mark.parametrize("kind", ["delete", "insert", "replace", "swap"])
def test_a_typo_leads_back_to_its_key(kind: str) -> None:
    rng = random.Random(kind)
    for key in KEYS:
        at = rng.choice([i for i, letter in enumerate(key) if letter != "."])
        typo = {
            "delete": key[:at] + key[at + 1 :],
            "insert": key[:at] + rng.choice("qzx") + key[at:],
            "replace": key[:at] + rng.choice("qzx") + key[at + 1 :],
            "swap": key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
        }[kind]
        if typo not in KEYS:
            assert key in nearest(typo, KEYS)[:2], typo


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", ["optim.lr"]),
        ("optim.lrr", ["optim.lr"]),
        ("--optim.lr", ["optim.lr"]),
        ("model.lr", ["optim.lr"]),
        ("epochs", ["budget.epochs"]),
        ("teacher.temp", ["loss.teacher_temp"]),
        ("scale", ["views.global_scale", "views.local_scale"]),
        ("out_dim", ["head.prototypes"]),
        ("batch_size_per_gpu", ["data.batch_size"]),
        ("local_crops_number", ["views.local_count"]),
        ("batch-size", ["data.batch_size"]),
        ("head.layrs", ["head.layers"]),
        ("xyzzy", []),
        ("", []),
    ],
)
def test_what_people_type_is_understood(typed: str, meant: list[str]) -> None:
    assert nearest(typed, KEYS) == meant
