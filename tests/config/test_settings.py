import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import pytest
from pydantic import Field

from dino_vit.config.display import add_config_arguments, config_from, json_schema, parse_arguments, to_yaml
from dino_vit.config.loading import load, replace
from dino_vit.config.settings import (
    ConfigError,
    Count,
    Positive,
    Problem,
    Settings,
    allowed,
    given_keys,
    result_changes,
    setting,
    settings_of,
    values,
)


class Oven(Settings):
    """Where it is baked."""

    one_of: ClassVar = (("degrees",), ("gas", "mark"))
    degrees: Positive | None = setting(180.0, "heat")
    gas: bool | None = setting(None, "with gas")
    mark: Count | None = setting(None, "on the dial")
    fan: Literal["on", "off"] = setting("on", "blow")


class Icing(Settings):
    """What comes on top."""

    colour: str = Field(description="its colour")
    layers: Count = setting(1, "how many")


class Cake(Settings):
    """A cake."""

    also_known_as: ClassVar = {"eggs": "oeufs"}
    name: str = setting("plain", "what to call it", resumable=True)
    eggs: Count = setting(3, "how many")
    sizes: tuple[Positive, Positive] = setting((1.0, 2.0), "from, to")
    tiers: tuple[str, ...] = setting((), "names of the tiers")
    oven: Oven = Oven()
    icing: Icing | None = setting(None, "null: none")

    def contradictions(self) -> Iterator[Problem]:
        """Yield what is wrong with valid settings taken together."""
        if self.eggs > 10 and (self.oven.degrees or 0) > 200:
            yield Problem("that is an omelette", ("eggs", "oven.degrees"))
        if self.sizes[0] > self.sizes[1]:
            yield Problem("sizes run backwards", ("sizes",))


