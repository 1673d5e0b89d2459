"""What must be as it was when a run resumes: settings, images, labels, and the batch of a forward pass."""

import json
import shutil

import pytest

from dino_vit.core.process import Interruption
from dino_vit.data.open import open_source
from dino_vit.training.loop import train
from dino_vit.training.networks import build_untrained
from dino_vit.training.reporter import Reporter
from tests.support.images import write_synthetic
from tests.support.runs import steps
from tests.support.training import interrupted, opened, trained

SHORT = {"optim.warmup_epochs": 0, "compute.keep_every": 5}


def test_images_that_were_overwritten_are_other_images_and_copied_ones_are_the_same(tmp_path):
    photos, output = tmp_path / "photos", tmp_path / "run"
    settings = {"budget.steps": 5, "compute.eval_every": 0.5, **SHORT}
    for number in range(64):
        write_synthetic(photos / f"{number:02}.png", number, size=32)
    assert trained(output, {"data.source": photos, **settings}).evaluations.best is not None
    photos.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", photos, copy_function=shutil.copyfile)
    opened(output, {"data.source": photos, **settings})
    opened(output, {"data.source": tmp_path / "moved", **settings})
    write_synthetic(photos / "07.png", 7, size=40)  # the folder is as old as before
    with pytest.raises(ValueError, match=r"the images of .*photos are not those that it has learned from"):
        opened(output, {"data.source": photos, **settings})
    changed = {**settings, "data.source": photos, "budget.steps": 10, "compute.resume": "changed"}
    assert opened(output, changed).evaluations.best is None
    write_synthetic(photos / "more.png", 64)
    assert opened(output, changed).step == 5


def write_labels(folder, classes):
    """Give the images of the runs other labels, in the same file."""
    names = [open_source("synthetic:64:32").name(index) for index in range(64)]
    lines = [f"{name},{number % classes}\n" for number, name in enumerate(names)]
    (folder / "labels.csv").write_text("".join(lines))
    return folder / "labels.csv"


def test_with_other_labels_figures_so_far_are_set_aside_if_that_is_asked_for(tmp_path, caplog):
    """What was the best by the old ones, and its checkpoint, would be compared with figures of others."""
    output = tmp_path / "run"
    settings = {
        "data.labels": write_labels(tmp_path, 2),
        "budget.steps": 20,
        "compute.eval_every": 0.5,
        **SHORT,
    }
    interrupted(output, settings, 5)
    before = opened(output, settings)
    assert before.evaluations.best["figure"] == "knn"
    write_labels(tmp_path, 3)
    with pytest.raises(ValueError, match="evaluated with other images or labels"):
        opened(output, settings)
    unevaluated = opened(output, {**settings, "compute.eval_every": "null"})
    assert unevaluated.evaluations.best["figure"] == "knn"
    assert unevaluated.evaluations.measured_on == before.evaluations.measured_on, "what its figures are by"
    state = opened(output, {**settings, "compute.resume": "changed"})
    assert state.evaluations.best is None
    assert state.evaluations.measured_on != before.evaluations.measured_on
    assert "its figures so far are set aside" in caplog.text
    aside = output / "earlier-1"
    assert sorted(path.name for path in aside.iterdir()) == ["baseline.json", "metrics.jsonl"]
    assert not (output / "baseline.json").exists()
    assert any(json.loads(line)["knn"] for line in (aside / "metrics.jsonl").read_text().splitlines())
    with Interruption() as interruption, Reporter(state) as reporter:
        assert reporter.history == []
        assert train(state, reporter, interruption)
    start = build_untrained(state.config)[1].backbone
    assert json.loads((output / "baseline.json").read_bytes())["knn"] == state.evaluations.online(start).knn


def test_labels_that_change_before_the_first_evaluation_are_noticed(tmp_path):
    """The figures before the first step were by the old ones."""
    settings = {
        "data.labels": write_labels(tmp_path, 2),
        "budget.steps": 20,
        "compute.eval_every": 50,
        **SHORT,
    }
    interrupted(tmp_path / "run", settings, 3)
    write_labels(tmp_path, 3)
    with pytest.raises(ValueError, match="evaluated with other images or labels"):
        opened(tmp_path / "run", settings)


def test_a_changed_setting_is_refused_unless_it_is_asked_for(tmp_path):
    output = tmp_path / "run"
    trained(output, {"budget.steps": 5, **SHORT})
    with pytest.raises(ValueError, match="holds a run at step 5 with other settings") as error:
        opened(output, {"optim.lr": 0.02, **SHORT})
    assert "optim.lr was 0.03 and is 0.02" in str(error.value)
    assert "budget.steps was 5 and is 20" in str(error.value)
    for changes, message in (
        ({"model.width": 64, "compute.resume": "changed"}, "belongs to a different network or optimiser"),
        (
            {"data.source": "synthetic:72:32", "budget.steps": 5},
            "synthetic:72:32 are not those that it has learned from",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            opened(output, {**changes, **SHORT})
    assert steps(output) == [5]
    changed = {"optim.lr": 0.02, "compute.resume": "changed", **SHORT}
    reasons = {choice.key: choice.reason for choice in opened(output, changed).run.choices}
    assert reasons["optim.lr"] == "changed at step 5"
    trained(output, changed)
    assert steps(output) == [5, 10, 15, 20]


def test_the_batch_of_the_statistics_is_kept(tmp_path):
    """The global batch may be made up in another way, unless something looks at all images of a pass."""
    settings = {"head.batch_norm": "true", "loss.centering": "sinkhorn", "loss.koleo_weight": 0.1}
    settings["loss.edge_weight"] = 2
    settings |= {"budget.steps": 5, **SHORT}
    trained(tmp_path / "run", settings)
    with pytest.raises(ValueError, match="with other settings") as error:
        opened(tmp_path / "run", {**settings, "data.batch_size": 4})
    text = "BatchNorm, Sinkhorn-Knopp, KoLeo, edges had 8 images per forward pass and would now have 4 (data."
    assert text in str(error.value)
