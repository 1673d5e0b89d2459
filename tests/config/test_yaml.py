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
    ((_, found, _),) = yaml12.read(text, "here")
    assert found == value
    assert type(found) is type(value)


def test_mappings_become_dotted_keys_with_their_lines() -> None:
    found = yaml12.read("# top\na: 1\nb:\n  c: 2\n\n  d: {}\n", "f.yaml")
    assert found == [("a", 1, "f.yaml:2"), ("b.c", 2, "f.yaml:4"), ("b.d", {}, "f.yaml:6")]
    assert yaml12.read("{c: 2}", "command line", "b") == [("b.c", 2, "command line")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1\n", "f.yaml:2: found character '\\t'"),
        ("a: [1, 2\n", "f.yaml:2: "),
        ("a: &x {b: *x}\n", "f.yaml:1: aliases are not supported: write the value again"),
        ("a:\n  b: !!bool x\n", "f.yaml:2: x cannot be read as bool"),
        ("a: !!timestamp x\n", "f.yaml:1: x cannot be read as timestamp"),
        ("a: !!int ''\n", "f.yaml:1: "),
        ("a: " + "9" * 5000, f"f.yaml:1: {'9' * 56} ... cannot be read as int"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: "),
        ("a: !!python/object:os.system {}\n", "f.yaml:1: "),
        ("a: \x00\n", "f.yaml: "),
        ("[" * 5000, "f.yaml"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
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
    assert yaml12.read(text, "written") == [("", value, "written:1")]


def test_whole_numbers_are_written_without_a_fraction() -> None:
    same = (1.0, 2.0)
    assert yaml12.write((same, same)) == "[[1, 2], [1, 2]]"
    assert yaml12.write((3.0, 0.5, -1e6)) == "[3, 0.5, -1000000]"


def test_older_readers_take_text_for_text() -> None:
    assert yaml.safe_load(yaml12.write("no")) == "no"
    assert yaml.safe_load(yaml12.write(1e-6)) == 1e-6
