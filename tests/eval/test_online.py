import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from sklearn.metrics import average_precision_score
from torch.nn import functional as F

from dino_vit.config.sections import BASELINES
from dino_vit.core.distributed import end_processes
from dino_vit.data.labels import Labels
from dino_vit.data.open import open_source
from dino_vit.data.stores.files import open_folder
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.online import OnlineEvaluation, colours, cross_predictions, explained, rankme
from dino_vit.features.frozen import FrozenBackbone, build_baseline
from dino_vit.features.readings import fit_levelling
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.eval_transform import EvalTransform
from tests.support.backbones import backbone, extracted
from tests.support.images import write_synthetic
from tests.support.naive import right_by_loop
from tests.support.runs import server

TRANSFORM = EvalTransform(size=(32, 32), mean=(0.5,) * 3, std=(0.25,) * 3)
SETTINGS = {"transform": TRANSFORM}


@pytest.mark.parametrize("shape", [(50, 8), (5, 12), (9, 9)])
def test_rankme_is_the_exponential_of_the_entropy_of_the_singular_values(shape):
    features = torch.randn(*shape) @ torch.diag(torch.logspace(-2, 1, shape[1]))
    product = features.double().T @ features.double()
    singular = [math.sqrt(value) for value in torch.linalg.eigvalsh(product).tolist() if value > 1e-12]
    shares = [value / sum(singular) for value in singular]
    expected = math.exp(-sum(share * math.log(share) for share in shares))
    assert rankme(features) == pytest.approx(expected, rel=1e-6)


def test_figures_are_those_of_each_image_among_the_others():
    source, model = make_textures(length=500), backbone()
    evaluation = OnlineEvaluation(source=source, **SETTINGS, seed=3, images=120, batch_size=50)
    figures = evaluation(model)
    features = extracted(model, source, evaluation.indices, **SETTINGS, batch_size=50)
    right = right_by_loop(features, [source.label(index) for index in evaluation.indices], 20)
    assert figures.knn == pytest.approx(100 * sum(right) / 120)
    bits = int(figures.knn_answers, 16)
    assert [bits >> image & 1 for image in range(120)] == right
    assert int(figures.probe_answers, 16).bit_count() == round(1.2 * figures.probe)
    assert figures.rankme == pytest.approx(rankme(features))
    assert evaluation(model) == figures


def test_a_probe_predicts_each_half_from_the_other():
    values, labels = torch.randn(101, 7), torch.arange(101) % 3
    targets, first = F.one_hot(labels).float(), torch.rand(101) < 0.5
    found = cross_predictions(values, targets, first)
    for row in range(0, 101, 10):
        train = [other for other in range(101) if first[other] != first[row]]
        centre, scale = values[train].mean(dim=0), values[train].std(dim=0, correction=0)
        # A penalty is the same as images of length sqrt(penalty), one along each column.
        x = torch.cat([(values[train] - centre) / scale, (0.01 * len(train)) ** 0.5 * torch.eye(7)])
        y = torch.cat([targets[train] - targets[train].mean(dim=0), torch.zeros(7, 3)])
        weights = torch.linalg.lstsq(x, y).solution
        expected = (values[row] - centre) / scale @ weights + targets[train].mean(dim=0)
        assert found[row] == pytest.approx(expected, abs=1e-4)


def test_features_that_are_colours_are_explained_by_them():
    halves, images = torch.arange(400) % 2 == 0, torch.rand(400, 3, 1, 1) * torch.rand(400, 3, 8, 8)
    image_colours = colours(images)
    assert image_colours[:, 3:] == pytest.approx(images.flatten(2).std(dim=2), abs=1e-5)
    brightness = image_colours[:, :3].mean(dim=1, keepdim=True)
    features = image_colours @ torch.randn(6, 16) + 1
    assert explained(features, image_colours, halves) > 0.95
    assert 0.1 < explained(features, brightness, halves) < 0.9
    assert explained(torch.randn(400, 16), image_colours, halves) < 0.05


