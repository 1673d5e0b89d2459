"""Copy detection on a few images, against plain loops."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import dino_vit
from eval.copydays import CopydaysConfig, average_precisions, learn_whitening, run
from ranking import micro_average_precision


def naive(cosines, truth):
    """Walk down the ranking of each query, then of all pairs; of equals the wrong image comes first."""
    areas, pairs = [], []
    for row, right in zip(cosines, truth, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], right[i]))[:20]  # as the code of 2021
        area, hits = 0.0, 0
        for rank, image in enumerate(order, 1):
            if right[image]:
                before = hits / (rank - 1) if rank > 1 else 1.0
                hits += 1
                area += (before + hits / rank) / 2 / sum(right)
        areas.append(area)
        pairs += zip(row, right, strict=True)
    pairs.sort(key=lambda pair: (-pair[0], pair[1]))
    hits, micro = 0, 0.0
    for rank, (_, right) in enumerate(pairs, 1):
        hits += right
        micro += right * hits / rank / truth.sum()
    return areas, micro


@pytest.mark.parametrize("distinct", [4, 10_000])
def test_figures_are_those_of_plain_loops(distinct):
    generator = np.random.default_rng(distinct)
    cosines = (generator.integers(0, distinct, (8, 30)) / distinct).astype(np.float32)
    truth = generator.random((8, 30)) < 0.1
    truth[:, 0] = True
    areas, micro = naive(cosines, truth)
    ours, nearest_is_right = average_precisions(torch.from_numpy(cosines), torch.from_numpy(truth))
    assert ours.tolist() == pytest.approx(areas)
    assert micro_average_precision(torch.from_numpy(cosines), torch.from_numpy(truth)) == pytest.approx(micro)
    assert nearest_is_right.tolist() == [
        truth[row][cosines[row] == cosines[row].max()].all() for row in range(8)
    ]


def test_whitening_is_that_of_2021():
    """It centres what it whitens, but not what it learns from, and normalises the result alone."""
    torch.manual_seed(0)
    learned, rows = 3 * torch.randn(500, 6) + 2, 3 * torch.randn(20, 6) + 2
    variances, directions = torch.linalg.eigh(learned.double().T @ learned.double() / 500)
    expected = (rows - learned.mean(0)).double() @ directions / variances.sqrt()
    whitened = learn_whitening(learned)(rows).double()
    expected = F.normalize(expected, dim=1)
    torch.testing.assert_close(whitened @ whitened.T, expected @ expected.T, atol=1e-5, rtol=0)


@pytest.fixture
def photos(tmp_path):
    """Originals, copies of them under another picture, and images of other content."""
    generator = np.random.default_rng(0)
    for number in range(12):
        image = Image.fromarray(generator.integers(0, 255, (6, 6, 3), dtype=np.uint8)).resize((24, 24))
        folder = tmp_path / ("originals" if number < 6 else "others")
        folder.mkdir(exist_ok=True)
        image.save(folder / f"{2000 + number}00.png")
        if number < 5:
            (tmp_path / "copies").mkdir(exist_ok=True)
            other = Image.fromarray(generator.integers(0, 255, (24, 24, 3), dtype=np.uint8))
            Image.blend(image, other, 0.8).save(tmp_path / "copies" / f"{2000 + number}01.png")
    return tmp_path


def figures_of(**settings):
    return json.loads(run(CopydaysConfig(**settings)).path.read_text())


def test_originals_are_found_by_name_and_by_table(photos, weights):
    settings = {
        "originals": str(photos / "originals"),
        "queries": str(photos / "copies"),
        "distractors": str(photos / "others"),
        "weights": str(weights),
        "size": 20,
    }
    (photos / "others" / "broken.png").write_bytes(b"nothing")
    by_name = figures_of(**settings)
    assert (by_name["queries"], by_name["images"]) == (5, 12)
    pairs = "".join(f"{2000 + n}01.png,{2000 + n}00.png\n" for n in range(5))
    (photos / "pairs.csv").write_text(f"{pairs}\n")
    assert figures_of(**settings, pairs=str(photos / "pairs.csv"))["results"] == by_name["results"]
    whitened = figures_of(**settings, whitening=str(photos / "others"))
    assert whitened["results"]["micro-AP"] != by_name["results"]["micro-AP"]
    (photos / "others" / "broken.png").unlink()

    model = dino_vit.load_backbone(weights)
    values = {"originals": [], "copies": [], "others": []}
    for name, features in values.items():
        for path in sorted((photos / name).iterdir()):
            pixels = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None]
            resized = F.interpolate(pixels, size=(20, 20), mode="bicubic", antialias=True).float() / 255
            with torch.no_grad():
                tokens = model.eval().forward_features((resized - 0.5) / 0.5)[0]
            gem = tokens[2:].clamp(min=1e-6).pow(4).mean(0).pow(0.25)
            features.append(F.normalize(torch.cat([tokens[0], gem]), dim=0))
    cosines = torch.stack(values["copies"]) @ torch.stack(values["originals"] + values["others"]).T
    areas, micro = naive(cosines.numpy(), np.eye(5, 12, dtype=bool))
    assert micro < 1
    assert by_name["results"]["mAP"] == pytest.approx(100 * np.mean(areas))
    assert by_name["results"]["micro-AP"] == pytest.approx(100 * micro)


def test_names_without_a_pair_are_refused(photos, weights):
    sides = {"originals": str(photos / "others"), "queries": str(photos / "copies")}
    with pytest.raises(ValueError, match=r"no query is paired .* give pairs=FILE\.csv"):
        run(CopydaysConfig(**sides, weights=str(weights)))
