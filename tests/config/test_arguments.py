import argparse
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field

from dino_vit.config.loading import add_config_arguments, config_from, parse_arguments
from dino_vit.config.settings import Count, Settings, setting
from tests.support.cake import Cake


def parser(cls: type[Settings]) -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="bake")
    commands = main.add_subparsers(dest="command", required=True)
    add_config_arguments(commands.add_parser("cake"), cls)
    return main


def test_arguments_may_come_in_any_order(tmp_path: Path) -> None:
    (tmp_path / "cake.yaml").write_text("eggs: 7\n")
    file = str(tmp_path / "cake.yaml")
    for argv in (
        ["cake", "name=x", "--config", file, "oven.fan=off"],
        ["cake", "--config", file, "name=x", "oven.fan=off"],
        ["cake", "name=x", "oven.fan=off", "--config", file],
    ):
        cake = config_from(parse_arguments(parser(Cake), argv), Cake)
        assert (cake.eggs, cake.name, cake.oven.fan) == (7, "x", "off")


def test_an_unknown_option_is_an_error(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(parser(Cake), ["cake", "--egg-size", "3"])
    assert "there is no option --egg-size; see --help" in capsys.readouterr().err


class Sheet(Settings):
    """A command with positional arguments and a switch."""

    positional: ClassVar = ("index", "images")
    index: str = Field(description="where to search")
    images: tuple[str, ...] = setting((), "what to search for")
    keep_on: bool = setting(False, "keep on")
    page_size: Count | tuple[Count, Count] = setting(1, "side, or height and width")
    paper: str | None = setting(None, "what to print on")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["here"], {"index": "here"}),
        (["here", "a, b.png", "null"], {"index": "here", "images": ("a, b.png", "null")}),
        (["images=[c]", "./x=y", "keep_on=true"], {"index": "./x=y", "images": ("c",), "keep_on": True}),
        (["here", "--page-size", "3", "--paper", "1e3"], {"index": "here", "page_size": 3, "paper": "1e3"}),
        (["--keep-on", "a", "--page-size=[3, 4]"], {"index": "a", "page_size": (3, 4), "keep_on": True}),
        (["here", "page_size=[3, 4]", "paper=a"], {"index": "here", "page_size": (3, 4), "paper": "a"}),
    ],
)
def test_settings_by_position_and_as_options(argv: list[str], expected: dict[str, object]) -> None:
    config = config_from(parse_arguments(parser(Sheet), ["cake", *argv]), Sheet)
    assert {name: getattr(config, name) for name in config.model_fields_set} == expected


@pytest.mark.parametrize("again", [["index=there"], ["--index", "there"], ["index=here"]])
def test_a_setting_by_position_and_by_name_is_an_error(again: list[str]) -> None:
    with pytest.raises(ValueError, match=r"index is given twice, by position and as index=\.\.\."):
        config_from(parse_arguments(parser(Sheet), ["cake", "here", "a", *again]), Sheet)


@pytest.mark.parametrize("argv", [["--eggs", "5", "eggs=7"], ["eggs=7", "--eggs", "5"]])
def test_a_setting_by_name_and_as_an_option_is_an_error(argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"eggs is given twice, as eggs=\.\.\. and as --eggs; give it"):
        config_from(parse_arguments(parser(Cake), ["cake", *argv]), Cake)


@pytest.mark.parametrize("argv", [["eggs=5", "eggs=7"], ["--eggs", "5", "--eggs", "7"]])
def test_of_a_setting_that_is_given_twice_the_last_counts(argv: list[str]) -> None:
    assert config_from(parse_arguments(parser(Cake), ["cake", *argv]), Cake).eggs == 7


def test_a_positional_argument_too_many_is_an_error() -> None:
    class One(Settings):
        positional: ClassVar = ("name",)
        name: str = setting("", "one argument")

    with pytest.raises(ValueError, match="'b' on the command line is not key=value"):
        config_from(parse_arguments(parser(One), ["cake", "a", "b"]), One)


@pytest.mark.parametrize(
    ("argv", "quoted"),
    [
        (["name=x", "sizes=[1,", "2,", "3]"], "'sizes=[1, ...]'"),
        (["name=x", "--sizes", "[1,", "2]"], "'sizes=[1, ...]'"),
        (["name=x", "oven={fan:", "off}"], "'oven={fan: ...}'"),
    ],
)
def test_a_list_that_the_shell_split_is_to_be_quoted(argv: list[str], quoted: str) -> None:
    with pytest.raises(ValueError, match="the shell splits at spaces; quote it: ") as error:
        config_from(parse_arguments(parser(Cake), ["cake", *argv]), Cake)
    assert str(error.value).endswith(quoted)
