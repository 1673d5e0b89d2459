import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml as pyyaml

from dino_vit.commands import COMMANDS
from dino_vit.config.commands import KnnConfig
from dino_vit.config.loading import load, nearest, read_yaml, to_yaml, write_yaml
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import ConfigError, settings_of, values
from tests.support.cake import Cake, Icing


def refused(*overrides: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(Cake, file, overrides)
    assert all(problem in str(error.value) for problem in error.value.problems)
    return list(error.value.problems)


def write(folder: Path, text: str) -> Path:
    file = folder / "cake.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults_then_file_then_command_line(tmp_path: Path) -> None:
    file = write(tmp_path, "eggs: 4\nname: file\noven: {degrees: 1.5e2, fan: off}\n")
    cake = load(Cake, file, ["eggs=5", "sizes=[2, 3e0]"])
    assert (cake.eggs, cake.name, cake.oven.degrees, cake.oven.fan) == (5, "file", 150.0, "off")
    assert cake.sizes == (2.0, 3.0)
    assert cake.given == {"eggs", "name", "oven.degrees", "oven.fan", "sizes"}
    assert load(Cake) == Cake()


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ("eggs=1.5", "must be a valid integer"),
        ("eggs=true", "must be a valid integer"),
        ("eggs='3'", "must be a valid integer"),
        ("eggs=null", "must be a valid integer"),
        ("eggs=0", "must be greater than or equal to 1"),
        ("eggs=1e30", "must be less than or equal to 1000000000000"),
        ("sizes=[1, .nan]", "item 2 must be a finite number"),
        ("sizes=[1]", "item 2 must be given"),
        ("sizes=3", "must be a list"),
        ("tiers=[a, 1]", "item 2 must be a valid string"),
        ("name=null", "must be a valid string"),
        ("name=", "must be non-empty text"),
        ("oven.fan=maybe", "must be one of on, off"),
        ("oven.degrees=hot", "must be a valid number"),
        ("icing=3", "must be a valid dictionary or instance of Icing (null: none)"),
    ],
)
def test_what_is_wrong_and_what_is_allowed_is_said(given: str, allowed: str) -> None:
    (text,) = refused(given)
    assert text.startswith(given.partition("=")[0] + " = ")
    assert text.endswith(f": {allowed}")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("eggs=" + "[" * 3000, "cannot be read as YAML"),
        ("eggs={[1]: 2}", "a name must be text"),
    ],
)
def test_yaml_that_cannot_be_read_is_a_sentence(given: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        load(Cake, None, [given])
    assert load(Cake, None, ["sizes=[&a 0.5, *a]"]).sizes == (0.5, 0.5)


def test_whole_floats_are_integers_and_one_value_is_a_list(tmp_path: Path) -> None:
    assert load(Cake, None, ["eggs=1e1"]).eggs == 10
    assert load(Cake, None, ["tiers=top"]).tiers == ("top",)
    assert load(Cake, write(tmp_path, "tiers: top\n")).tiers == ("top",)
    assert load(Cake, None, {"tiers": [tmp_path, "b"], "name": tmp_path}).tiers == (str(tmp_path), "b")


def test_text_is_taken_literally() -> None:
    for text in ("2024", "1e-3", "no", "*.tar", "a: b", "null.jpg", " x", "a=b"):
        assert load(Cake, None, [f"name={text}"]).name == text


def test_unknown_names_are_answered_with_the_nearest() -> None:
    assert refused("egs=3") == ["egs is not a setting; did you mean eggs?"]
    assert refused("eggs={yolk: 1}")[0].startswith("eggs.yolk is not a setting; ")
    assert refused("degrees=3") == ["degrees is not a setting; did you mean oven.degrees?"]
    (text,) = refused("oven.whatever_it_is=3")
    assert text.endswith("the section oven has oven.degrees, oven.gas, oven.mark, oven.fan")
    assert refused("oven=on") == ["oven is not a setting; did you mean oven.fan?"]
    (text,) = refused("whatever=3")
    assert text.endswith("the settings are name, eggs, sizes, tiers, oven, icing")
    for argument, hint in (("strawberry", "write settings as name=value"), ("eggs", "write eggs=...")):
        with pytest.raises(ValueError, match=hint):
            load(Cake, None, [argument])


@pytest.mark.parametrize("kind", ["delete", "insert", "replace", "swap"])
def test_a_typo_leads_back_to_its_key(kind: str) -> None:
    for key in settings_of(PretrainConfig):
        rng = random.Random(f"{kind}: {key}")
        at = rng.choice([i for i, letter in enumerate(key) if letter != "."])
        typo = {
            "delete": key[:at] + key[at + 1 :],
            "insert": key[:at] + rng.choice("qzx") + key[at:],
            "replace": key[:at] + rng.choice("qzx") + key[at + 1 :],
            "swap": key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :],
        }[kind]
        others = nearest(typo, PretrainConfig)
        is_another = any(
            f".{name}".endswith(f".{typo.rpartition('.')[2]}") for name in settings_of(PretrainConfig)
        )
        assert key in others or key.removesuffix("s") in others or is_another, typo


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("optim.lrr", ["optim.lr"]),
        ("model.lr", ["optim.lr"]),
        ("epochs", ["budget.epochs"]),
        ("weights", ["teacher.weights", "gram.weights", "init.weights"]),
        ("teacher.temp", ["loss.teacher_temp"]),
        ("xyzzy", []),
        ("", []),
    ],
)
def test_names_without_their_section_are_understood(typed: str, meant: list[str]) -> None:
    assert nearest(typed, PretrainConfig) == meant


