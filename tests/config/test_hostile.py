"""Values that no one should give: every setting of every command takes them or refuses them by its name."""

import random

import pytest

from dino_vit.cli import COMMANDS, config_class
from dino_vit.config.loading import load
from dino_vit.config.settings import ConfigError, settings_of

VALUES = [
    *("!!bool x", "!!timestamp x", "!!timestamp 2020-13-45", "!!int ''", "!!float ''", "!!binary [1]"),
    *("!!set {a}", "!!pairs [a]", "!!python/object:os.system x", "2020-01-01", "{? [1]: 2}", "{<<: [1]}"),
    *("9" * 5000, "9223372036854775807", "1e30", "1e308", "1e309", "-1e309", ".nan", "1e-320", "1e4", "-1"),
    *("", "~", "true", "[]", "{}", "[[1]]", "[null]", "[.nan, 1]", "[1e400]", "[1, 0]", "{a: 1}", "[0, 0]"),
    *("&a [*a]", "*a", "[", "a\nb", "--- a\n--- b", "\x1b[31m", "\x00", "\ud800", "\t", "%YAML 9.9\n--- x"),
    *("a" * 10_000, "[" * 2000, "{a: " * 300, "[" + "1, " * 500 + "1]", "\u2028"),
]
NEEDED = {
    "finetune": {"weights": "x"},
    "export": {"format": "timm"},
    "compare": {"untrained": "true"},
    "copies": {"source": "x"},
}
CASES = [(command, key) for command in COMMANDS for key in settings_of(config_class(command))]
CHOSEN = random.Random(0).sample([(*case, value) for case in CASES for value in VALUES], 600)


def refusals(command: str, key: str, value: str) -> list[str]:
    """Return what is said of a setting."""
    cls = config_class(command)
    given = {name: "x" for name, info in settings_of(cls).items() if info.required and "." not in name}
    given |= NEEDED.get(command, {})
    section = key.partition(".")[0]
    given |= {f"{section}.weights": "x"} if section in ("init", "anchor") and "." in key else {}
    try:
        load(cls, None, [f"{name}={text}" for name, text in {**given, key: value}.items()])
    except ConfigError as error:
        return [problem.text for problem in error.problems]
    return []


def test_hostile_values_are_taken_or_refused_by_name() -> None:
    for case in CHOSEN:
        for text in refusals(*case):
            assert case[1] in text, case
            assert len(text) < 1000, case
            assert text.replace("\n", "").isprintable(), case


@pytest.mark.parametrize("value", ["!!bool x", "9" * 5000, "1e30", "1e309", "[[1]]", "\x1b[31m", "!!set {a}"])
def test_they_are_refused_where_a_number_is_wanted(value: str) -> None:
    numbers = [case for case in CASES if "number" in settings_of(config_class(case[0]))[case[1]].allowed]
    assert [case for case in numbers if len(refusals(*case, value)) != 1] == []
