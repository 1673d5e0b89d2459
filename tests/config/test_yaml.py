import math

import pytest
import yaml

from dino_vit.config import yaml as yaml12


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("12", 12),
        ("-3", -3),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("012", "012"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-3'", "1e-3"),
        ("[0.2, 1]", (0.2, 1)),
        ("[[1, 2], x]", ((1, 2), "x")),
        ("hf:owner/name", "hf:owner/name"),
        ("-.inf", -math.inf),
    ],
)
def test_reads_the_core_schema(text: str, value: object) -> None:
    found = yaml12.read(text, "here").value
    assert found == value
    assert type(found) is type(value)


def test_every_value_knows_its_line() -> None:
    found = yaml12.read("# top\na: 1\nb:\n  c: 2\n\n  d: 3\n", "f.yaml").value
    assert isinstance(found, dict)
    assert {name: item.line for name, item in found.items()} == {"a": 2, "b": 3}
    assert {name: item.line for name, item in found["b"].value.items()} == {"c": 4, "d": 6}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a stands here and in line 1"),
        ("a:\n\tb: 1\n", "f.yaml:2: a tab; YAML indents with spaces"),
        ("a: [1, 2\n", "f.yaml:2: "),
        ("a: &x {b: 1}\nc: *x\n", "f.yaml:2: aliases"),
        ("a: &x {b: *x}\n", "f.yaml:1: aliases"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: "),
        ("a: !!python/object:os.system {}\n", "f.yaml:1: "),
        ("a: \x00\n", "f.yaml: "),
        ("[" * 5000, "f.yaml"),
    ],
)
def test_says_where_a_text_is_broken(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"f\.yaml") as error:
        yaml12.read(text, "f.yaml")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.1,
        1e-6,
        5e-4,
        1e22,
        "no",
        "1e-3",
        "null",
        "a: b",
        "",
        "é",
        (1, 0.5),
        ("x", None),
        "runs/a b",
    ],
)
def test_what_is_written_reads_back(value: object) -> None:
    text = yaml12.write(value)
    assert "\n" not in text
    assert yaml12.read(text, "written").value == value


def test_whole_numbers_are_written_without_a_fraction() -> None:
    assert yaml12.write((3.0, 0.5, -1e6)) == "[3, 0.5, -1000000]"


def test_older_readers_take_text_for_text() -> None:
    assert yaml.safe_load(yaml12.write("no")) == "no"
    assert yaml.safe_load(yaml12.write(1e-6)) == 1e-6