def test_cells_and_baselines_are_levelled_by_the_images_that_vote(tmp_path):
    source, model = open_folder(write_split_noise(tmp_path)), backbone()
    evaluation = OnlineEvaluation(source=source, **SETTINGS, seed=0)
    bank = torch.arange(len(evaluation.indices)) < evaluation.votes
    labels = torch.tensor([source.label(index) for index in evaluation.indices])

    def percent(values):
        ranked = weighted_knn(values[bank], labels[bank], values[~bank], k=[20])[20]
        return 100 * float((ranked[:, 0] == labels[~bank]).float().mean())

    def levelled(values, widths):
        return percent(fit_levelling(values[bank], widths)(values))

    values = extracted(model, source, evaluation.indices, FeatureSpec(tokens="cls+cells"), **SETTINGS)
    width = model.width
    figures = evaluation(model)
    assert figures.knn == pytest.approx(percent(values[:, :width]))
    assert figures.levelled_knn == pytest.approx(levelled(values, [width, 9 * width]))
    guesses = evaluation.guesses()
    for name in BASELINES:
        frozen = FrozenBackbone(model=build_baseline(name, source), transform=None)
        frozen = replace(frozen, transform=frozen.model.transform)
        plain = frozen.extract(source, evaluation.indices).values
        better = max(percent(plain), levelled(plain, [plain.shape[1]]))
        assert getattr(guesses, name) == pytest.approx(better)


def write_noise(path, low, high):
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(int(path.stem))
    Image.fromarray(generator.integers(low, high, (32, 32, 3), dtype=np.uint8)).save(path)


def write_split_noise(folder):
    for number in range(120):
        split, label = ("train", "val", "train")[number % 3], ("dark", "light")[number % 2]
        low = 100 * (label == "light") + 50 * (split == "val")
        write_noise(folder / split / label / f"{number}.png", low, low + 60)
    return folder


def test_splits_are_not_classes(tmp_path):
    """Of noise: the split and the class are told by brightness, and only the class is asked for."""
    source = open_folder(write_split_noise(tmp_path))
    evaluation = OnlineEvaluation(source=source, **SETTINGS, seed=0)
    guesses = evaluation.guesses()
    assert (guesses.queries, guesses.chance, guesses.leave_one_out) == (40, 50, False)
    bank = set(evaluation.indices[: evaluation.votes])
    assert {source.name(index).split("/")[0] for index in bank} == {"train"}
    assert {source.name(index).split("/")[0] for index in set(evaluation.indices) - bank} == {"val"}


def test_with_splits_a_probe_learns_from_the_images_that_vote(tmp_path):
    """In val the two labels are swapped, so that what holds in train is always wrong there."""
    for number in range(120):
        split, shade = ("train", "val", "train")[number % 3], number % 2
        label = ("dark", "light")[shade ^ (split == "val")]
        write_noise(tmp_path / split / label / f"{number}.png", 100 * shade, 100 * shade + 20)
    evaluation = OnlineEvaluation(source=open_folder(tmp_path), **SETTINGS, seed=0)
    assert evaluation.guesses().colours == 0
    figures = evaluation(backbone())
    assert figures.probe == 0
    assert int(figures.probe_answers, 16) == 0


def test_the_images_are_a_function_of_the_seed():
    def indices(seed, **changes):
        source = make_textures(length=300)
        return OnlineEvaluation(source=source, **SETTINGS, seed=seed, **{"images": 50, **changes}).indices

    assert indices(0) == indices(0)
    assert sorted(set(indices(0))) == sorted(indices(0))
    assert len(indices(0)) == 50
    assert indices(1) != indices(0)
    assert sorted(indices(0, images=5000)) == list(range(300))


def partly_labelled(length, labels):
    textures = make_textures(length=length)
    numbers = [labels.get(index, -1) for index in range(length)]
    return textures.with_labels(Labels(np.array(numbers, np.int32).take, textures.labels.names))


@pytest.mark.parametrize("labels", [{}, dict.fromkeys(range(100), 7)], ids=["no labels", "one class"])
def test_without_labels_the_rank_is_what_there_is(labels):
    evaluation = OnlineEvaluation(source=partly_labelled(100, labels), **SETTINGS, seed=0, images=40)
    figures = evaluation(backbone())
    assert (figures.knn, figures.levelled_knn, figures.probe) == (None,) * 3
    assert math.isfinite(figures.colour)
    assert len(evaluation.indices) == 40
    assert evaluation.guesses() is None


