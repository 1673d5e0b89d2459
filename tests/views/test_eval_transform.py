from dataclasses import replace

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from dino_vit.data.images.pixels import Pixels
from dino_vit.data.synthetic import make_textures
from dino_vit.models.backbone import Provenance
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of, resize
from tests.support.backbones import backbone
from tests.support.image_sets import with_read

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
PREPARATION = EvalTransform(size=(32, 32), mean=MEAN, std=STD)


def picture(height, width):
    coarse = torch.rand(1, 3, max(2, height // 8), max(2, width // 8))
    smooth = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")[0]
    return (255 * smooth).to(torch.uint8)


@pytest.mark.parametrize(
    ("height", "width"), [(375, 500), (500, 333), (256, 300), (225, 230), (224, 1000), (90, 60)]
)
@pytest.mark.parametrize(("crop", "side"), [(224, 256), (96, 110), (48, 54), (32, 36)])
def test_fit_is_the_published_protocol_for_images_of_any_size(height, width, crop, side):
    """Halves of pixels are rounded down, as transformers does and torchvision only every second time."""
    image = picture(height, width)
    resized = tv.resize(image, [side], interpolation=v2.InterpolationMode.BICUBIC, antialias=True)
    top, left = ((length - crop) // 2 for length in resized.shape[1:])
    expected = tv.crop(resized, top, left, crop, crop)
    assert torch.equal(replace(PREPARATION, size=(crop, crop)).resize(image), expected)


@pytest.mark.parametrize("size", [(16, 48), (48, 16), (30, 17)])
def test_fit_fills_any_size_from_any_image(size):
    for height in (1, 15, 16, 17, 31, 48, 50, 200):
        for width in (1, 16, 18, 47, 49, 131):
            image = torch.full((3, height, width), 200, dtype=torch.uint8)
            fitted = replace(PREPARATION, size=size).resize(image)
            assert fitted.shape == (3, *size)
            assert bool((fitted == 200).all())


def test_the_weights_say_how_images_are_prepared(caplog):
    model = backbone()
    known = {"format": "dino-vit", "source": "x", "sha256": ""}
    model.provenance = Provenance(**known, mean=MEAN, std=STD)
    assert eval_transform_of(model) == PREPARATION
    assert eval_transform_of(model, size=(16, 24), resize_mode="whole").size == (16, 24)
    with pytest.raises(ValueError, match="cannot be divided into patches"):
        eval_transform_of(model, size=(30, 32))
    model.provenance = Provenance(**known)
    caplog.clear()
    caplog.set_level("INFO")
    assert eval_transform_of(model).mean == (0.485, 0.456, 0.406)
    assert "using those of ImageNet" in caplog.text
    assert "far from" not in caplog.text
    assert eval_transform_of(model, size=(64, 64)).size == (64, 64)
    assert "far from" not in caplog.text
    assert eval_transform_of(model, size=(72, 72)).size == (72, 72)
    assert "images of 72 × 72 pixels are far from the 32 × 32 of the weights" in caplog.text
    other = backbone(channels=5)
    with pytest.raises(ValueError, match="5 channels"):
        eval_transform_of(other)


def test_deep_images_keep_their_bits_and_their_scale():
    """Images are scaled as in training, and lose no bit."""
    source = make_textures(length=1)
    deep = torch.randint(0, 4096, (3, 40, 30), generator=torch.Generator().manual_seed(0))
    source = with_read(source, lambda index: deep.to(torch.uint16))
    transform = replace(PREPARATION, pixels=Pixels(bits=16, range=(0.0, 4095.0)))
    read = transform.read(source, 0)
    assert read.dtype == torch.float32
    assert torch.equal(read, PREPARATION.resize(deep / 4095))
    assert 0 <= read.min() <= read.max() <= 1
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    assert torch.allclose(transform.normaliser(torch.device("cpu"))(read), (read - mean) / std)


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 9, 30)])
def test_an_image_may_become_one_pixel(shape):
    image = torch.full(shape, 200, dtype=torch.uint8)
    assert torch.equal(resize(image, (1, 1)), image[:, :1, :1])


@pytest.mark.parametrize("resize_mode", ["crop", "whole"])
def test_a_mask_is_placed_as_its_image_is(resize_mode):
    """On an image whose pixels are its classes, far from the borders between them."""
    mask = torch.zeros(90, 60, dtype=torch.uint8)
    mask[30:70, 25:45] = 200
    transform = eval_transform_of(backbone(), size=(32, 32), resize_mode=resize_mode)
    image = transform.resize(mask.expand(3, -1, -1).contiguous())[0].int()
    placed = transform.place_mask(mask)
    assert placed.shape == (32, 32)
    assert set(placed.unique().tolist()) == {0, 200}
    far = (image - 100).abs() > 90
    assert far.float().mean() > 0.8
    assert ((image - placed.int()).abs()[far] < 20).all()
