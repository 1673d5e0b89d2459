import random
from pathlib import Path

import pytest

from dino_vit.config.loading import load, nearest, replace
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError, given_keys, settings_of
from tests.support.cake import Cake, Icing


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


def test_whole_floats_are_integers_and_others_are_not() -> None:
    assert load(Cake, None, ["eggs=1e1"]).eggs == 10
    for value in ("1.5", "true", "'3'", "null", "0", ".inf", "[1]", "{}"):
        (text,) = refused(f"eggs={value}")
        assert text.startswith("eggs = ")
        assert text.endswith("(command line): must be a whole number from 1 to 1,000,000,000,000")
    (text,) = refused("sizes=[1, .nan]")
    assert "must be a list of 2, each a number above 0" in text


def test_a_list_of_one_value_needs_no_brackets(tmp_path: Path) -> None:
    assert load(Cake, None, ["tiers=top"]).tiers == ("top",)
    assert load(Cake, write(tmp_path, "tiers: top\n")).tiers == ("top",)
    assert refused("sizes=3")[0].startswith("sizes = 3 (command line): must be a list of 2, each")
    assert refused("tiers=null") == ["tiers = null (command line): must be a list, each non-empty text"]


def test_a_file_that_does_not_end_is_no_file_of_settings() -> None:
    with pytest.raises(ValueError, match="/dev/zero has more than 1,000,000 bytes"):
        load(Cake, Path("/dev/zero"))


def test_text_is_taken_literally() -> None:
    for text in ("2024", "1e-3", "no", "*.tar", "a: b", "null.jpg", " x", "a=b"):
        assert load(Cake, None, [f"name={text}"]).name == text
    assert refused("name=null") == ["name = null (command line): must be non-empty text"]
    assert refused("name=") == ["name = '' (command line): must be non-empty text"]


def test_unknown_names_are_answered_with_the_nearest() -> None:
    assert refused("egs=3") == ["egs is not a setting (command line); did you mean eggs?"]
    assert refused("oeufs=3") == ["oeufs is not a setting (command line); did you mean eggs?"]
    assert refused("eggs={yolk: 1}")[0].startswith("eggs.yolk is not a setting (command line); there are ")
    assert refused("degrees=3") == ["degrees is not a setting (command line); did you mean oven.degrees?"]
    (text,) = refused("oven.whatever_it_is=3")
    assert text.endswith("the section oven has oven.degrees, oven.gas, oven.mark, oven.fan")
    (text,) = refused("whatever=3")
    assert text.endswith("there are name, eggs, sizes, tiers, oven, icing")
    assert "write name=..." in refused("strawberry")[0]
    assert "write eggs=..." in refused("eggs")[0]


@pytest.mark.parametrize("kind", ["delete", "insert", "replace", "swap"])
def test_a_typo_leads_back_to_its_key(kind: str) -> None:
    rng = random.Random(kind)
    for key in settings_of(PretrainConfig):
        at = rng.choice([i for i, letter in enumerate(key) if letter != "."])
        typo = {
            "delete": key[:at] + key[at + 1 :],
            "insert": key[:at] + rng.choice("qzx") + key[at:],
            "replace": key[:at] + rng.choice("qzx") + key[at + 1 :],
            "swap": key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
        }[kind]
        assert key in nearest(typo, PretrainConfig), typo


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", ["optim.lr"]),
        ("optim.lrr", ["optim.lr"]),
        ("--optim.lr", ["optim.lr"]),
        ("model.lr", ["optim.lr"]),
        ("epochs", ["budget.epochs"]),
        ("weights", ["data.weights", "init.weights", "anchor.weights", "teacher.weights"]),
        ("anchor.weighst", ["anchor.weight", "anchor.weights"]),
        ("teacher.temp", ["loss.teacher_temp"]),
        ("out_dim", ["head.prototypes"]),
        ("scale", ["anchor.scale"]),
        ("batch_size_per_gpu", ["data.batch_size"]),
        ("local_crops_number", ["views.local_count"]),
        ("batch-size", ["data.batch_size"]),
        ("head.layrs", ["head.layers"]),
        ("xyzzy", []),
        ("", []),
    ],
)
def test_names_from_elsewhere_and_without_their_section_are_understood(typed: str, meant: list[str]) -> None:
    assert nearest(typed, PretrainConfig) == meant


def test_all_mistakes_are_reported_together_with_their_origin(tmp_path: Path) -> None:
    file = write(tmp_path, "egs: 4\noven:\n  fan: maybe\nsizes: [3, 2]\n")
    assert refused("tiers=[1]", "icing.layers=2", file=file) == [
        f"egs is not a setting ({file}:1); did you mean eggs?",
        "tiers = [1] (command line): must be a list, each non-empty text",
        f"oven.fan = maybe ({file}:3): must be one of on, off",
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
        ("- a\n", "PATH:1: write settings as `name: value`"),
        ("eggs\n", "PATH:1: write settings as `name: value`"),
        ("eggs: 3\neggs: 4\n", "eggs is given twice (PATH:1 and PATH:2); keep one"),
        ("oven: {fan: on}\noven.fan: off\n", "oven.fan is given twice (PATH:1 and PATH:2); keep one"),
        ("oven: 3\n", "oven is not a setting (PATH:1); the section oven has oven.degrees, oven.gas"),
        ("1: 2\n", "1 is not a setting"),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    assert message.replace("PATH", str(file)) in " ".join(refused(file=file))


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load(Cake, tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xffeggs")
    with pytest.raises(ValueError, match=r"binary\.yaml: unacceptable character"):
        load(Cake, tmp_path / "binary.yaml")


def test_an_empty_section_and_an_empty_mapping_change_nothing(tmp_path: Path) -> None:
    for text in ("oven:\n", "oven: {}\n", "{}\n", "", "# only a comment\n"):
        assert load(Cake, write(tmp_path, text)) == Cake()


def test_an_optional_section_can_be_given_and_removed(tmp_path: Path) -> None:
    file = write(tmp_path, "icing: {colour: red, layers: 2}\n")
    assert load(Cake, file).icing == Icing(colour="red", layers=2)
    assert load(Cake, file, ["icing=null"]).icing is None
    assert load(Cake, None, ["icing=null", "icing.colour=blue"]).icing == Icing(colour="blue")
    assert load(Cake, None, ["icing.colour=blue", "icing=null"]).icing is None
    assert load(Cake, file, ["icing={colour: blue}"]).icing == Icing(colour="blue", layers=2)
    assert refused("icing=3") == ["icing = 3 (command line): must be a section or null"]


def test_exclusive_groups_replace_each_other_across_layers(tmp_path: Path) -> None:
    assert load(Cake, None, ["oven.mark=4"]).oven.degrees is None
    file = write(tmp_path, "oven: {gas: true, mark: 4}\n")
    oven = load(Cake, file, ["oven.degrees=100"]).oven
    assert (oven.degrees, oven.gas, oven.mark) == (100.0, None, None)
    both = load(Cake, None, ["oven.degrees=100", "oven.mark=4"]).oven  # left to `contradictions`
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
