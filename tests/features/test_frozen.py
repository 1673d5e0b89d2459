import random
import time
from functools import partial

import numpy as np
import pytest
import torch
from torchvision.transforms.functional import resize as peer_resize

from dino_vit.config.commands import KnnConfig
from dino_vit.data.open import open_source
from dino_vit.data.stores.files import open_folder
from dino_vit.data.synthetic import make_textures
from dino_vit.features.frozen import FrozenBackbone, frozen_backbone
from dino_vit.models.backbone import FeatureSpec, eval_mode, mean_by_cell
from dino_vit.models.edges import edge_histograms
from dino_vit.models.vit import VisionTransformer
from dino_vit.views.eval_transform import EvalTransform
from tests.support.backbones import backbone, extracted
from tests.support.close import assert_close_to_scale
from tests.support.image_sets import with_read
from tests.support.images import write_synthetic

TRANSFORM = EvalTransform(size=(32, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
SETTINGS = {"transform": TRANSFORM, "batch_size": 7}


def extract(model, source, indices=None, **changes):
    return extracted(model, source, indices, **{**SETTINGS, **changes})


def test_features_come_in_the_order_asked_for():
    source, model = make_textures(length=50, size=40), backbone()
    indices = [3, 49, 3, 0, *range(10, 30)]
    features = FrozenBackbone(model=model, **SETTINGS).extract(source, indices)
    assert features.values.shape == (24, 32)
    assert features.values.dtype == torch.float32
    assert not features.values.requires_grad
    assert features.indices.tolist() == indices
    assert features.unreadable == ()
    for row, index in enumerate(indices[:5]):
        alone = extract(model, source, [index])[0]
        assert_close_to_scale(features.values[row], alone)


@pytest.mark.parametrize("registers", [0, 3])
def test_features_are_the_tokens_that_the_spec_names(registers):
    source, model = make_textures(length=4), backbone(depth=5, registers=registers)
    images = torch.stack(
        [TRANSFORM.normaliser(torch.device("cpu"))(TRANSFORM.read(source, i)) for i in range(4)]
    )
    with eval_mode(model):
        blocks = model.get_intermediate_layers(images, 3)
    cls = [tokens[:, 0] for tokens in blocks]
    patch_tokens = [tokens[:, 1 + registers :] for tokens in blocks]
    patches, cells = patch_tokens[-1], partial(mean_by_cell, grid=(4, 4))
    edges, tiny = edge_histograms(peer_resize(images, [48, 48])), peer_resize(images, [12, 12]).flatten(1)
    for spec, expected in (
        (FeatureSpec(), cls[2]),
        (FeatureSpec(blocks=3), torch.cat(cls, 1)),
        (FeatureSpec(tokens="cls+mean"), torch.cat([cls[2], sum(patches.unbind(1)) / 16], 1)),
        (FeatureSpec(tokens="cls+mean", blocks=2), torch.cat([*cls[1:], sum(patches.unbind(1)) / 16], 1)),
        (FeatureSpec(tokens="mean", blocks=2), torch.cat([part.mean(1) for part in patch_tokens[1:]], 1)),
        (
            FeatureSpec(tokens="cells", blocks=2),
            torch.cat([mean_by_cell(part, (4, 4)) for part in patch_tokens[1:]], 1),
        ),
        (FeatureSpec(tokens="cls+cells", blocks=2), torch.cat([*cls[1:], cells(patches)], 1)),
        (
            FeatureSpec(tokens="cls+mean+edges+pixels"),
            torch.cat([cls[2], sum(patches.unbind(1)) / 16, edges, tiny], 1),
        ),
        (FeatureSpec(tokens="patches"), patches),
        (FeatureSpec(tokens="patches", blocks=3), torch.cat(patch_tokens, 2)),
        (FeatureSpec(tokens="all"), blocks[-1]),
    ):
        features = extract(model, source, spec=spec)
        assert_close_to_scale(features, expected)
        assert features.shape[1:] == spec.shape(model, (32, 32))
        assert extract(model, source, [], spec=spec).shape == (0, *spec.shape(model, (32, 32)))


def test_features_do_not_depend_on_the_batch_or_a_classifier():
    source, model = make_textures(length=20), backbone(num_classes=3)
    whole, parts = (extract(model, source, batch_size=size) for size in (100, 3))
    torch.testing.assert_close(whole, parts)
    assert whole.shape == (20, 32)


def test_autocast_computes_in_its_dtype_and_returns_float32():
    source, model = make_textures(length=9), backbone()
    exact, rounded = (extract(model, source, autocast=dtype) for dtype in (None, torch.bfloat16))
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, rtol=0.1, atol=0.1)


def test_another_architecture_has_another_digest():
    """By which embeddings and kept features know the weights."""
    model, other = backbone(), backbone(qk_scale=0.5)
    other.load_state_dict(model.state_dict())
    digests = [FrozenBackbone(model=each, **SETTINGS).weights_digest for each in (model, other)]
    assert digests[0] != digests[1]


def test_extraction_leaves_no_trace():
    model = backbone(drop_path=0.5)
    model.train()
    model.blocks[1].eval()
    model.norm.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    first, again = (extract(model, make_textures(length=12)) for _ in range(2))
    assert torch.equal(first, again)  # no branch is dropped
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])  # noqa: NPY002
    assert random.getstate() == states[2]
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.rand(1, 3, 32, 32)).sum().backward()
    assert torch.is_grad_enabled()
    assert model.cls_token.grad is not None


