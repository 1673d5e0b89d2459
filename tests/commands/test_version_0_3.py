"""What version 0.3 wrote is used by this one: runs, weights, embeddings, shards, results.

`recorded/version-0.3.zip` was made by 0.3: `run` and `weighted` (by `data.weights`) are runs of four steps
without their last checkpoint.
"""

import json
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import dino_vit
from dino_vit.cli import main
from dino_vit.core.checkpoint import read_checkpoint
from tests.support.close import assert_close_to_scale

RECORDED = Path(__file__).parent / "recorded/version-0.3.zip"


@pytest.fixture
def files_of_0_3(tmp_path, monkeypatch):
    with zipfile.ZipFile(RECORDED) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stem(name):
    return Path(name).stem


def command(*parts):
    assert main([*parts]) == 0


def test_a_run_resumes_and_is_drawn_with_its_evaluations(files_of_0_3):
    before = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()[:2]]
    command("pretrain", "--config", "run/config.yaml")
    records = dino_vit.Run("run").metrics()
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["loss"] for record in records[:2]] == [record["loss"] for record in before]
    assert read_checkpoint(Path("run/checkpoints/step-00000004.safetensors")).step == 4
    command("report", "run", "images=4")
    page = Path("run/report.html").read_text()
    assert "knn, step 4" in page
    assert "linear, step 4" in page


@pytest.mark.parametrize("weights", ["run", "weighted", "backbone.safetensors", "vit.safetensors"])
def test_weights_are_evaluated_and_exported(weights, files_of_0_3):
    assert dino_vit.knn("synthetic:16:16", weights, verbose=False).figure.images == 16
    if weights == "run":
        labels = [f"{name},{name[0]}" for name in dino_vit.embed("synthetic:16:16", weights).names]
        Path("few.csv").write_text("\n".join(["name,label", *labels[:12]]))
        command("linear", "synthetic:16:16", weights, "cs=[1]")
        command("predict", "synthetic:16:16", weights, "labels=few.csv")
        command("attention", "synthetic:16:16", weights, "count=2")
        command("export", weights, "new.safetensors", "--format", "timm")


def test_embeddings_and_shards_are_read(files_of_0_3, capsys):
    with tarfile.open("packed/000000.tar") as shard:
        Path("image.png").write_bytes(shard.extractfile("bricks/00000005.png").read())
    command("search", "embeddings.parquet", "image.png", "weights=backbone.safetensors", "k=2")
    assert "bricks/00000005" in capsys.readouterr().out.splitlines()[1]
    command("duplicates", "embeddings.parquet", "output=pairs.json")
    sources = "packed", "synthetic:16:16"
    packed, generated = (dino_vit.embed(source, "backbone.safetensors") for source in sources)
    values = [dict(zip(map(stem, made.names), made.values, strict=True)) for made in (packed, generated)]
    assert values[0].keys() == values[1].keys()
    assert_close_to_scale(*({name: torch.from_numpy(row) for name, row in rows.items()} for rows in values))


def test_a_run_by_weights_says_what_left_and_resumes_without_them_if_asked(files_of_0_3, capsys):
    settings = ["pretrain", "--config", "weighted/config.yaml"]
    assert main(settings) == 2
    said = capsys.readouterr().err
    assert "data.weights is not a setting (weighted/config.yaml); name an image twice" in said
    assert main([*settings, "data.weights=null"]) == 2
    said = capsys.readouterr().err
    assert "at step 2 with other settings: data.weights was weights.csv, which left in 0.4" in said
    assert "run.resume=changed" in said
    command(*settings, "data.weights=null", "run.resume=changed")
    config = read_checkpoint(Path("weighted/checkpoints/step-00000004.safetensors")).metadata["config"]
    assert "weights" not in config["data"]


def test_old_names_of_results_warn_and_name_the_new_ones(files_of_0_3):
    result = dino_vit.knn("synthetic:16:16", "run", verbose=False)
    with pytest.warns(FutureWarning, match=r"EvaluationResult\.top1 is called EvaluationResult\.figure now"):
        figure = result.top1
    assert figure is result.figure
    with pytest.warns(FutureWarning, match=r"Figure\.percent is called Figure\.value now") as warned:
        assert figure.percent == figure.value
    assert warned[0].filename == __file__
    assert not hasattr(result, "accuracy")
    assert pickle.loads(pickle.dumps(figure)) == figure
