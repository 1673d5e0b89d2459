import pytest
import torch

from dino_vit.models.multicrop import Drops, forward_multicrop, sample_drops
from dino_vit.models.sequences import sample_drop_path
from dino_vit.models.student_teacher import Need, build_networks
from dino_vit.models.timm_backbone import TimmBackbone
from dino_vit.models.vit import VisionTransformer
from tests.support.backbones import KEYWORDS as TINY
from tests.support.close import assert_close_to_scale


def test_drop_path_grows_linearly_and_keeps_the_expectation():
    model = VisionTransformer(**{**TINY, "depth": 5}, drop_path=0.2)
    assert model.drop_path_rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    uniform = VisionTransformer(**TINY, drop_path=0.2, drop_path_schedule="uniform")
    assert uniform.drop_path_rates == [0.2] * 3
    drops = sample_drop_path(model.drop_path_rates, 20_000, torch.device("cpu"))
    assert drops.shape == (5, 2, 20_000, 1, 1)
    for rate, drop in zip(model.drop_path_rates, drops, strict=True):
        assert drop.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)] if rate else [1.0])
        assert drop.mean().item() == pytest.approx(1.0, abs=0.02), "the expectation stays"
        assert not rate or not torch.equal(drop[0], drop[1]), "each branch has its own"


def test_the_student_alone_drops_patches_and_only_in_training():
    student, teacher = build_networks(backbone=TINY, drop_path=0.0, heads={})
    images, cls, kept = torch.randn(2, 3, 32, 32), Need("cls"), torch.tensor([[0], [3]])

    def found(network):
        return network([images], [cls], kept=kept)[cls]

    assert not torch.equal(found(student), found(teacher))
    assert torch.equal(found(student.eval()), found(teacher))


def test_the_teacher_of_a_run_has_none_of_its_dropping():
    rates = {"dropout": 0.1, "attention_dropout": 0.2}
    student, teacher = build_networks(backbone={**TINY, **rates}, drop_path=0.3, heads={})
    expected = {**rates, "drop_path": 0.3}
    assert {name: student.backbone.architecture[name] for name in expected} == expected
    assert {name: teacher.backbone.architecture[name] for name in expected} == dict.fromkeys(expected, 0.0)


def test_dropped_patches_are_as_if_they_were_not_in_the_image():
    model = VisionTransformer(**TINY, registers=2)
    images = torch.randn(5, 3, 32, 32)
    tokens = model.embed_patches(images)
    drops = sample_drops(model, [images], torch.rand(5, tokens.shape[1] - 3).argsort(1)[:, :2])
    cls = forward_multicrop(model, [images, images[:, :, :16, :16]], drops=drops)[0]
    for one, indices in enumerate(drops.kept):  # beside the CLS token and the registers
        kept = torch.stack([tokens[one, index] for index in (0, 1, 2, *(3 + indices).tolist())])[None]
        for block in model.blocks:
            kept = block(kept)
        assert_close_to_scale(cls[one], model.norm(kept)[0, 0])


@pytest.mark.parametrize(
    "options", [{}, {"positions": "rotary", "width": 32}, {"registers": 2, "layer_scale": 0.1}]
)
@pytest.mark.parametrize("recomputed", [False, True])
def test_sizes_that_pass_together_have_the_features_and_gradients_of_each_alone(options, recomputed):
    model = VisionTransformer(**{**TINY, **options}, drop_path=0.4, mask_token=True)
    views = [torch.randn(5, 3, size, size) for size in (32, 16)]
    mask = torch.rand(5, model.grid_of(32, 32)[0] ** 2) < 0.3
    branches = sample_drops(model, views).drop_path
    # Not squares, whose sum is fixed by LayerNorm: rounding would be most of their gradient.
    direction = torch.randn(model.width)

    def found(together):
        parts = [[0, 1]] if together else [[0], [1]]
        model.grad_checkpointing = recomputed and together
        model.zero_grad()
        out = []
        for part in parts:
            drops = Drops(torch.cat([branches[:, :, 5 * i : 5 * i + 5] for i in part], dim=2))
            chosen = {"tokens": 0 in part, "drops": drops}
            out += forward_multicrop(model, [views[i] for i in part], mask if 0 in part else None, **chosen)
        sum((features @ direction).sum() for features in out).backward()
        return [*out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    assert_close_to_scale(found(True), found(False))


def test_each_block_gets_the_factors_that_are_drawn_for_it():
    model = VisionTransformer(**TINY, drop_path=0.5, drop_path_schedule="uniform")
    views = [torch.randn(5, 3, size, size) for size in (32, 16)]
    drops = sample_drops(model, views)
    together = forward_multicrop(model, views, drops=drops)
    for view, found, factors in zip(views, together, drops.drop_path.split(5, dim=2), strict=True):
        tokens = model.embed_patches(view)
        for block, drop in zip(model.blocks, factors, strict=True):
            tokens = block(tokens, drop=drop)
        assert_close_to_scale(found, model.norm(tokens)[:, 0])


def test_models_of_timm_take_one_size_after_another():
    model = TimmBackbone(name="test_resnet", image_size=64)
    views = [torch.randn(2, 3, size, size) for size in (64, 32)]
    out = forward_multicrop(model.eval(), views, tokens=True)
    assert torch.equal(out[0], model.forward_features(views[0]))
    assert torch.equal(out[1], model.forward_cls(views[1]))