@pytest.fixture
def broken_folder(tmp_path):
    for number in range(8):
        write_synthetic(path := tmp_path / f"{number}.png", number)
        if number in (2, 3):
            path.write_bytes(path.read_bytes()[:30])
    return open_folder(tmp_path)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_unreadable_images_are_left_out_and_named(broken_folder, batch_size):
    frozen = FrozenBackbone(model=backbone(), transform=TRANSFORM, batch_size=batch_size)
    features = frozen.extract(broken_folder, range(8))
    assert features.indices.tolist() == [0, 1, 4, 5, 6, 7]
    assert len(features.values) == 6
    assert [error.name for error in features.unreadable] == ["2.png", "3.png"]
    assert extract(backbone(), broken_folder, [2]).shape == (0, 32)
    assert frozen.extract(broken_folder, []).indices.shape == (0,)


def test_no_more_than_the_next_batch_is_read_ahead():
    def read(index):
        read_so_far.append(index)
        return textures.read(index)

    class Watching(VisionTransformer):
        def embed_patches(self, images, mask=None):
            time.sleep(0.02)  # time enough to read everything, if one did
            seen.append(len(read_so_far))
            return super().embed_patches(images, mask)

    seen, read_so_far, textures = [], [], make_textures(length=40)
    model = Watching(image_size=32, patch_size=8, width=24, depth=1, heads=1)
    extract(model, with_read(textures, read), batch_size=5)
    assert all(read <= 5 * (number + 2) for number, read in enumerate(seen))
    assert seen[-1] == 40


@pytest.mark.parametrize(("name", "side"), [("pixels", 32), ("edges", 48)])
def test_a_baseline_has_the_statistics_of_its_images(tmp_path, name, side):
    config = KnnConfig(source="synthetic:40:64", weights=name)
    frozen = frozen_backbone(config)
    assert frozen.transform.size == (side, side)
    features = frozen.extract(open_source("synthetic:40:64"), range(40))
    if name == "pixels":
        std, mean = torch.std_mean(features.values)
        assert abs(mean) < 0.1
        assert 0.8 < std < 1.1
    sized = frozen_backbone(config.model_copy(update={"size": 24}))
    assert sized.extract(open_source("synthetic:4:64"), range(4)).values.shape[1] == sized.model.width


def test_a_baseline_takes_images_of_any_channels(tmp_path):
    for number in range(4):
        np.save(tmp_path / f"{number}.npy", np.random.default_rng(number).random((40, 40, 5), np.float32))
    frozen = frozen_backbone(KnnConfig(source=str(tmp_path), weights="edges"))
    assert (frozen.transform.pixels.channels, frozen.transform.pixels.bits) == (5, 16)
    assert frozen.extract(open_source(str(tmp_path)), range(4)).values.shape == (4, 900)
