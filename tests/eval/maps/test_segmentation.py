"""Segmentation: windows, crops, the head and the figures are those of plain loops."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import jaccard_score
from torch import nn
from torch.testing import assert_close

from dino_vit import VisionTransformer
from dino_vit.config.commands import IGNORED
from dino_vit.data.sources.masks import open_masks
from dino_vit.data.sources.synthetic import make_scenes
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.figures import Measured, summed
from dino_vit.eval.maps import windows
from dino_vit.eval.maps.dense import Bank, backward, judge_pixels, patch_bank, train_head
from dino_vit.eval.maps.windows import count_pixels, mean_iou, patch_classes, pixel_accuracy, read_crop
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import EvalTransform, eval_transform_of, window_starts
from tests.support.image_sets import with_read

SPEC = FeatureSpec(tokens="patches", blocks=2)
STATISTICS = {"mean": (0.5,) * 3, "std": (0.25,) * 3}


@pytest.fixture(scope="module")
def frozen():
    torch.manual_seed(0)
    model = VisionTransformer(image_size=16, patch_size=4, width=32, depth=3, heads=2)
    transform = EvalTransform(size=(16, 16), **STATISTICS)
    return FrozenBackbone(model=model, transform=transform, batch_size=3, threads=1)


@pytest.fixture
def photos(tmp_path):
    """Five images of several sizes and their masks of four classes, in which a tenth is ignored."""
    generator = np.random.default_rng(0)
    for folder in ("photos", "masks"):
        (tmp_path / folder).mkdir()
    for number, size in enumerate([(40, 30), (23, 50), (16, 16), (70, 21), (12, 18)]):
        mask = np.kron(generator.integers(0, 4, (9, 9)), np.ones((8, 8))).astype(np.uint8)[
            : size[0], : size[1]
        ]
        image = generator.integers(0, 60, (*size, 3)) + 60 * mask[..., None]
        mask[generator.random(size) < 0.1] = IGNORED
        Image.fromarray(image.astype(np.uint8)).save(tmp_path / "photos" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    return open_masks(str(tmp_path / "photos"))


def naive_prediction(frozen, head, source, index):
    """Classes of the pixels of an image, window by window."""
    image = torch.from_numpy(np.array(Image.open(io.BytesIO(source.read(index))))).permute(2, 0, 1)
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


@pytest.mark.parametrize("in_memory", [2**26, 2 * 40 * 30])
def test_windows_and_the_miou_of_all_images_are_those_of_a_loop(frozen, photos, in_memory, monkeypatch):
    """Also where the scores of the classes are resized some at a time."""
    monkeypatch.setattr(windows, "_SCORES", in_memory)
    frozen.model.eval()
    head = nn.Sequential(nn.BatchNorm2d(64), nn.Conv2d(64, 4, 1)).eval()
    bank = Bank(torch.randn(8, 64), torch.arange(8) % 4, torch.arange(4), [])
    _, measured = judge_pixels(frozen, photos, range(5), bank, head, SPEC, k=3)
    with torch.no_grad():
        predicted = [naive_prediction(frozen, head, photos, index) for index in range(5)]
    masks = [photos.mask(index).numpy() for index in range(5)]
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


def test_the_gradient_is_that_of_the_loss_of_all_pixels():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 4, 2, 5, requires_grad=True), torch.randint(4, (3, 8, 20))
    targets[torch.rand(targets.shape) < 0.3] = IGNORED
    backward(logits, targets)
    ours, logits.grad = logits.grad, None
    pixels = F.interpolate(logits, (8, 20), mode="bilinear")
    F.cross_entropy(pixels, targets, ignore_index=IGNORED).backward()
    assert_close(ours, logits.grad)


@pytest.mark.parametrize("fit", ["crop", "whole"])
def test_a_crop_of_an_image_has_its_classes(fit):
    """On an image whose pixels are its classes: from a half to twice its size, flipped or not."""

    mask = (torch.arange(48) // 12).repeat(24, 1).to(torch.uint8)
    columns = replace(make_scenes(length=1), masks=lambda _: mask)
    columns = with_read(columns, lambda _: 60 * mask.expand(3, -1, -1))
    transform = EvalTransform(size=(32, 32), mean=(0.0,) * 3, std=(1.0,) * 3, fit=fit)
    flipped, padded, sizes = set(), set(), set()
    for step in range(20):
        image, classes = read_crop(transform, columns, (0, step))
        assert image.shape[1:] == classes.shape == (32, 32)
        labelled = classes < IGNORED
        assert (image[:, ~labelled] == 0).all()
        far = (image[0] * 255 - 60 * classes).abs()[labelled] < 20
        assert far.float().mean() > 0.8
        row = classes[0][classes[0] < IGNORED].tolist()
        assert row in (sorted(row), sorted(row, reverse=True))
        flipped.add(row == sorted(row))
        padded.add(bool(labelled.all()))
        sizes.add(row.count(row[len(row) // 2]))
    assert flipped == padded == {True, False}
    assert len(sizes) > 5


def test_the_head_learns_what_patches_tell(frozen, photos):
    """The brightness of a patch tells its class, which a head without training does not know."""
    bank = patch_bank(frozen, photos, range(5), SPEC, patches=50)
    assert len(bank.features) == len(bank.targets) <= 55
    assert bank.classes.tolist() == [0, 1, 2, 3]
    values = []
    for steps in (1, 60):
        head = train_head(frozen, photos, bank, SPEC, steps)
        values.append(judge_pixels(frozen, photos, range(5), bank, head, SPEC, k=3)[1].mean)
    assert values[1] > values[0] + 0.15


@pytest.mark.parametrize("fit", ["crop", "whole"])
def test_a_mask_is_placed_as_its_image_is(frozen, fit):
    """On an image whose pixels are its classes, far from the borders between them."""
    mask = torch.zeros(90, 60, dtype=torch.uint8)
    mask[30:70, 25:45] = 200
    transform = eval_transform_of(frozen.model, size=(32, 32), fit=fit)

    class One:
        def read(self, index):
            return mask.expand(3, -1, -1).contiguous()

        def name(self, index):
            return "one"

    image = transform.read(One(), 0)[0].int()
    placed = transform.place_mask(mask)
    assert placed.shape == (32, 32)
    assert set(placed.unique().tolist()) == {0, 200}
    far = np.abs(image.numpy() - 100) > 90
    assert far.mean() > 0.8
    assert (np.abs(image.numpy() - placed.int().numpy())[far] < 20).all()


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
    assert patch_classes(masks, (2, 2), 4).tolist() == [[[1, 0], [IGNORED, 3]]]
    _, masks = random_masks()
    classes = patch_classes(masks, (3, 4), 4)
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
    totals = count_pixels(predicted, masks, 6)
    counted = masks < IGNORED
    expected = jaccard_score(masks[counted], predicted[counted], average="macro", zero_division=0)
    assert mean_iou(*totals).item() == pytest.approx(expected)
    assert pixel_accuracy(*totals).item() == pytest.approx((predicted == masks)[counted].double().mean())


def test_rare_classes_are_inside_their_interval():
    """Each of 20 images has a class of its own, which most images drawn again do not have."""
    masks = torch.zeros(20, 8, 8, dtype=torch.uint8)
    masks[:, :4] = torch.arange(1, 21, dtype=torch.uint8)[:, None, None]
    predicted = masks.long()
    predicted[:, 0] = 0
    counts = [count_pixels(*image, 21) for image in zip(predicted, masks, strict=True)]
    parts = torch.stack(counts).unbind(1)
    interval = Measured(title="", images=np.arange(20), parts=parts, metric=summed(mean_iou)).figure
    assert interval.low - 0.5 <= interval.value <= interval.high + 0.5
