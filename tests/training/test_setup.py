"""How a run is set up: from weights, with labels, by recipe, in a precision."""

import json
import re

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import ViTConfig, ViTImageProcessor, ViTModel

from dino_vit import VisionTransformer, export_backbone, load_backbone, save_backbone
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.checkpoint import Checkpoints
from dino_vit.core.storage import write_tensors
from dino_vit.data.open import open_source
from dino_vit.training.pretrain import pretrain, set_up
from dino_vit.training.reporter import describe_start, start_record
from tests.support.documents import ROOT
from tests.support.peers import HF_VIT
from tests.support.runs import tensors
from tests.support.training import configured, moved, opened, tensors_of, trained


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A run to start from."""
    output = tmp_path_factory.mktemp("weights") / "run"
    trained(output, {"budget.steps": 10})
    return output


FROM = {"init.head_epochs": 0.5, "budget.steps": 10, "compute.eval_every": 1, "teacher.momentum": 0.9}


def test_trained_weights_are_kept_while_the_heads_learn(tmp_path, weights, student_at, capsys, caplog):
    caplog.set_level("INFO", "dino_vit")  # at which a run shows its lines
    state = trained(tmp_path / "run", {**FROM, "init.weights": weights})
    start = load_backbone(weights)
    assert not moved(
        tensors_of(start), {name[9:]: t for name, t in student_at[0].items() if name[:9] == "backbone."}
    )
    for step in range(9):
        changed = moved(student_at[step], student_at[step + 1])
        assert any(name.startswith("backbone.") for name in changed) == (step >= 4), step
        assert any(name.startswith("head.mlp") for name in changed) or step == 0
    figure = state.evaluations.online(start).knn
    assert json.loads((tmp_path / "run" / "baseline.json").read_bytes())["knn"] == figure
    assert f"initial weights {figure:.1f} by the CLS token" in capsys.readouterr().err


def test_an_export_can_be_continued_and_weights_are_read_as_told(tmp_path, weights):
    start = load_backbone(weights)
    export_backbone(start, tmp_path / "x.pth", "timm")
    state = opened(tmp_path / "run", {**FROM, "init.weights": tmp_path / "x.pth"})
    assert not moved(tensors_of(state.student.backbone), tensors_of(start))

    torch.save(start.state_dict(), tmp_path / "bare.pth")
    told = {"weights": tmp_path / "bare.pth", "heads": 4, "format": "timm"}
    settings = FROM | {"model.heads": 4} | {f"init.{name}": value for name, value in told.items()}
    state = opened(tmp_path / "told", settings)
    assert (state.config.model.heads, state.student.backbone.position_mode) == (4, "timm")
    expected = load_backbone(weights, network="student")
    state = opened(tmp_path / "s", {**FROM, "init.weights": weights, "init.network": "student"})
    assert not moved(tensors_of(state.student.backbone), tensors_of(expected))
    assert moved(tensors_of(expected), tensors_of(start))


def test_a_run_from_weights_goes_on_without_them(tmp_path, weights):
    settings = {**FROM, "init.weights": weights}
    trained(tmp_path / "whole", settings)
    trained(tmp_path / "run", {**settings, "compute.checkpoint_every": 7})
    (tmp_path / "run" / "checkpoints" / "step-00000010.safetensors").unlink()
    aside = weights.with_name("aside")
    weights.rename(aside)
    try:
        trained(tmp_path / "run", settings)
    finally:
        aside.rename(weights)
    assert not moved(tensors(tmp_path / "whole", 10), tensors(tmp_path / "run", 10))


def test_grey_images_stay_grey_for_weights_of_grey_ones(tmp_path):
    model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2, channels=1)
    save_backbone(model, tmp_path / "grey.safetensors", mean=(0.3,), std=(0.2,))
    np.save(tmp_path / "grey.npy", np.random.default_rng(0).integers(0, 256, (64, 32, 32), dtype=np.uint8))
    settings = {**AUTO, "init.weights": tmp_path / "grey.safetensors", "data.source": tmp_path / "grey.npy"}
    for recipe in ("auto", "dino"):
        run = {**settings, "recipe": recipe, "optim.warmup_epochs": 0, "optim.freeze_last_layer_epochs": 0}
        run |= {"head.prototypes": 256, "head.hidden_dim": 64, "head.bottleneck_dim": 32, "budget.steps": 2}
        for state in (trained(tmp_path / recipe, run, {}), opened(tmp_path / recipe, run, {})):
            data = state.config.data
            assert (data.channels, data.mean, state.config.augment.hue) == (1, (0.3,), 0)


def test_weights_of_other_channels_are_inflated(tmp_path, weights):
    np.save(tmp_path / "grey.npy", np.random.default_rng(0).integers(0, 256, (64, 32, 32), dtype=np.uint8))
    settings = {**FROM, "init.weights": weights, "budget.steps": 9, "data.source": tmp_path / "grey.npy"}
    settings |= {f"augment.{name}": 0 for name in ("saturation", "hue", "grey")}
    with pytest.raises(ValueError, match=r"data.channels=5, but the images of .* have 1 channel"):
        opened(tmp_path / "run", {**settings, "data.channels": 5, "data.mean": "null", "data.std": "null"})
    settings |= {"data.channels": 1, "data.mean": "[0.5]", "data.std": "[0.25]"}
    state = opened(tmp_path / "run", settings)
    assert not moved(tensors_of(state.student.backbone), tensors_of(load_backbone(weights, channels=1)))
    assert trained(tmp_path / "run", settings).evaluations.best["figure"] == "rankme"


def test_labels_of_a_file_are_what_a_run_is_evaluated_with(tmp_path):
    source = open_source("synthetic:64:32")
    np.save(tmp_path / "images.npy", np.stack([source.read(index).numpy() for index in range(64)]))
    rows = "".join(f"{index:09d},{source.label(index)}\n" for index in range(64))
    (tmp_path / "labels.csv").write_text(rows)
    settings = {"data.source": tmp_path / "images.npy", "compute.eval_every": 1, "budget.steps": 10}
    assert trained(tmp_path / "without", settings).evaluations.best["figure"] == "rankme"
    settings["data.labels"] = tmp_path / "labels.csv"
    assert trained(tmp_path / "with", settings).evaluations.best["figure"] == "knn"


def test_recipe_auto_says_what_it_chose_and_why(tmp_path):
    settings = {
        "recipe": "auto",
        "data.source": "synthetic:640:32",
        "compute.precision": "no",
        "data.workers": 0,
    }
    settings |= {"model.arch": "null", "model.width": 32, "model.depth": 2, "model.heads": 2}
    found = set_up(configured(tmp_path / "run", settings, {"compute.trackers": "[]"}), Accelerator())
    short = list(describe_start(found, start_record(found)))
    assert len(short) <= 12
    assert f"{len(found.run.choices)} settings were chosen to fit the images" in short[-1]
    assert ": 1 process on cpu, precision no, 0 workers, global batch " in short[0]
    (columns,) = [line for line in short if line.startswith("columns of the log: ")]
    assert "docs/" not in columns, "a wheel has no docs"
    table = (ROOT / "docs/start/watch.md").read_text().split("| in the log | meaning |")[1]
    explained = re.findall(r"(?:: |; )([\w ]+): ", columns)
    assert explained == ["loss", "wait", "eta"]
    assert all(f"| `{column}` |" in table for column in explained)
    settings["compute.verbose"] = "true"
    found = set_up(configured(tmp_path / "run", settings, {"compute.trackers": "[]"}), Accelerator())
    said = "\n".join(describe_start(found, start_record(found)))
    config = found.config
    for key, value in (("head.prototypes", 256), ("model.patch_size", 4), ("views.global_size", 32)):
        assert f"  {key}={value}: " in said
    assert config.head.prototypes == len(found.student.head.last_layer.weight_v) == 256
    assert f"budget.epochs={config.budget.epochs}: " in said


def test_auto_precision_that_means_something_else_here_is_said(tmp_path, monkeypatch):
    for chosen in ("bf16", "no"):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda chosen=chosen: chosen == "bf16")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        settings = {"compute.precision": "auto", "budget.steps": 10}
        if chosen == "bf16":
            trained(tmp_path / "run", settings)
        else:
            with pytest.raises(ValueError, match=r"compute.precision=auto was bf16 and is no here"):
                opened(tmp_path / "run", settings)


def test_a_folder_whose_checkpoint_has_another_version_is_refused(tmp_path, weights, caplog):
    checkpoint = Checkpoints(weights).newest()
    path = tmp_path / "checkpoints" / checkpoint.path.name
    write_tensors(path, checkpoint.tensors, json.dumps({**checkpoint.metadata, "version": 2}))
    with pytest.raises(ValueError, match="none of the checkpoints"):
        opened(tmp_path, {"budget.steps": 10})
    assert "has format version 2, but this dino-vit reads 1" in caplog.text


def test_the_folder_of_a_fine_tuning_is_not_that_of_a_run(tmp_path):
    Checkpoints(tmp_path).save(1, {"model.weight": torch.ones(2)}, {"facts": {}, "history": []})
    with pytest.raises(ValueError, match="is not a checkpoint of a pretraining; give another output"):
        opened(tmp_path, {"budget.steps": 10})


@pytest.mark.parametrize("name", ["init.weights", "teacher.weights"])
@pytest.mark.parametrize("recipe", ["dino", "auto"])
def test_a_baseline_is_no_network_to_learn_from(tmp_path, name, recipe):
    with pytest.raises(ValueError, match=rf"{name}=edges has no weights; give those of a network"):
        opened(tmp_path, {"recipe": recipe, name: "edges", "data.source": "synthetic:64:32"})


def test_a_run_without_images_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no images are given: .* `dino-vit pretrain photos`"):
        pretrain(load(PretrainConfig, None, [f"output={tmp_path / 'run'}"]))
    with pytest.raises(
        ValueError, match="no images are given"
    ):  # of a damaged config.yaml, which is read for a report
        _ = load(PretrainConfig).data.images


AUTO = {"recipe": "auto", "data.source": "synthetic:64:96", "data.batch_size": 8, "data.workers": 0}
AUTO |= {"compute.trackers": "[]", "compute.precision": "no", "budget.steps": 6}
SHORT = {**AUTO, "views.global_size": 32, "views.local_size": 16, "model.patch_size": 8}
SHORT |= {"model.arch": "null", "model.width": 32, "model.depth": 2, "model.heads": 2}


def test_views_are_of_the_images_that_the_weights_saw_and_not_of_all_their_positions(tmp_path):
    model = ViTModel(ViTConfig(**HF_VIT | {"image_size": 64}), add_pooling_layer=False)
    model.save_pretrained(tmp_path / "hub")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "hub")
    state = opened(tmp_path / "run", {**AUTO, "init.weights": tmp_path / "hub"}, {})
    assert state.config.views.global_size == 32
    assert state.evaluations.online.transform.size == (32, 32)


def test_features_are_read_from_larger_images_than_views(tmp_path):
    """The positions are those of the images that are read, in the file and in a run that starts from it."""
    trained(tmp_path / "run", SHORT, {})
    model = load_backbone(tmp_path / "run")
    assert (model.image_size, model.transform.size) == ((64, 64), (64, 64))
    state = opened(tmp_path / "run", {**SHORT, "budget.steps": 8, "compute.resume": "changed"}, {})
    assert (state.step, state.evaluations.online.transform.size) == (6, (64, 64))
    further = {**AUTO, "init.weights": tmp_path / "run"}
    trained(tmp_path / "again", further, {})
    for settings in (further, {**further, "budget.steps": 8, "compute.resume": "changed"}):
        again = opened(tmp_path / "again", settings, {})
        assert (again.config.views.global_size, again.student.backbone.image_size) == (32, (64, 64))
    as_published = opened(tmp_path / "plain", {**SHORT, "recipe": "dino"}, {})
    assert as_published.evaluations.online.transform.size == (32, 32)