def test_images_with_labels_are_preferred():
    labels = {index: index % 2 for index in range(0, 100, 5)}
    source, model = partly_labelled(100, labels), backbone()
    evaluation = OnlineEvaluation(source=source, **SETTINGS, seed=0, images=40)
    assert sorted(evaluation.indices) == sorted(labels)
    features = extracted(model, source, evaluation.indices, **SETTINGS)
    right = right_by_loop(features, [labels[index] for index in evaluation.indices], 19)
    assert evaluation(model).knn == pytest.approx(100 * sum(right) / 20)  # all others vote


def test_unreadable_images_are_left_out_with_a_warning(tmp_path, caplog):
    for number in range(12):
        write_synthetic(tmp_path / "ab"[number % 2] / f"{number}.png", number)
    for number in range(2):
        (tmp_path / "ab"[number] / f"{number}.png").write_bytes(b"")
    evaluation = OnlineEvaluation(source=open_folder(tmp_path), **SETTINGS, seed=0)
    assert math.isfinite(evaluation(backbone()).knn)
    assert caplog.text.count("2 of 12 images cannot be read and are left out:\n") == 1
    assert all(f"  {name}: the file is empty\n" in caplog.text for name in ("a/0.png", "b/1.png"))


def test_two_processes_have_the_figures_of_one(tmp_path):
    torch.manual_seed(1)
    model = backbone()
    expected = _figures(model)
    arguments = f"file://{tmp_path / 'rendezvous'}", model.state_dict()
    mp.start_processes(_evaluate, arguments, nprocs=2, start_method=server.get_start_method())
    for number in range(2):
        figures = torch.load(tmp_path / f"rendezvous{number}")
        for group, alone in zip(figures, expected, strict=True):
            for value, expected_value in zip(group, alone, strict=True):
                number = isinstance(value, float)
                assert value == (pytest.approx(expected_value, rel=1e-4) if number else expected_value)


def _figures(model):
    sources = make_textures(length=101), make_textures(length=2), partly_labelled(9, labels={})
    evaluations = [OnlineEvaluation(source=source, **SETTINGS, seed=0) for source in sources]
    return [astuple(evaluation(model)) for evaluation in evaluations]


def _evaluate(number, rendezvous, weights):
    dist.init_process_group("gloo", init_method=rendezvous, rank=number, world_size=2)
    try:
        model = backbone()
        model.load_state_dict(weights)
        figures = _figures(model)
    finally:
        end_processes()
    torch.save(figures, f"{rendezvous.removeprefix('file://')}{number}")


def test_several_labels_are_judged_too(tmp_path):
    """Images of one colour each, which is the label, in features of pixels too."""
    colours = np.random.default_rng(0).integers(256, size=(80, 3))
    lines = []
    for number, colour in enumerate(colours.tolist()):
        Image.new("RGB", (32, 32), tuple(colour)).save(tmp_path / f"{number:02}.png")
        tags = ";".join(name for name, value in zip("rgb", colour, strict=True) if value > 150) or ";"
        lines.append(f"{number:02}.png,{tags}")
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    source, model = open_source(str(tmp_path), tmp_path / "labels.csv", several=True), backbone()
    evaluation = OnlineEvaluation(source=source, **SETTINGS, seed=0)
    figures, guesses = evaluation(model), evaluation.guesses()
    values = source.labels.values(source.codes(evaluation.indices))
    features = F.normalize(extracted(model, source, evaluation.indices, **SETTINGS, batch_size=50))
    cosines = (features @ features.T).fill_diagonal_(-torch.inf)
    nearest = cosines.topk(20)
    weights = (nearest.values / 0.07).exp()[..., None].numpy()
    outputs = (weights * values[nearest.indices]).sum(1) / weights.sum(1)
    assert figures.knn == pytest.approx(100 * average_precision_score(values, outputs), abs=0.01)
    assert guesses.metric == "mAP"
    assert guesses.pixels > 60 > guesses.chance
    constant = np.broadcast_to(values.mean(axis=0), values.shape)
    assert guesses.chance == pytest.approx(100 * average_precision_score(values, constant), abs=1e-3)
    assert guesses.largest_class is figures.knn_answers is None
    assert 0 < figures.knn_error < 15
    assert figures.probe > figures.knn - 5
