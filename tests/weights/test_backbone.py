"""A loaded backbone prepares and embeds images from anywhere, exactly as the evaluations do."""

from typing import get_args

import numpy as np
import pytest
import torch
from einops import rearrange
from PIL import Image
from torch.testing import assert_close

from dino_vit import load_backbone, save_backbone
from dino_vit.data.images.decode import read_image
from dino_vit.data.open import open_source
from dino_vit.models.backbone import FeatureSpec, Tokens
from dino_vit.views.eval_transform import eval_transform_of
from tests.support.backbones import backbone, extracted
from tests.support.close import assert_close_to_scale

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


@pytest.fixture
def model(tmp_path):
    save_backbone(backbone(), tmp_path / "vit.safetensors", mean=MEAN, std=STD)
    return load_backbone(tmp_path / "vit.safetensors")


@pytest.fixture
def photos(tmp_path):
    """Photos larger and smaller than the crop, in grey, turned by EXIF, with a palette."""
    folder, generator = tmp_path / "photos", np.random.default_rng(0)
    folder.mkdir()
    turned = Image.Exif()
    turned[274] = 6
    for name, mode, size, options in (
        ("a.png", "RGB", (50, 40), {}),
        ("b.jpg", "RGB", (61, 35), {"exif": turned, "quality": 95}),
        ("c.png", "L", (20, 24), {}),
        ("d.png", "P", (64, 64), {}),
        ("e.png", "RGBA", (40, 64), {}),
    ):
        image = Image.fromarray(generator.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
        image.convert(mode).save(folder / name, **options)
    return folder


def expected(model, photos):
    """Return the images as the evaluations give them to the backbone."""
    transform, source = eval_transform_of(model), open_source(str(photos))
    normalise = transform.normaliser(torch.device("cpu"))
    return [normalise(transform.read(source, index)[None])[0] for index in range(len(source))]


def test_an_image_is_prepared_as_the_evaluations_do(model, photos):
    """Bit for bit, given as a path, as a Pillow image, as an array and as a tensor."""
    source, pixels = open_source(str(photos)), eval_transform_of(model).pixels
    for index, (path, wanted) in enumerate(
        zip(sorted(photos.iterdir()), expected(model, photos), strict=True)
    ):
        tensor = read_image(source, index, pixels)
        array = rearrange(tensor, "c h w -> h w c").numpy()
        for given in (path, str(path), tensor, array):
            assert torch.equal(model.transform(given), wanted), (path.name, type(given))
        with Image.open(path) as image:
            assert torch.equal(model.transform(image), wanted), path.name
    assert wanted.shape == (3, *model.image_size)


def test_values_from_0_to_1_are_levels_too(model):
    levels = torch.randint(0, 256, (3, 40, 50), dtype=torch.uint8)
    assert_close(model.transform(levels / 255), model.transform(levels))
    assert torch.equal(model.transform(levels[0]), model.transform(levels[:1]))


def test_embeddings_are_those_of_the_evaluations(model, photos):
    wanted = extracted(model, open_source(str(photos)), batch_size=5)
    paths = sorted(photos.iterdir())
    assert_close_to_scale(model.embed(paths), wanted)
    assert_close_to_scale(model.embed(iter(paths), batch_size=2), wanted)
    assert_close_to_scale(model.embed(str(paths[2])), wanted[2])
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    assert_close(model.embed(images), model.embed(list(images)), rtol=0, atol=0)
    assert_close(model.embed(images.permute(0, 2, 3, 1).numpy()), model.embed(images), rtol=0, atol=0)
    assert model.embed(images[0]).shape == (model.width,)
    assert model.embed([]).shape == (0, model.width)


@pytest.mark.parametrize("tokens", get_args(Tokens))
def test_other_tokens_are_those_of_the_evaluations_too(model, photos, tokens):
    spec = FeatureSpec(tokens=tokens, blocks=2)
    wanted = extracted(model, open_source(str(photos)), spec=spec, batch_size=5)
    features = model.embed(sorted(photos.iterdir()), tokens=tokens, blocks=2)
    assert_close_to_scale(features, wanted)


def test_patches_may_be_a_map(tmp_path):
    save_backbone(backbone(), tmp_path / "vit.safetensors")
    model = load_backbone(tmp_path / "vit.safetensors", image_size=(16, 32))
    images = torch.rand(3, 3, 16, 32)
    patches, maps = (model.embed(images, tokens="patches", reshape=reshape) for reshape in (False, True))
    assert maps.shape == (3, model.width, 2, 4)
    assert torch.equal(maps[1, :, 1, 2], patches[1, 4 + 2])
    assert_close_to_scale(model.embed(images[1], tokens="patches", reshape=True), maps[1])
    assert model.embed([], tokens="patches", reshape=True).shape == (0, model.width, 2, 4)
    with pytest.raises(ValueError, match="needs tokens='patches'"):
        model.embed(images, reshape=True)
    with pytest.raises(ValueError, match="must be one of cls, mean, "):
        model.embed(images, tokens="patch")


def test_embedding_leaves_the_backbone_as_it_was(model):
    assert model.train().embed(torch.zeros(3, 32, 32)).grad_fn is None
    assert model.training
    torch.nn.Linear(model.width, 2)(model.embed([torch.zeros(3, 32, 32)])).sum().backward()
