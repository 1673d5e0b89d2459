"""What an export says: the lines that open it give our features, and the card states what is known."""

import re
import sys
from pathlib import PurePath
from types import ModuleType

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL import Image
from timm.models import VisionTransformer as TimmTransformer
from torch import nn

import dino_vit
from dino_vit import VisionTransformer, WeightsError, export_backbone, load_backbone, save_backbone
from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.weights.card import CARD_MARK, model_card, usage
from tests.support.backbones import backbone
from tests.support.close import assert_close_to_scale
from tests.support.documents import blocks, rows, with_images
from tests.support.images import smooth

STATISTICS = {"mean": (0.4, 0.5, 0.6), "std": (0.1, 0.2, 0.3)}


class ReferenceTransformer(TimmTransformer):
    """The class of the DINO repository, which is no package, by that of timm, which has its tensors."""

    def __init__(self, *, img_size, **keywords):
        super().__init__(img_size=img_size[0], **{"num_classes": 0, **keywords})

    def forward(self, images):
        return self.forward_features(images)[:, 0]  # without the classifier


@pytest.fixture(autouse=True)
def in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("vision_transformer")
    module.VisionTransformer = ReferenceTransformer
    monkeypatch.setitem(sys.modules, "vision_transformer", module)


def exported(format, *, suffix=".pth", statistics=STATISTICS, **changes):
    """Return a backbone and the lines that open an export of it."""
    keywords = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 4, **changes}
    model = VisionTransformer(**keywords)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_backbone(model, "mine.safetensors", **statistics)
    out = "out" if format == "huggingface" else f"out{suffix}"
    result = dino_vit.export("mine.safetensors", out=out, format=format, verbose=False)
    return load_backbone("mine.safetensors"), result.text


@torch.no_grad()
def features(lines, images=None):
    """Return what the lines of an export compute, of given images or of the photo that they open."""
    names = {"given": images}
    exec(lines if images is None else with_images(lines), names)
    return names["output"] if "output" in names else torch.from_numpy(names["cls"])


@pytest.mark.parametrize(
    ("format", "changes"),
    [
        ("timm", {"suffix": ".safetensors", "registers": 2, "layer_scale": 1.0, "mlp_ratio": 2.5}),
        ("timm", {"positions": "rotary", "registers": 2, "layer_scale": 1.0, "norm_eps": 1e-5}),
        ("reference", {}),
        ("reference", {"suffix": ".safetensors", "image_size": 40}),
        ("huggingface", {"statistics": {**STATISTICS, "range": (0.0, 100.0)}}),  # takes no photos
        ("onnx", {"suffix": ".onnx"}),
    ],
)
def test_the_lines_give_our_features(format, changes):
    model, lines = exported(format, **changes)
    images = torch.randn(2, 3, *model.image_size)
    if format == "huggingface":
        assert "images = ...  # (n, 3, 32, 32), float32" in lines
    assert_close_to_scale(features(lines, images), model(images))


@pytest.mark.parametrize("format", ["timm", "reference"])
def test_the_lines_open_a_backbone_with_a_classifier(format):
    model = backbone(num_classes=5)
    export_backbone(model, "out.pth", format)
    images = torch.randn(2, 3, *model.image_size)
    expected = model(images) if format == "timm" else model.forward_cls(images)
    assert_close_to_scale(features(usage(model, PurePath("out.pth"), format), images), expected)


@pytest.mark.parametrize(
    "changes", [{"image_size": 48}, {"channels": 1, "statistics": {"mean": (0.4,), "std": (0.1,)}}]
)
def test_hugging_face_embeds_a_photo_as_we_do(changes):
    model, lines = exported("huggingface", **changes)
    turned = Image.Exif()
    turned[274] = 6
    for size, exif in [
        ((128, 128), None),
        ((90, 60), None),
        ((40, 30), None),
        ((20, 20), None),
        ((100, 75), turned),
        ((79, 54), None),  # resized already, and 79 - 48 is odd
        ((50, 75), None),
    ]:
        photo = smooth("L" if "channels" in changes else "RGB", size)
        photo.save("photo.jpg", quality=95, exif=exif or Image.Exif())
        ours = model.embed("photo.jpg")
        assert (features(lines)[0] - ours).abs().max() < 1e-4 * ours.abs().max(), size


@pytest.mark.parametrize("format", ["timm", "reference", "onnx"])
@pytest.mark.parametrize("changes", [{}, {"channels": 1, "statistics": {"mean": (0.4,), "std": (0.1,)}}])
def test_the_lines_prepare_a_photo_as_we_do(format, changes):
    model, lines = exported(format, suffix=".onnx" if format == "onnx" else ".pth", depth=1, **changes)
    turned = Image.Exif()
    turned[274] = 6
    for size, exif in [((128, 128), None), ((90, 61), None), ((20, 20), None), ((101, 75), turned)]:
        photo = smooth("L" if "channels" in changes else "RGB", size)
        photo.save("photo.jpg", quality=95, exif=exif or Image.Exif())
        prepared = {}
        exec(lines, prepared)
        ours = model.transform("photo.jpg")
        # Pillow rounds to whole values after each of two passes, we after both: a value of 255, and a half.
        step = 2 / 255 / min(model.provenance.std)
        assert (torch.as_tensor(prepared["images"])[0] - ours).abs().max() <= step, size


def trained(*, config, **facts):
    """Return a backbone that was loaded from a file, with the settings of its training in it."""
    config = config.model_dump(mode="json") if isinstance(config, PretrainConfig) else config
    facts = {**STATISTICS, "network": "teacher", "step": 1200, **facts}
    save_backbone(backbone(), "mine.safetensors", config=config, **facts)
    return load_backbone("mine.safetensors")


