"""Each part of the five descriptions goes wherever a network goes.

Into a run that is interrupted, into files and exports, into a graph, and onto a GPU as far as a rehearsal
shows it.
"""

from inspect import signature

import onnxruntime
import pytest
import torch

from dino_vit import VisionTransformer, WeightsError, export_backbone, load_backbone, save_backbone
from dino_vit.cli import main
from dino_vit.config.settings import ConfigError
from dino_vit.models.vit import ViTConfig
from dino_vit.training.loop import take_step
from dino_vit.weights.usage import usage
from tests.support.close import assert_close_to_scale
from tests.support.descriptions import OTHERS, PARTS, RESNET, build, each_part, each_setting
from tests.support.documents import with_images
from tests.support.rehearsal import rehearsed_run
from tests.support.runs import steps
from tests.support.training import assert_resumes_exactly, configured, opened, trained


def as_settings(part):
    """Return keywords as settings of a run whose images suit all of them."""
    texts = {f"model.{name}": list(v) if isinstance(v, tuple) else v for name, v in part.items()}
    sizes = {"data.source": "synthetic:32:64", "data.batch_size": 4}
    return {**sizes, "views.global_size": 64, "views.local_size": 32, **texts}


def test_every_part_is_a_keyword_and_a_setting_of_the_same_default():
    """So that a run, a file and Python say the same."""
    from dino_vit.config.sections import Model

    keywords = {name for part in PARTS.values() for name in part}
    assert keywords <= signature(VisionTransformer).parameters.keys()
    for name in keywords - {"drop_path"}:  # that of a run is DINO's
        assert getattr(Model(), name) == getattr(ViTConfig, name)


@each_setting
def test_a_run_resumes_bit_for_bit(part, tmp_path):
    """Whatever is drawn is a function of the seed, the step and the part of the batch."""
    assert_resumes_exactly(tmp_path, as_settings(part))
    model = load_backbone(tmp_path / "run", network="student", verbose=False)
    dropping = ("drop_path", "dropout", "attention_dropout")  # of which what is saved has none
    stated = {name: value for name, value in part.items() if name not in (*dropping, "patch_size")}
    assert {name: getattr(model.config, name) for name in stated} == stated


@each_part
def test_files_hold_it(part, tmp_path):
    """And what is loaded gives the same features."""
    model = build(**part).eval()
    save_backbone(model, tmp_path / "vit.safetensors")
    loaded = load_backbone(tmp_path / "vit.safetensors", verbose=False)
    assert loaded.config == model.config
    assert loaded.pos_embed.requires_grad == model.pos_embed.requires_grad
    images = torch.randn(2, 3, 32, 48)
    assert torch.equal(loaded(images), model(images))


@each_part
def test_another_file_gives_the_features_or_is_refused_by_name(part, tmp_path):
    """timm holds every stem, DINO's own format only patches; no other library has qk_scale."""
    torch.manual_seed(0)
    model = build(**part, image_size=64).eval() if "image_size" not in part else build(**part)
    scaled, stem = "qk_scale" in part, part.get("stem", "patch")
    refused = {"timm": "qk_scale" if scaled else None}
    for format in ("reference", "huggingface"):
        refused[format] = "qk_scale" if scaled else f"stem={stem}" if stem != "patch" else None
    images = torch.randn(2, 3, 64, 64)
    for format, fault in refused.items():
        path = tmp_path / (format if format == "huggingface" else f"{format}.safetensors")
        if fault:
            with pytest.raises(WeightsError, match=f"the {format} format does not support .*{fault}"):
                export_backbone(model, path, format)
        else:
            export_backbone(model, path, format)
            again = load_backbone(path, heads=2, verbose=False)
            assert_close_to_scale(again(images), model(images))
            assert again.config.positions == model.config.positions
    if not scaled:  # the lines that a user is given to open the file
        names = {"given": images}
        exec(with_images(usage(model, tmp_path / "timm.safetensors", "timm")), names)
        assert_close_to_scale(names["output"], model(images))


@pytest.mark.parametrize("parts", [OTHERS.keys() - {"a ResNet"}, {"a ResNet", "another scale"}], ids=len)
def test_a_graph_holds_them_together(parts, tmp_path):
    """ONNX has all parts, and ONNX Runtime computes them; an export takes seconds, so few hold many."""
    together = {name: value for part in parts for name, value in OTHERS[part].items()}
    model = build(**together, image_size=64, depth=1).eval()
    export_backbone(model, tmp_path / "vit.onnx", "onnx")
    images = torch.randn(3, 3, 64, 64)
    cls, _ = onnxruntime.InferenceSession(tmp_path / "vit.onnx").run(None, {"images": images.numpy()})
    with torch.no_grad():
        assert_close_to_scale(torch.from_numpy(cls), model(images), 1e-4)


@each_setting
def test_a_step_on_a_gpu_waits_for_nothing(part, tmp_path):
    """As far as a rehearsal shows it: it raises where the host would wait, or where devices mix."""
    settings = {
        **as_settings(part),
        "compute.precision": "bf16",
        "compute.log_every": 1000,
        "budget.steps": 100,
    }
    with rehearsed_run(configured(tmp_path, settings)) as (rehearsal, state):
        rehearsal.restart()
        take_step(state, state.loader.batches())
        assert rehearsal.by_part["backward"] > 100


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stem": "conv", "patch_size": 12}, r"stem=conv .*2, 4, 8, \.\.\., not (model\.)?patch_size=12"),
        ({"stem": "hybrid", "patch_size": 8}, r"stem=hybrid needs patches of 16, 32, \.\.\., not"),
        ({**RESNET, "resnet_width": 48}, "resnet_width=48 must be a multiple of 32"),
    ],
)
def test_what_no_stem_has_is_a_sentence(settings, said, tmp_path):
    """From the constructor and from the settings."""
    with pytest.raises(ValueError, match=said):
        build(**settings)
    with pytest.raises(ConfigError, match=said):
        configured(tmp_path, as_settings(settings))


@pytest.mark.parametrize("part", [{}, {"stem": "conv"}, RESNET], ids=["patches", "conv", "hybrid"])
def test_a_run_that_began_from_weights_resumes_by_its_own_settings(part, tmp_path):
    """By its config.yaml, which states all of them."""
    save_backbone(build(**part), tmp_path / "vit.safetensors")
    settings = {**as_settings(part), "init.weights": tmp_path / "vit.safetensors", "init.head_epochs": 0.5}
    settings |= {"budget.steps": 10}
    trained(tmp_path / "run", settings)
    sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))[-1].unlink()
    command = ["pretrain", "--config", str(tmp_path / "run" / "config.yaml")]
    assert main(command) == 0
    assert steps(tmp_path / "run")[-1] == 10


def test_training_goes_on_from_weights_with_another_stem(tmp_path):
    """Of which the run takes over what the settings do not say, and refuses what they contradict."""
    save_backbone(build(stem="conv", positions="sinusoidal", qk_scale=0.7), tmp_path / "vit.safetensors")
    settings = {"init.weights": tmp_path / "vit.safetensors", "init.head_epochs": 0.5}
    state = opened(tmp_path / "run", settings)
    model = state.config.model
    assert (model.stem, model.positions, model.qk_scale) == ("conv", "sinusoidal", 0.7)
    assert state.student.backbone.config.qk_scale == 0.7
    with pytest.raises(ValueError, match=r"model\.stem=patch .*does not match init\.weights"):
        opened(tmp_path / "other", {**settings, "model.stem": "patch"})
