"""Several sources in one run, with splits and labels of their own."""

import json

import pytest

from dino_vit.cli import main
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.joined import mix_sets
from dino_vit.data.open import open_source
from tests.support.image_sets import FILES, ORDER, write_folder, write_tar
from tests.support.images import write_synthetic
from tests.support.remote import write_shards
from tests.support.training import assert_resumes_exactly


@pytest.fixture
def sources(tmp_path):
    write_folder(tmp_path / "labelled")
    write_tar(tmp_path / "plain" / "a.tar", {f"{number}.png": b"%d" % number for number in range(20)})
    return [str(tmp_path / "plain"), str(tmp_path / "labelled")]


def test_an_epoch_ends_when_the_source_that_is_used_up_first_is(sources):
    plain, labelled = map(open_source, sources)
    assert open_source(sources).mix.counts == [20, 5]
    assert open_source(sources, None, [0.7, 0.3]).mix.counts == [12, 5]
    assert mix_sets(sources, [plain, labelled], [9, 1]).mix.counts == [20, 2]
    text = open_source(sources, None, [1, 1]).describe_epoch()
    assert text.startswith("an epoch is 10 images, none of them twice: 5 of the 20 of ")
    assert text.endswith("labelled (50.0%)")
    with pytest.raises(ValueError, match=r"data\.mix has 3 shares, data\.source 2 sources"):
        open_source(sources, None, [1, 1, 1])


def test_items_are_those_of_the_sources(sources):
    mixed = open_source(sources)
    assert len(mixed) == 25
    assert [mixed.read(20 + index) for index in range(5)] == [FILES[name] for name in ORDER]
    assert mixed.name(20) == f"{sources[1]}/{ORDER[0]}"
    assert [mixed.label(index) for index in (0, 19, 20)] == [None, None, 0]
    part, name = mixed.evaluated_part()
    assert (name, len(part), part.labels.names) == (sources[1], 5, ("cat", "dog", "dog-2"))
    assert mixed.fingerprint != open_source(sources, None, [1, 1]).fingerprint
    assert mixed.stamp == open_source(sources).stamp


def test_inspect_data_says_what_an_epoch_is(tmp_path, capsys):
    for name, images in (("a", 6), ("b", 10)):
        for number in range(images):
            write_synthetic(tmp_path / name / f"{number}.png", number)
    argv = ["inspect-data", f"[{tmp_path}/a, {tmp_path}/b]", "mix=[0.75, 0.25]"]
    assert main(argv) == 0
    assert f"an epoch is 8 images, none of them twice: 6 of the 6 of {tmp_path}/a" in capsys.readouterr().out
    assert main([*argv, "as_json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 16


def test_a_run_of_two_sources_resumes_bit_for_bit(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    write_shards(tmp_path / "shards", 4, 16)
    for number in range(32):
        write_synthetic(tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png", number)
    settings = {"data.source": f"[{tmp_path}/shards, {tmp_path}/photos]", "data.mix": "[0.6, 0.4]"}
    settings |= {"data.order": "window", "data.window": 2, "compute.eval_every": 1}
    assert_resumes_exactly(tmp_path, {**settings, "budget.steps": 20}, step=14)
    said = capsys.readouterr().err
    assert "an epoch is 80 images, none of them twice: 48 of the 64" in said
    assert f"evaluated on {tmp_path}/photos, the first source with labels" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data.source": "[a, b]", "data.mix": "[1]"},
            "data.mix has 1 share, but data.source names 2",
        ),
        ({"data.source": "a", "data.mix": "[1, 2]"}, "data.mix has 2 shares, but data.source names 1 source"),
        ({"data.source": "[a, b]", "data.labels": "x.csv"}, "data.labels=x.csv is a file for one source"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        load(PretrainConfig, None, [f"{key}={value}" for key, value in settings.items()])