def refused(*overrides: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(Cake, file, overrides)
    assert all(problem.text in str(error.value) for problem in error.value.problems)
    return [problem.text for problem in error.value.problems]


def write(folder: Path, text: str) -> Path:
    file = folder / "cake.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, "eggs: 4\nname: file\noven: {degrees: 1.5e2, fan: off}\n")
    cake = load(Cake, file, ["eggs=5", "sizes=[2, 3e0]"])
    assert (cake.eggs, cake.name, cake.oven.degrees, cake.oven.fan) == (5, "file", 150.0, "off")
    assert cake.sizes == (2.0, 3.0)
    assert given_keys(cake) == {"eggs", "name", "oven.degrees", "oven.fan", "sizes"}
    assert load(Cake) == Cake()


def test_whole_floats_count_and_others_do_not() -> None:
    assert load(Cake, None, ["eggs=1e1"]).eggs == 10
    for value in ("1.5", "true", "'3'", "null", "0", ".inf", "[1]", "{a: 1}"):
        (text,) = refused(f"eggs={value}")
        assert text.startswith("eggs = ")
        assert text.endswith("(command line): give a whole number of at least 1")
    (text,) = refused("sizes=[1, .nan]")
    assert "give a list of 2: each a number above 0" in text


def test_text_is_taken_literally() -> None:
    for text in ("2024", "1e-3", "no", "*.tar", "a: b", "null.jpg", " x", "a=b", ""):
        assert load(Cake, None, [f"name={text}"]).name == text
    assert refused("name=null") == ["name = null (command line): give text"]


def test_unknown_names_are_answered_with_the_nearest() -> None:
    assert refused("egs=3") == ["egs is not a setting (command line); did you mean eggs?"]
    assert refused("oeufs=3") == ["oeufs is not a setting (command line); did you mean eggs?"]
    assert refused("degrees=3") == ["degrees is not a setting (command line); did you mean oven.degrees?"]
    (text,) = refused("oven.whatever_it_is=3")
    assert text.endswith("it has oven.degrees, oven.gas, oven.mark, oven.fan")
    (text,) = refused("whatever=3")
    assert text.endswith("there are name, eggs, sizes, tiers, icing, oven")
    assert "write name=..." in refused("strawberry")[0]
    assert "write eggs=..." in refused("eggs")[0]


def test_all_mistakes_are_reported_together_with_their_place(tmp_path: Path) -> None:
    file = write(tmp_path, "egs: 4\noven:\n  fan: maybe\nsizes: [3, 2]\n")
    assert refused("tiers=[1]", "icing.layers=2", file=file) == [
        f"egs is not a setting ({file}:1); did you mean eggs?",
        "tiers = [1] (command line): give a list, each text",
        f"oven.fan = maybe ({file}:3): give one of on, off",
        "icing.colour is needed: its colour",
        f"sizes run backwards (sizes: {file}:4)",
    ]


def test_a_mistake_hides_only_the_contradictions_it_is_part_of() -> None:
    assert len(refused("eggs=12", "oven.degrees=300")) == 1
    assert refused("egs=12", "eggs=20", "oven.degrees=300") == [
        "egs is not a setting (command line); did you mean eggs?"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds nothing"),
        ("# only a comment\n", "holds nothing"),
        ("- a\n", "holds no mapping"),
        ("eggs\n", "holds no mapping"),
        ("eggs: 3\neggs: 4\n", "cake.yaml:2: eggs stands here and in line 1"),
        ("oven: {fan: on}\noven.fan: off\n", "oven.fan is given twice"),
        ("oven:\n\tfan: on\n", "cake.yaml:2: a tab"),
        ("eggs: {yolk: 1}\n", "eggs = {yolk: 1}"),
        ("oven: 3\n", "oven (PATH:1) is a section; set one of oven.degrees"),
        ("1: 2\n", "1 is not a setting"),
        ("oven: {fan: on\n", "cake.yaml:2: "),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    assert message.replace("PATH", str(file)) in " ".join(refused(file=file))


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    assert "No such file" in refused(file=tmp_path / "none.yaml")[0]
    assert refused(file=tmp_path)[0].startswith(f"cannot read {tmp_path}")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00eggs")
    assert "UTF-8" in refused(file=tmp_path / "binary.yaml")[0]


def test_an_empty_section_and_an_empty_mapping_change_nothing(tmp_path: Path) -> None:
    assert load(Cake, write(tmp_path, "oven:\n")) == Cake()
    assert load(Cake, write(tmp_path, "{}\n")) == Cake()


def test_an_optional_section_comes_and_goes(tmp_path: Path) -> None:
    file = write(tmp_path, "icing: {colour: red, layers: 2}\n")
    assert load(Cake, file).icing == Icing(colour="red", layers=2)
    assert load(Cake, file, ["icing=null"]).icing is None
    assert load(Cake, None, ["icing=null", "icing.colour=blue"]).icing == Icing(colour="blue")
    assert load(Cake, None, ["icing.colour=blue", "icing=null"]).icing is None
    assert load(Cake, file, ["icing={colour: blue}"]).icing == Icing(colour="blue", layers=2)
    assert refused("icing=3") == ["icing = 3 (command line): give a section or null"]


def test_exclusive_groups_replace_each_other_across_layers(tmp_path: Path) -> None:
    assert load(Cake, None, ["oven.mark=4"]).oven.degrees is None
    file = write(tmp_path, "oven: {gas: true, mark: 4}\n")
    oven = load(Cake, file, ["oven.degrees=100"]).oven
    assert (oven.degrees, oven.gas, oven.mark) == (100.0, None, None)
    both = load(Cake, None, ["oven.degrees=100", "oven.mark=4"]).oven  # the rules of a config decide
    assert (both.degrees, both.mark) == (100.0, 4)


def test_replace_checks_and_marks_as_given() -> None:
    cake = replace(load(Cake, None, ["eggs=5"]), {"oven.mark": 3, "icing.colour": "red"})
    assert (cake.eggs, cake.oven.degrees, cake.oven.mark, cake.icing) == (5, None, 3, Icing(colour="red"))
    assert {"eggs", "oven.mark", "icing.colour"} <= given_keys(cake)
    assert replace(cake, {"oven.degrees": 90.0}).oven.mark is None
    with pytest.raises(ConfigError, match="did you mean eggs"):
        replace(cake, {"egs": 3})
    with pytest.raises(ConfigError, match="omelette"):
        replace(cake, {"eggs": 20, "oven.degrees": 250.0})


def test_python_is_checked_like_yaml() -> None:
    with pytest.raises(ValueError, match="omelette"):
        Cake(eggs=20, oven=Oven(degrees=250.0))
    with pytest.raises(ValueError, match="frozen"):
        Cake().eggs = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="extra"):
        Cake(egs=3)  # type: ignore[call-arg]


def test_result_changes() -> None:
    cake = load(Cake, None, ["name=x", "eggs=4", "oven.mark=4", "icing.colour=red"])
    assert result_changes(cake, Cake(name="y")) == {
        "eggs": (3, 4),
        "oven.degrees": (180.0, None),
        "oven.mark": (None, 4),
        "icing.colour": (None, "red"),
        "icing.layers": (None, 1),
    }
    assert result_changes(Cake(name="x"), Cake(name="y")) == {}


@pytest.mark.parametrize("comments", [True, False])
@pytest.mark.parametrize(
    "overrides", [[], ["name=1e-3", "eggs=4", "oven.mark=4", "icing.colour=no", "tiers=[a, 'null']"]]
)
def test_yaml_loads_back(tmp_path: Path, overrides: list[str], comments: bool) -> None:
    cake = load(Cake, None, overrides)
    text = to_yaml(cake, comments)
    assert load(Cake, write(tmp_path, text)) == cake
    assert ("#" in text) == comments
    for key, one in settings_of(Cake).items():
        if comments and key in values(cake):
            assert one.doc in text


def test_what_is_allowed_is_said_in_words() -> None:
    words = {key: allowed(one.schema) for key, one in settings_of(Cake).items()}
    assert words["oven.degrees"] == "a number above 0 or null"
    assert words["oven.gas"] == "true or false or null"
    assert words["oven.fan"] == "one of on, off"
    assert words["sizes"] == "a list of 2: each a number above 0"
    assert words["name"] == "text"


def test_schema_describes_every_knob() -> None:
    schema = json.loads(json.dumps(json_schema(Cake)))
    assert (
        schema["properties"]["eggs"] | {"minimum": 1, "default": 3, "description": "how many"}
        == (schema["properties"]["eggs"])
    )
    assert schema["additionalProperties"] is False
    assert set(schema["$defs"]) == {"Oven", "Icing"}


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="bake")
    commands = main.add_subparsers(dest="command", required=True)
    add_config_arguments(commands.add_parser("cake"), Cake)
    commands.add_parser("wash")
    return main


