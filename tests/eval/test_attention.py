"""Attention maps: of the CLS token, as masks, colours, pictures and sheets."""

import numpy as np
import pytest
import torch
from PIL import Image

import dino_vit
from dino_vit import VisionTransformer, load_backbone, save_backbone
from dino_vit.cli import main
from dino_vit.eval import attention
from dino_vit.eval.attention import as_batch, cls_attention
from dino_vit.views.eval_transform import eval_transform_of
from dino_vit.views.pictures import principal_colours
from tests.support.backbones import backbone
from tests.support.close import assert_close_to_scale


def trained(**changes):
    model = backbone(heads=4, registers=3, **changes).train()
    with torch.no_grad():  # or all tokens are nearly alike, and so is their attention
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("block", [0, 1, -1])
def test_maps_of_the_class_token_are_its_attention_to_the_patches(block):
    model, images = trained(drop_path=0.5), torch.randn(2, 3, 24, 40)
    maps = attention.cls_attention(model, images, block)
    assert maps.shape == (2, 4, 3, 5)
    assert model.training, "the mode is as it was"
    expected = model.eval().get_attention(images, [block % 3])[0][:, :, 0, 4:]
    assert_close_to_scale(maps.flatten(2), expected)
    assert maps.flatten(2).std(-1).min() > 1e-3, "there is something to compare"


def test_colours_are_the_principal_components_over_all_images():
    generator = torch.Generator().manual_seed(2)
    stretch = torch.diag(torch.tensor([9.0, 5.0, 2.0, 1.0, 0.5, 0.1]))
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator)).Q
    tokens = [torch.randn(y, x, 6, generator=generator) @ stretch @ turn for y, x in ((20, 30), (7, 50))]
    colours = principal_colours(tokens)
    joined = np.concatenate([image.reshape(-1, 6).double().numpy() for image in tokens])
    centred = joined - joined.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    for colour in range(3):
        axis = axes[colour] * np.sign(axes[colour][np.abs(axes[colour]).argmax()])
        values = centred @ axis
        low, high = np.quantile(values, [0.01, 0.99])
        expected = np.clip((values - low) / (high - low), 0, 1)
        shown = np.concatenate([image[..., colour].flatten().numpy() for image in colours])
        np.testing.assert_allclose(shown, expected, atol=1e-6)
    assert [image.shape for image in colours] == [(20, 30, 3), (7, 50, 3)]
    flat = principal_colours([torch.ones(2, 2, 4)])[0]
    assert bool(flat.isfinite().all())


SIZES = {"a.png": (31, 50), "deep/a.png": (8, 8), "deep/<b> c.jpg": (77, 9), "e.png": (40, 40)}


@pytest.fixture
def weights(tmp_path):
    model = VisionTransformer(image_size=(32, 48), patch_size=8, width=32, depth=2, heads=2, registers=3)
    save_backbone(model, tmp_path / "a.safetensors", mean=(0.5,) * 3, std=(0.5,) * 3)
    return tmp_path / "a.safetensors"


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    for name, size in SIZES.items():
        pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "broken.png").write_bytes(b"nothing")
    return folder


def size_of(path):
    with Image.open(path) as image:
        return image.height, image.width


def drawn_size(path):
    """Return the size of each of six pictures in a row, with gaps of four pixels."""
    height, width = size_of(path)
    return height, (width - 5 * 4) / 6


def test_a_folder_of_images_of_any_size(weights, photos, tmp_path, capsys, caplog):
    out = tmp_path / "out"
    assert main(["attention", str(photos), f"weights={weights}", f"output={out}"]) == 0
    assert "skipped broken.png" in caplog.text
    assert "attention of the last block, 4 images on 1 sheet" in capsys.readouterr().out
    found = {path.name for path in out.iterdir()}
    stems = {"0-a": (64, 103), "3-deep-a": (64, 64), "2-deep-b-c": (548, 64), "4-e": (64, 64)}
    endings = ("png", "mask.png", "attention.npy")
    assert found == {"sheet-1.png", *(f"{stem}.{ending}" for stem in stems for ending in endings)}
    for stem, (height, width) in stems.items():
        assert drawn_size(out / f"{stem}.png") == (height, width)
        assert size_of(out / f"{stem}.mask.png") == (height, width)
        grid = -(-height // 8), -(-width // 8)
        assert np.load(out / f"{stem}.attention.npy").shape == (2, *grid)


def test_the_maps_are_those_of_the_padded_image(weights, photos, tmp_path):
    options = [f"output={tmp_path}", "block=0", "size=31"]
    assert main(["attention", f"source={photos}", f"weights={weights}", *options]) == 0
    model = load_backbone(weights)
    pixels = torch.from_numpy(np.array(Image.open(photos / "a.png"))).permute(2, 0, 1)
    padded = torch.zeros(1, 3, 32, 56)
    for y in range(32):
        for x in range(56):
            padded[0, :, y, x] = (pixels[:, min(y, 30), min(x, 49)] / 255 - 0.5) / 0.5
    torch.testing.assert_close(as_batch(model, pixels, eval_transform_of(model)), padded)
    expected = cls_attention(model, padded, 0)[0]
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "0-a.attention.npy")), expected)


def test_sizes_as_asked(weights, photos, tmp_path, caplog):
    options = ["size=8", "longest=40", "count=null"]
    assert main(["attention", str(photos), f"weights={weights}", f"output={tmp_path / 'o'}", *options]) == 0
    assert drawn_size(tmp_path / "o" / "0-a.png") == (8, 13)
    assert drawn_size(tmp_path / "o" / "2-deep-b-c.png") == (40, 5)
    assert caplog.text.count("images of 8 × 8 pixels are far from the 32 × 48 of the weights") == 1


def test_large_images_are_shrunk_to_twice_the_trained_side(weights, tmp_path, caplog):
    Image.new("RGB", (300, 200)).save(tmp_path / "large.png")
    arguments = ["attention", str(tmp_path / "large.png"), str(weights), f"output={tmp_path / 'o'}"]
    assert main(arguments) == 0
    assert drawn_size(tmp_path / "o" / "0-large.png") == (64, 96)
    assert main([*arguments, "size=200", "block=0", "overwrite=true"]) == 0
    assert drawn_size(tmp_path / "o" / "0-large.png") == (200, 300)
    assert caplog.text.count("are far from") == 1


def test_mistakes_are_explained(weights, tmp_path, capsys):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.png").write_bytes(b"")
    for arguments, message in (
        (["synthetic", f"{tmp_path}/none.pth"], "none.pth does not exist"),
        (["nowhere", str(weights)], "nowhere"),
        (["synthetic", str(weights), "block=7"], "blocks 0 to 1"),
        ([str(tmp_path / "bad"), str(weights)], "can be read (1 tried)"),
    ):
        assert main(["attention", f"output={tmp_path / 'out'}", *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_how_to_draw_other_images_is_said_where_some_are_left_out(weights, photos):
    others = (
        "\ncount=null draws all 5 images; an image, or a glob in quotes, in place of the source draws those"
    )
    assert str(dino_vit.attention(photos, weights, count=2, verbose=False)).endswith(others)
    assert others not in str(dino_vit.attention(photos, weights, count=None, verbose=False))
