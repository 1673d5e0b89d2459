import base64
import math
import sys

import numpy as np
import pytest
import torch

from dino_vit.core.checkpoint import Checkpoints
from dino_vit.data.sources.open import open_source
from dino_vit.eval.classification.online import random_indices
from dino_vit.eval.features.extraction import extract_features
from dino_vit.reports import explorer
from dino_vit.reports.explorer import LoadedTeacher, build_atlas
from dino_vit.reports.record import read_run
from tests.support.reports import picture_of, write_report
from tests.support.runs import rewrite


def test_the_map_holds_the_features_clusters_and_neighbours_of_the_teacher(made):
    record, checkpoint = read_run(made), Checkpoints(made).newest()
    teacher = LoadedTeacher(checkpoint, torch.device("cpu"))
    source = open_source(record.config.data.source)
    found = explorer.build_map(teacher, source, random_indices(source, seed=0)[:40])
    features = extract_features(
        teacher.backbone, source, found.indices, preparation=teacher.preparation, batch_size=7
    ).values
    unit = features / features.norm(dim=1, keepdim=True)
    for row in range(40):
        cosines = {other: float(unit[row] @ unit[other]) for other in range(40) if other != row}
        nearest = sorted(cosines, key=cosines.get, reverse=True)[: explorer.NEIGHBOURS]
        near = found.neighbours[row].tolist()
        assert [cosines[other] for other in near] == pytest.approx([cosines[n] for n in nearest], abs=1e-5)
        assert row not in near
    weights = {name[13:]: t for name, t in checkpoint.tensors.items() if name.startswith("teacher.head.")}
    head = checkpoint.tensors
    hidden = features
    for layer in (0, 2):
        w, b = head[f"teacher.head.mlp.{layer}.weight"], head[f"teacher.head.mlp.{layer}.bias"]
        hidden = torch.nn.functional.gelu(hidden @ w.T + b)
    bottleneck = hidden @ weights["mlp.4.weight"].T + weights["mlp.4.bias"]
    direction = torch.nn.functional.normalize(weights["last_layer.weight_v"], dim=1)
    cosines = (
        torch.nn.functional.normalize(bottleneck, dim=1) @ direction.T * weights["last_layer.weight_g"].T
    )
    assert torch.equal(found.prototypes, (cosines - head["loss.center"]).argmax(dim=1))
    assert [source.classes[source.label(index)] for index in found.indices] == found.labels
    assert set(found.positions) == {"t-SNE", "PCA"}
    assert found.attention.shape == (40, 16, 16)  # although the network was trained on 4 x 4 patches
    attention = base64.b64decode(explorer.to_json(found)["attention"]["maps"])
    assert (np.frombuffer(attention, np.uint8).reshape(40, 256).max(axis=1) == 255).all()


def test_an_atlas_has_every_image_in_its_place_and_keeps_its_budget():
    colours = torch.randint(0, 256, (11, 3, 1, 1), dtype=torch.uint8)
    made = build_atlas(colours.expand(-1, -1, 20, 10).contiguous(), budget=10_000)
    sheet, (height, width) = picture_of(made["uri"]), made["size"]
    assert (made["columns"], height, width) == (4, 20, 10)
    for index in range(11):
        top, left = index // 4 * height, index % 4 * width
        middle = sheet[top + height // 2, left + width // 2].astype(int)
        assert abs(middle - colours[index, :, 0, 0].numpy().astype(int)).max() < 24
    noise = torch.randint(0, 256, (200, 3, 64, 64), dtype=torch.uint8)
    small = build_atlas(noise, budget=90_000)
    assert len(small["uri"]) <= 90_000
    assert max(small["size"]) < 64
    with pytest.raises(ValueError, match="use fewer"):
        build_atlas(noise, budget=2_000)


def test_pca_has_the_widest_directions():
    features = torch.randn(50, 6) * torch.tensor([1.0, 5.0, 0.5, 3.0, 0.1, 0.2])
    centred = features - features.mean(dim=0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    wanted = left[:, :2] * singular[:2]
    found = torch.from_numpy(explorer.pca(features))
    for column in range(2):
        same, turned = (found[:, column] - sign * wanted[:, column] for sign in (1, -1))
        assert min(same.abs().max(), turned.abs().max()) < 1e-3


def test_tsne_keeps_groups_together():
    middles = torch.nn.functional.normalize(torch.randn(4, 16), dim=1)
    group = torch.arange(80) % 4
    features = torch.nn.functional.normalize(middles[group] + 0.05 * torch.randn(80, 16), dim=1)
    positions = torch.from_numpy(explorer.tsne(features))
    nearest = torch.cdist(positions, positions).fill_diagonal_(math.inf).argmin(dim=1)
    assert (group[nearest] == group).float().mean() > 0.95


def test_without_scikit_learn_the_map_is_a_pca(made, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    page = write_report(made)
    assert [one["name"] for one in page.data["explorer"]["layouts"]] == ["PCA"]
    assert "run `pip install scikit-learn`" in page.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, t: m.pop("config"), "config is missing"),
        (lambda m, t: m["config"].pop("head"), "config.head is missing"),
        (lambda m, t: m.pop("step"), "step is missing"),
        (lambda m, t: t.pop("loss.center"), "no centre of its 256"),
        (lambda m, t: m["config"].update(head=5), "config.head = 5, but"),
        (lambda m, t: m["config"]["head"].update(soup=1), "config.head.soup is unknown"),
        (lambda m, t: m["config"]["head"].update(hidden_dim=7), r"size mismatch for mlp\.0"),
        (lambda m, t: m["config"]["head"].update(prototypes=10**9), "less than or"),
        (lambda m, t: m["config"]["head"].update(prototypes=2**24), "size mismatch"),
        (lambda m, t: t["loss.center"].fill_(math.nan), "loss.center has NaN"),
        (lambda m, t: t.update({"loss.center": torch.zeros(1, 7)}), "no centre of its 256"),
    ],
)
def test_a_checkpoint_without_a_usable_head_is_a_sentence_on_the_page(folder, change, message):
    checkpoint = Checkpoints(folder).paths()[-1]
    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match=message) as refused:
        LoadedTeacher(Checkpoints(folder).newest(), torch.device("cpu"))
    assert str(checkpoint) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_a_checkpoint_that_names_no_source_is_shown(folder):
    rewrite(Checkpoints(folder).paths()[-1], lambda m, t: m.pop("source"))
    page = write_report(folder, "images=3")
    assert page.data["explorer"]["count"] == 3
    assert "The images differ from those that the run started with" in page.text