def test_arguments_may_stand_in_any_order(tmp_path: Path) -> None:
    file = str(write(tmp_path, "eggs: 7\n"))
    for argv in (
        ["cake", "name=x", "--config", file, "oven.fan=off"],
        ["cake", "--config", file, "name=x", "oven.fan=off"],
        ["cake", "name=x", "oven.fan=off", "--config", file],
    ):
        cake = config_from(parse_arguments(parser(), argv), Cake)
        assert (cake.eggs, cake.name, cake.oven.fan) == (7, "x", "off")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["cake", "--eggs=3"], "settings are written without dashes: eggs=3"),
        (["cake", "--eggs", "3"], "settings are written without dashes: eggs"),
        (["wash", "eggs=3"], "unrecognized arguments: eggs=3"),
    ],
)
def test_dashes_are_answered(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(parser(), argv)
    assert message in capsys.readouterr().err


class Sheet(Settings):
    """A command with words and a flag."""

    positional: ClassVar = ("index", "images")
    switches: ClassVar = {"serve": "keep_on"}
    index: str = Field(description="where to look")
    images: tuple[str, ...] = setting((), "what to look for")
    keep_on: bool = setting(False, "keep on")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["here"], ("here", (), False)),
        (["here", "a, b.png", "null", "--serve"], ("here", ("a, b.png", "null"), True)),
        (["images=[c]", "./x=y", "keep_on=true"], ("./x=y", ("c",), True)),
        (["here", "a", "index=there"], ("there", ("a",), False)),
    ],
)
def test_words_and_flags_stand_for_settings(given: list[str], found: tuple[object, ...]) -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, Sheet)
    config = config_from(parse_arguments(parser, given), Sheet)
    assert (config.index, config.images, config.keep_on) == found
    assert "INDEX IMAGES key=value" in parser.format_help()


def test_a_word_too_many_is_refused() -> None:
    class One(Settings):
        positional: ClassVar = ("name",)
        name: str = setting("", "one word")

    parser = argparse.ArgumentParser()
    add_config_arguments(parser, One)
    with pytest.raises(ConfigError, match="'b' on the command line is not key=value"):
        config_from(parse_arguments(parser, ["a", "b"]), One)


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(parser(), ["cake", "--help"])
    shown = capsys.readouterr().out
    assert "eggs=3" in shown
    assert "icing.colour=..." in shown
    assert all(one.doc in shown for one in settings_of(Cake).values())