def test_the_hub_reads_what_it_is_and_a_stranger_where_it_comes_from(tmp_path):
    source = tmp_path / "private" / "photos"
    given = {"data.source": source, "output": tmp_path / "runs", "optim.lr": 1e-3, "views.local_count": 6}
    given |= {"init.weights": tmp_path / "published.pth", "compute.precision": "no"}
    config = load(PretrainConfig, None, given)
    model = trained(config=config)
    export_backbone(model, "out", "huggingface", card=model_card(model, license="cc-by-4.0"))
    card = ModelCard.load("out/README.md")
    assert yaml.safe_load(card.content.split("---\n")[1]) == card.data.to_dict()
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "image-feature-extraction")
    assert (card.data.license, card.data.tags) == ("cc-by-4.0", ["dino", "self-supervised", "vit"])
    facts = {row[0]: row[1].strip("`") for row in rows(card.text)}
    assert facts["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    assert (facts["architecture"], facts["patch size"], facts["image size"]) == ("ViT/8", "8 × 8", "32 × 32")
    assert (facts["file"], facts["sha256"]) == ("mine.safetensors", model.provenance.sha256)
    assert (facts["network"], facts["step"]) == ("teacher", "1200")
    assert "labels (`method=dino`), starting from `published.pth`, on images of `photos`." in card.text
    assert (facts["mean"], facts["std"]) == ("0.4, 0.5, 0.6", "0.1, 0.2, 0.3")
    assert str(tmp_path) not in card.content
    assert "licence" not in card.text


def test_a_run_of_another_version_is_described_too():
    config = PretrainConfig().model_dump(mode="json")
    config["data"] |= {"source": "photos", "setting_of_another_version": 3}
    assert "Pretrained without labels (`method=dino`)" in model_card(trained(config=config))


def test_no_password_and_no_path_leaves_with_the_weights(tmp_path):
    for source, shown in (
        ("https://me:secret@host/photos.tar?token=secret", "`https://host/photos.tar`"),
        ("GS://me:secret '@host/my photos.tar?a=b 'secret\"\n", "`GS://host/my photos.tar`"),
        ("secret/photos", "`photos`"),
        (["secret/photos", "secret/shards"], "`photos, shards`"),
    ):
        model = trained(config=load(PretrainConfig, None, {"data.source": source}))
        export_backbone(model, "out", "huggingface", card=model_card(model), overwrite=True)
        if "://" in source:
            assert b"secret" not in (tmp_path / "mine.safetensors").read_bytes()
        assert shown in (tmp_path / "out" / "README.md").read_text()
        assert not [path for path in (tmp_path / "out").iterdir() if b"secret" in path.read_bytes()]


def test_the_lines_of_the_card_open_the_folder_wherever_it_is(tmp_path, monkeypatch):
    model = trained(config={})
    export_backbone(model, tmp_path / "far" / "vit", "huggingface")
    moved = (tmp_path / "far").rename(tmp_path / "farther") / "vit"
    monkeypatch.chdir(moved)
    (lines,) = blocks((moved / "README.md").read_text(), "python")
    smooth("RGB", (100, 75)).save("photo.jpg", quality=95)
    torch.testing.assert_close(features(lines)[0], model.embed("photo.jpg"), atol=1e-3, rtol=1e-3)


HOSTILE = "# x <script>alert(1)</script>[a](http://b)`` | www.b.org me@b.org\n\n# y ``` \n```python\nz"


def test_nothing_that_a_file_states_is_markup_in_the_card(tmp_path):
    config = {"method": HOSTILE, "data": {"source": [HOSTILE, "photos"]}, "init": {"weights": HOSTILE}}
    save_backbone(backbone(), f"{HOSTILE.partition('/')[0]}.safetensors", network=HOSTILE, config=config)
    model = load_backbone(f"{HOSTILE.partition('/')[0]}.safetensors")
    export_backbone(model, "out", "huggingface", card=model_card(model, license=HOSTILE))
    text = ModelCard.load("out/README.md").text
    rendered = MarkdownIt("gfm-like", {"linkify": False}).render(text)
    tags = {tag for tag in re.findall(r"<(\w+)", rendered)}
    assert tags == {"h1", "p", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"}
    assert rendered.count("<h1>") == 1
    assert rendered.count("&lt;script&gt;") >= 4
    assert rendered.count("<pre>") == 1
    assert len({len(row) for row in rows(text.replace(r"\|", ""))}) == 1


@pytest.mark.parametrize("config", [{}, {"weights": None, "classes": ["cat", "dog"]}])
def test_nothing_is_said_of_a_training_that_is_not_known(config):
    model = trained(config=config, mean=None, std=None, step=None)
    export_backbone(model, "out", "huggingface")
    card = ModelCard.load("out/README.md")
    assert (card.data.tags, card.data.license) == (["vit"], "other")
    assert "How and on which images it was trained is not recorded." in card.text
    for said in ("without labels", "DINO", "| step |"):
        assert said not in card.text
    assert "| mean |" not in card.text
    assert "No licence is stated yet: the owner has to name it" in card.text


def test_a_card_is_replaced_unless_a_person_claimed_it(tmp_path):
    export_backbone(backbone(), "out", "huggingface")
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text() + "a note\n")
    export_backbone(backbone(), "out", "huggingface", overwrite=True)
    assert "a note" not in card.read_text()
    card.write_text(card.read_text().replace(CARD_MARK, "my own card"))
    with pytest.raises(WeightsError, match=r"existing folder with README\.md; choose another name"):
        export_backbone(backbone(), "out", "huggingface", overwrite=True)
    assert "my own card" in card.read_text()
