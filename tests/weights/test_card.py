"""The model card: what the hub and a stranger read in it is true, and one that a person changed stays."""

import pytest
import torch
import yaml
from huggingface_hub import ModelCard

from dino_vit import WeightsError, export_backbone, load_backbone, save_backbone
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.config.settings import result_changes
from dino_vit.weights.exporting.card import CARD_MARK, model_card
from tests.support.backbones import backbone
from tests.support.documents import blocks, rows
from tests.support.images import smooth


def trained(path, *, config, **facts):
    """Return a backbone that was loaded from a file, with the settings of its training in it."""
    config = config.model_dump(mode="json") if isinstance(config, PretrainConfig) else config
    facts = {"mean": (0.4, 0.5, 0.6), "std": (0.1, 0.2, 0.3), "network": "teacher", "step": 1200, **facts}
    save_backbone(backbone(), path, config=config, **facts)
    return load_backbone(path)


def settings(**values):
    return load(PretrainConfig, None, values)


def test_the_hub_reads_what_it_is_and_a_stranger_where_it_comes_from(tmp_path):
    source = tmp_path / "private" / "photos"
    given = {"data.source": source, "output": tmp_path / "runs", "optim.lr": 1e-3, "views.local_count": 6}
    config = settings(**given, **{"init.weights": tmp_path / "published.pth", "run.precision": "no"})
    model = trained(tmp_path / "mine.safetensors", config=config)
    export_backbone(model, tmp_path / "out", "huggingface", card=model_card(model, license="cc-by-4.0"))
    path = tmp_path / "out" / "README.md"
    card = ModelCard.load(path)
    data = yaml.safe_load(path.read_text().split("---\n")[1])
    assert data == card.data.to_dict()
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "image-feature-extraction")
    assert (card.data.license, card.data.tags) == ("cc-by-4.0", ["dino", "self-supervised", "vit"])
    facts = {row[0]: row[1] for row in rows(card.text)}
    assert facts["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert (facts["architecture"], facts["patch size"], facts["image size"]) == ("ViT/8", "8 × 8", "32 × 32")
    assert (facts["file"], facts["sha256"]) == ("mine.safetensors", model.provenance.sha256)
    assert (facts["network"], facts["step"]) == ("teacher", "1200")
    assert "pretrained on images without labels" in card.text
    assert "(https://arxiv.org/abs/2104.14294), starting from `published.pth`." in card.text
    assert "crops the centre.\nValues from 0 to 1 are normalised with" in card.text
    assert "mean (0.4, 0.5, 0.6) and std (0.1, 0.2, 0.3)." in card.text
    assert str(tmp_path) not in card.content
    assert "licence" not in card.text
    (changed,) = blocks(card.text, "yaml")
    (tmp_path / "again.yaml").write_text(changed.replace("data.source: photos", f"data.source: {source}"))
    again = load(PretrainConfig, tmp_path / "again.yaml")
    assert result_changes(config, again) == {
        "init.weights": ("published.pth", str(tmp_path / "published.pth"))
    }
    assert changed.count("\n") == 7  # with all of init, which is no default


@pytest.mark.parametrize("name", [".", "someone/vit"])
def test_the_lines_open_the_folder_wherever_it_is(tmp_path, monkeypatch, name):
    model = trained(tmp_path / "a.safetensors", config={})
    folder = tmp_path / "far" / name
    export_backbone(model, folder, "huggingface", card=model_card(model, name=name))
    moved = (tmp_path / "far").rename(tmp_path / "farther") / name
    monkeypatch.chdir(moved if name == "." else tmp_path / "farther")
    (lines,) = blocks((moved / "README.md").read_text(), "python")
    smooth("RGB", (100, 75)).save("photo.jpg", quality=95)
    names = {}
    exec(lines, names)
    ours = model.embed("photo.jpg")
    assert torch.allclose(names["output"][0].detach(), ours, atol=1e-3 * ours.abs().max().item())


@pytest.mark.parametrize("config", [{}, {"weights": None, "classes": ["cat", "dog"]}])
def test_nothing_is_said_of_a_training_that_is_not_known(tmp_path, config):
    model = trained(tmp_path / "a.safetensors", config=config, mean=None, std=None, step=None)
    export_backbone(model, tmp_path / "out", "huggingface")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.tags == ["vit"]
    assert card.data.license == "other"
    for said in ("How it was trained is not recorded", "The images of the training are not recorded."):
        assert said in card.text
    for said in ("labels", "DINO", "## Training", "```yaml", "| step |"):
        assert said not in card.text
    assert "mean (0.485, 0.456, 0.406)" in card.text  # which the processor takes then
    assert "No licence is stated yet. The owner has to name it" in card.text


def test_a_card_is_replaced_unless_a_person_claimed_it(tmp_path):
    out = tmp_path / "out"
    export_backbone(backbone(), out, "huggingface")
    card = out / "README.md"
    card.write_text(card.read_text() + "a note\n")
    export_backbone(backbone(), out, "huggingface", overwrite=True)
    assert "a note" not in card.read_text()
    card.write_text(card.read_text().replace(CARD_MARK, "my own card"))
    with pytest.raises(WeightsError, match=r"existing folder with README\.md; choose another name"):
        export_backbone(backbone(), out, "huggingface", overwrite=True)
    assert "my own card" in card.read_text()
