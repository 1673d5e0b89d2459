"""Segmentation by patches: windows, crops, the head and the figures are those of plain loops."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import jaccard_score
from torch import nn

from dino_vit import VisionTransformer, load_backbone
from dino_vit.data.open import open_source
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of
from eval.dense import (
    IGNORED,
    Bank,
    DenseConfig,
    MaskedImages,
    count_pixels,
    judge_pixels,
    mean_iou,
    patch_bank,
    patch_classes,
    pixel_accuracy,
    run,
    train_head,
    window_starts,
)
from tests.support.backbones import extracted

SIZES = [(40, 30), (23, 50), (16, 16), (70, 21), (12, 18)]


@pytest.fixture(scope="module")
def frozen():
    torch.manual_seed(0)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=3, heads=2)
    transform = EvalTransform(size=(16, 16), mean=(0.5,) * 3, std=(0.25,) * 3)
    return FrozenBackbone(model=model, transform=transform, batch_size=3, threads=1)


def write(folder, name, image, mask):
    for part, pixels in (("images", image), ("masks", mask)):
        path = folder / part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


def config(folder, weights="none", **changes):
    given = {"source": "images", "masks": "masks", "train": "train/images", "train_masks": "train/masks"}
    settings = {name: str(folder / path) for name, path in given.items()}
    return DenseConfig(**{**settings, "weights": str(weights), "blocks": 2, "precision": "no", **changes})


def opened(folder, frozen, **changes):
    settings = config(folder, **changes)
    return MaskedImages(settings, settings.source, settings.masks, frozen)


@pytest.fixture
def folder(tmp_path):
    """Five images of several sizes, as bright as their class, one of four; a tenth is ignored."""
    generator = np.random.default_rng(0)
    for name in (tmp_path, tmp_path / "train"):
        for number, size in enumerate(SIZES):
            mask = np.kron(generator.integers(0, 4, (9, 9)), np.ones((8, 8), np.uint8))[: size[0], : size[1]]
            image = generator.integers(0, 60, (*size, 3)) + 60 * mask[..., None]
            mask[generator.random(size) < 0.1] = IGNORED
            write(name, f"{number}.png", image, mask)
    return tmp_path


def naive_prediction(frozen, head, path):
    """Classes of the pixels of an image, window by window."""
    image = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)
    height, width = image.shape[1:]
    scale = max(16 / height, 16 / width)
    h, w = round(height * scale), round(width * scale)
    image = F.interpolate(image[None], (h, w), mode="bicubic", antialias=True) / 255
    total, count = torch.zeros(4, h, w), torch.zeros(h, w)
    for top in [*range(0, h - 16, 10), h - 16]:
        for left in [*range(0, w - 16, 10), w - 16]:
            window = (image[:, :, top : top + 16, left : left + 16] - 0.5) / 0.25
            tokens = torch.cat(frozen.model.get_intermediate_layers(window, 2), -1)[:, 1:]
            maps = tokens.transpose(1, 2).reshape(1, 64, 4, 4)
            scores = F.interpolate(head(maps), (16, 16), mode="bilinear")[0]
            total[:, top : top + 16, left : left + 16] += scores
            count[top : top + 16, left : left + 16] += 1
    return F.interpolate((total / count)[None], (height, width), mode="bilinear")[0].argmax(0).numpy()


def test_windows_and_the_miou_of_all_images_are_those_of_a_loop(frozen, folder):
    frozen.model.eval()
    source = opened(folder, frozen)
    head = nn.Sequential(nn.BatchNorm2d(64), nn.Conv2d(64, 4, 1)).eval()
    bank = Bank(torch.randn(8, 64), torch.arange(8) % 4, torch.arange(4))
    _, measured = judge_pixels(source, bank, head, 3)
    with torch.no_grad():
        predicted = [naive_prediction(frozen, head, folder / f"images/{index}.png") for index in range(5)]
    masks = [source.read_mask(index).numpy() for index in range(5)]
    classes, true = (np.concatenate([part.flatten() for part in parts]) for parts in (predicted, masks))
    pooled = jaccard_score(true[true < IGNORED], classes[true < IGNORED], average="macro")
    assert measured.mean == pytest.approx(pooled, abs=1e-3)
    mean_of_images = np.mean(
        [
            jaccard_score(mask[mask < IGNORED], image[mask < IGNORED], average="macro", zero_division=0)
            for mask, image in zip(masks, predicted, strict=True)
        ]
    )
    assert abs(pooled - mean_of_images) > 0.003


@pytest.mark.parametrize(("length", "window"), [(512, 512), (513, 512), (1365, 512), (2048, 1024), (35, 16)])
def test_windows_begin_where_those_of_the_published_code_do(length, window):
    stride = int(window * 2 / 3)
    grids = max(length - window + stride - 1, 0) // stride + 1
    ends = [min(i * stride + window, length) for i in range(grids)]
    assert window_starts(length, window) == [max(end - window, 0) for end in ends]


@pytest.mark.parametrize("resize_mode", ["crop", "whole"])
def test_a_crop_of_an_image_has_its_classes(frozen, tmp_path, resize_mode):
    """On an image whose pixels are its classes: from a half to twice its size, flipped or not."""
    mask = np.tile(np.arange(48, dtype=np.uint8) // 12, (24, 1))
    write(tmp_path, "0.png", 60 * np.stack([mask] * 3, -1), mask)
    transform = EvalTransform(size=(32, 32), mean=(0.0,) * 3, std=(1.0,) * 3, resize_mode=resize_mode)
    source = opened(tmp_path, FrozenBackbone(model=frozen.model, transform=transform))
    flipped, padded, sizes = set(), set(), set()
    for step in range(20):
        image, classes = source.read_crop((0, step))
        assert image.shape[1:] == classes.shape == (32, 32)
        labelled = classes < IGNORED
        assert (image[:, ~labelled] == 0).all()
        near = (image[0] * 255 - 60 * classes).abs()[labelled] < 20
        assert near.float().mean() > 0.8
        row = classes[0][classes[0] < IGNORED].tolist()
        assert row in (sorted(row), sorted(row, reverse=True))
        flipped.add(row == sorted(row))
        padded.add(bool(labelled.all()))
        sizes.add(row.count(row[len(row) // 2]))
    assert flipped == padded == {True, False}
    assert len(sizes) > 5


def test_the_head_learns_what_patches_tell(frozen, folder):
    """The brightness of a patch tells its class, which a head without training does not know."""
    source = opened(folder, frozen)
    bank = patch_bank(source, 50)
    assert len(bank.features) == len(bank.targets) <= 55
    assert bank.classes.tolist() == [0, 1, 2, 3]
    values = [judge_pixels(source, bank, train_head(source, bank, steps), 3)[1].mean for steps in (1, 25)]
    assert values[1] > values[0] + 0.15


def random_masks(images=6, size=12, classes=4, ignored=0.1):
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(classes, (images, size, size), generator=generator, dtype=torch.uint8)
    masks[torch.rand(masks.shape, generator=generator) < ignored] = IGNORED
    predicted = torch.where(torch.rand(masks.shape, generator=generator) < 0.6, masks.clamp(max=3), 1)
    return predicted.long(), masks


def test_a_patch_has_the_class_of_most_of_its_pixels():
    masks = torch.tensor(
        [[[1, 1, 0, 0], [2, 1, 0, 3], [255, 255, 3, 3], [2, 255, 255, 3]]], dtype=torch.uint8
    )
    assert patch_classes(masks, (2, 2)).tolist() == [[[1, 0], [IGNORED, 3]]]
    _, masks = random_masks()
    classes = patch_classes(masks, (3, 4))
    for image in range(6):
        for row in range(3):
            for column in range(4):
                pixels = masks[image, 4 * row : 4 * row + 4, 3 * column : 3 * column + 3].flatten().tolist()
                counts = [pixels.count(kind) for kind in (0, 1, 2, 3, IGNORED)]
                assert classes[image, row, column] == (0, 1, 2, 3, IGNORED)[int(np.argmax(counts))]


def test_figures_are_those_of_scikit_learn():
    """Class 4 is predicted only, which counts as 0; class 5 is neither and does not count."""
    predicted, masks = random_masks()
    predicted[0, 0] = 4
    totals = count_pixels(predicted, masks)
    counted = masks < IGNORED
    expected = jaccard_score(masks[counted], predicted[counted], average="macro", zero_division=0)
    assert mean_iou(*totals).item() == pytest.approx(expected)
    assert pixel_accuracy(*totals).item() == pytest.approx((predicted == masks)[counted].double().mean())


def patches_of(weights, path):
    """Normalised features of the patches of the only image, and the class of most pixels of each."""
    model = load_backbone(weights)
    whole, spec = eval_transform_of(model, resize_mode="whole"), FeatureSpec(tokens="patches")
    (patches,) = extracted(model, open_source(str(path)), [0], spec, whole)
    mask = np.array(Image.open(str(path).replace("images", "masks")))
    cells = (mask[4 * y : 4 * y + 4, 4 * x : 4 * x + 4] for y in range(4) for x in range(4))
    return F.normalize(patches.double(), dim=1), [int(np.bincount(cell.ravel()).argmax()) for cell in cells]


def test_neighbours_are_those_of_a_loop(tmp_path, weights):
    generator = np.random.default_rng(0)
    for folder in (tmp_path, tmp_path / "train"):
        for number in range(6):
            mask = np.kron(generator.integers(0, 5, (4, 4)), np.ones((4, 4), np.uint8))
            write(folder, f"{number}.png", generator.integers(0, 256, (16, 16, 3)), mask)
    result = run(config(tmp_path, weights, blocks=1, k=3, steps=6, output=str(tmp_path / "dense.json")))
    results = json.loads(result.path.read_text())
    bank = [patches_of(weights, tmp_path / f"train/images/{number}.png") for number in range(6)]
    features, classes = torch.cat([part for part, _ in bank]), [each for _, part in bank for each in part]
    right = 0
    for number in range(6):
        votes = torch.zeros(16, 5)
        for row, patch in enumerate(patches_of(weights, tmp_path / f"images/{number}.png")[0]):
            cosines = features @ patch
            for nearest in cosines.argsort(descending=True)[:3].tolist():
                votes[row, classes[nearest]] += (cosines[nearest] / 0.07).exp()
        best = F.one_hot(votes.argmax(1), 5).float().T.reshape(1, 5, 4, 4)
        predicted = F.interpolate(best, size=(16, 16), mode="bilinear").argmax(1)[0].numpy()
        right += (predicted == np.array(Image.open(tmp_path / f"masks/{number}.png"))).sum()
    percent = results["knn"]["pixel_accuracy"]["value"]
    assert percent == pytest.approx(100 * right / (6 * 256), abs=0.2)
    assert results["figure"]["value"] == results["linear"]["mean_iou"]["value"]
    assert "k-NN of patches" in str(result)
    assert "the largest class, " in str(result)


def test_images_and_masks_are_paired_as_published_sets_have_them(frozen, tmp_path):
    """By a list of masks, or by endings; values without a class are listed."""
    for name in ("bremen/1", "bremen/2", "ulm/1"):
        pixels = np.zeros((4, 8, 3), np.uint8)
        mask = np.resize(np.array([0, 7, 255, 33]), (4, 8))
        write(tmp_path, f"{name}_leftImg8bit.png", pixels, pixels)
        Image.fromarray(mask.astype(np.uint8)).save(tmp_path / f"masks/{name}_gtFine_labelIds.png")
    (tmp_path / "masks/val.txt").write_text("bremen/1_gtFine_labelIds.png\nulm/1_gtFine_labelIds.png\n")
    endings = {"suffixes": ("_leftImg8bit", "_gtFine_labelIds"), "ignored": (0, 33)}
    for masks, names in (
        ("masks", ["bremen/1", "bremen/2", "ulm/1"]),
        ("masks/val.txt", ["bremen/1", "ulm/1"]),
    ):
        source = opened(tmp_path, frozen, masks=str(tmp_path / masks), **endings)
        images = [source.images.name(index) for index in range(len(source.images))]
        assert images == [f"{name}_leftImg8bit.png" for name in names]
        assert source.read_mask(0)[0].tolist() == [255, 7, 255, 255] * 2


def test_a_palette_is_not_read_as_colours(frozen, tmp_path):
    mask = np.resize(np.arange(4, dtype=np.uint8), (4, 8))
    write(tmp_path, "0.png", np.zeros((4, 8, 3)), mask)
    indexed = Image.fromarray(mask, "P")
    indexed.putpalette([200, 100, 50] * 4)
    indexed.save(tmp_path / "masks/0.png")
    assert opened(tmp_path, frozen).read_mask(0).tolist() == mask.tolist()


def test_masks_that_cannot_be_used_are_named(frozen, tmp_path):
    write(tmp_path, "0.png", np.zeros((16, 16, 3)), np.zeros((16, 20)))
    with pytest.raises(ValueError, match=r"0\.png has 20 × 16 pixels, its image 16 × 16"):
        opened(tmp_path, frozen).read_windows(0)
    Image.new("RGB", (16, 16)).save(tmp_path / "masks/0.png")
    with pytest.raises(ValueError, match="with a palette, or grey with 8 bits, not PNG RGB"):
        opened(tmp_path, frozen).read_mask(0)
    (tmp_path / "masks/0.png").rename(tmp_path / "masks/1.png")
    with pytest.raises(ValueError, match=r"no image of .*images has a mask in .*masks, such as 0\.png"):
        opened(tmp_path, frozen)
    write(tmp_path, "0.png", np.zeros((16, 16, 3)), np.full((16, 16), 3))
    with pytest.raises(ValueError, match="the patches to learn from have only the class 3"):
        patch_bank(opened(tmp_path, frozen), 50)


def test_images_to_learn_from_are_no_images_to_judge_by(folder, weights):
    given = {"train": str(folder / "images"), "train_masks": str(folder / "masks")}
    with pytest.raises(ValueError, match=r"all 5 images of .*images are in train=.*images too"):
        run(config(folder, weights, **given))