def test_all_mistakes_are_reported_together_with_their_origin(tmp_path: Path) -> None:
    file = write(tmp_path, "egs: 4\noven:\n  fan: maybe\nsizes: [3, 2]\n")
    assert refused("tiers=[1]", "icing.layers=2", file=file) == [
        f"egs is not a setting ({file}); did you mean eggs?",
        "tiers = [1]: item 1 must be a valid string",
        f"oven.fan = maybe ({file}): must be one of on, off",
        "icing.colour is missing: its colour",
    ]


def test_a_mistake_hides_only_the_contradictions_it_is_part_of() -> None:
    assert len(refused("eggs=12", "oven.degrees=300")) == 1
    assert len(refused("egs=12", "eggs=20", "oven.degrees=300")) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "PATH: write settings as `name: value`"),
        ("eggs: 3\neggs: 4\n", "PATH, line 2: eggs is given twice; keep one"),
        ("a: &x {b: *x}\n", "PATH, line 1: found unconstructable recursive node"),
        ("&x\na: *x\n", "PATH, line 1: found unconstructable recursive node"),
        ("a: &x [*x]\n", "PATH, line 1: found unconstructable recursive node"),
        ("oven: 3\n", "oven is not a setting (PATH); the section oven has oven.degrees, oven.gas"),
        ("a:\n\tb: 1\n", "PATH, line 2: found character '\\t'"),
        ("a: [1, 2\n", "PATH, line 2: "),
        ("a: 1\n---\nb: 2\n", "PATH, line 2: "),
        ("a: !!python/object:os.system {}\n", "PATH, line 1: "),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=r"cake\.yaml") as error:
        load(Cake, file)
    assert message.replace("PATH", str(file)) in str(error.value)


def test_a_file_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load(Cake, tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xffeggs")
    with pytest.raises(ValueError, match=r"binary\.yaml: cannot be read as YAML"):
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


def test_exclusive_groups_replace_each_other_across_layers(tmp_path: Path) -> None:
    assert load(Cake, None, ["oven.mark=4"]).oven.degrees is None
    file = write(tmp_path, "oven: {gas: true, mark: 4}\n")
    oven = load(Cake, file, ["oven.degrees=100"]).oven
    assert (oven.degrees, oven.gas, oven.mark) == (100.0, None, None)
    in_one_layer = load(Cake, None, ["oven.degrees=100", "oven.mark=4"]).oven  # left to `contradictions`
    assert (in_one_layer.degrees, in_one_layer.mark) == (100.0, 4)


def test_settings_laid_over_others_are_checked_and_count_as_given() -> None:
    cake = load(Cake, load(Cake, None, ["eggs=5"]), {"oven.mark": 3, "icing.colour": "red"})
    assert (cake.eggs, cake.oven.degrees, cake.oven.mark, cake.icing) == (5, None, 3, Icing(colour="red"))
    assert {"eggs", "oven.mark", "icing.colour"} <= cake.given
    assert load(Cake, cake, {"oven.degrees": 90.0}).oven.mark is None
    with pytest.raises(ConfigError, match="did you mean eggs"):
        load(Cake, cake, {"egs": 3})
    with pytest.raises(ConfigError, match="omelette"):
        load(Cake, cake, {"eggs": 20, "oven.degrees": 250.0})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1e-3", 1e-3), ("1E5", 1e5), ("-.5", -0.5), ("5.", 5.0), ("12", 12), ("-3", -3), ("no", "no")),
        *(("on", "on"), ("true", True), ("False", False), ("~", None), ("null", None), ("", None)),
        *(("012", "012"), ("1:30", "1:30"), ("1_000", "1_000"), ("2024-01-01", "2024-01-01")),
        *(("'1e-3'", "1e-3"), ("[[1, 2.5], x]", [[1, 2.5], "x"]), ("-.inf", -math.inf)),
    ],
)
def test_yaml_is_read_by_version_1_2(text: str, value: object) -> None:
    read = read_yaml(f"key: {text}", "here")["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 0.1, 1e-6, 5e-4, 1e22, "no", "1e-3", "null", "a: b", "", "é", [1, 0.5], ["x", None]],
)
def test_what_is_written_reads_back_in_either_version(value: object) -> None:
    text = write_yaml(value)
    assert "\n" not in text
    assert read_yaml(f"key: {text}", "written") == {"key": value}
    assert pyyaml.safe_load(text) == value or value == 1e22
    assert write_yaml((3.0, (0.5, -1e6))) == "[3, [0.5, -1000000]]"


@pytest.mark.parametrize(
    "overrides", [[], ["name=1e-3", "eggs=4", "oven.mark=4", "icing.colour=no", "tiers=[a, 'null']"]]
)
def test_settings_are_written_as_yaml_that_loads_back(tmp_path: Path, overrides: list[str]) -> None:
    cake = load(Cake, None, overrides)
    text = to_yaml(cake)
    assert load(Cake, write(tmp_path, text)) == cake
    assert all(f"# {settings_of(Cake)[key].meaning}" in text for key in values(cake))


@pytest.mark.parametrize("given", [np.array([1.0, 5.0]), torch.tensor([1, 5]), [np.int64(1), 5]])
def test_arrays_are_lists(given: object) -> None:
    config = load(COMMANDS["knn"].config_class, None, {"source": "x", "weights": "y", "k": given})
    assert config.k == (1, 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [("k=many", "k = many: item 1 must be a valid integer"), ("k=[]", "k = []: must have at least 1 item")],
)
def test_a_list_that_must_not_be_empty_gets_one_message(given: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(KnnConfig, None, ["source=photos", "weights=runs/first", given])
    assert error.value.problems == (said,)
