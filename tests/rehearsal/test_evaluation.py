"""Evaluations wait for a GPU at their ends, or as often for a chunk: not for each batch, step or query."""

import pytest
import torch

from benchmarks.rehearsal import CUDA, HostWaits, OnGpu, Rehearsal
from dino_vit import VisionTransformer
from dino_vit.commands.classification.finetune import FinetuneConfig, Finetuning
from dino_vit.config.loading import load
from dino_vit.data.sources.synthetic import SyntheticSource
from dino_vit.eval import neighbours
from dino_vit.eval.classification import linear
from dino_vit.eval.classification.knn import weighted_knn
from dino_vit.eval.features.extraction import Extraction, FeatureSpec, in_batches
from dino_vit.eval.video.propagation import Propagation, classes_of_pixels, patch_labels
from dino_vit.views.photometry import Augment, Column
from dino_vit.views.preparation import Preparation

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("tokens", ["cls", "cls+mean", "patches"])
def test_features_are_computed_without_a_wait_between_batches(monkeypatch, tokens):
    empty = Preparation.empty
    monkeypatch.setattr(
        Preparation, "empty", lambda self, images, pin: empty(self, images)
    )  # nothing to pin for
    with Rehearsal(answers=True) as rehearsal:
        model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2).to(CUDA)
        source, preparation = (
            SyntheticSource(length=20, size=40),
            Preparation(size=(32, 32), mean=MEAN, std=STD),
        )
        spec = FeatureSpec(tokens=tokens)
        extraction = Extraction(model, source, preparation=preparation, spec=spec, autocast=torch.bfloat16)
        batches = extraction(in_batches(range(20), 8))
        next(batches)
        rehearsal.answers = False
        later = list(batches)
        assert [len(batch.values) for batch in later] == [8, 4]
        assert {batch.values.device for batch in later} == {CUDA}


@pytest.mark.parametrize("own", [None, 3])
def test_a_search_waits_seven_times_for_a_chunk_of_the_bank(monkeypatch, own):
    monkeypatch.setattr(neighbours, "_BANK", 1)
    monkeypatch.setattr(neighbours, "_FEWEST_ROWS", 500)
    found = {}
    for rows, queries in ((500, 100), (500, 300), (1500, 300)):
        with Rehearsal(answers=True) as rehearsal:
            bank, asked = (torch.randn(count, 16, device=CUDA) for count in (rows, queries))
            cosines, indices = neighbours.nearest(bank, asked, k=20, own=own, search="torch")
            assert cosines.shape == indices.shape == (queries, 20)
            found[rows, queries] = rehearsal.waits.total()
    of_queries, of_chunk = 2, 7
    assert found[500, 100] == found[500, 300] == of_queries + of_chunk
    assert found[1500, 300] == of_queries + 3 * of_chunk


def test_votes_are_counted_on_the_device():
    with Rehearsal(answers=True) as rehearsal:
        labels = torch.arange(10, device=CUDA).repeat(50)
        bank, queries = (torch.randn(count, 16, device=CUDA) for count in (500, 100))
        ranked = weighted_knn(bank, labels, queries, k=[5, 20], search="torch")
        assert ranked[20].shape == (100, 5)
        # Beside those of the search, the number of different labels is a shape.
        assert rehearsal.waits.total() == 9 + 1


def test_the_patches_of_a_frame_are_labelled_without_a_wait():
    with Rehearsal() as rehearsal:
        features, mask = torch.randn(3, 20, 18, 16, device=CUDA), torch.zeros(160, 144, device=CUDA)
        labels = patch_labels(mask, torch.arange(3, device=CUDA), (20, 18))
        how = {"last_frames": 7, "radius": 12, "k": 5, "temperature": 0.1}
        tracker = Propagation(features[0], labels, **how)
        found = [classes_of_pixels(tracker.label(one), (160, 144), (90, 70)) for one in features[1:]]
        assert {(one.shape, one.device) for one in found} == {((90, 70), CUDA)}
        assert rehearsal.waits.total() == 0


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
def test_probes_are_trained_without_a_wait_between_steps(device):
    found = set()
    for steps in (2, 5):
        with Rehearsal(answers=True) as rehearsal:
            features, targets = torch.randn(200, 16), torch.arange(10).repeat(20)
            features, targets = (one.to(device, non_blocking=True) for one in (features, targets))
            options = {"rates": [0.1, 0.01], "classes": 10, "batch_size": 32, "seed": 0, "device": CUDA}
            columns = [slice(0, 16), slice(8, 16)]
            heads = linear.train_heads(features, targets, columns=columns, steps=steps, **options)
            found.add(rehearsal.waits.total())
            rehearsal.answers = False
            if device == CUDA:
                linear.count_correct(heads[1], features, targets)
                assert linear.top_classes(heads[0], features).shape == (200, 5)
    assert len(found) == 1


def test_the_objective_of_a_logistic_regression_does_not_wait():
    with Rehearsal() as rehearsal, torch.no_grad():
        features, targets = torch.randn(200, 16, device=CUDA), torch.zeros(200, dtype=torch.long, device=CUDA)
        scaled = [torch.zeros(10, 16, device=CUDA), torch.zeros(10, device=CUDA)]
        unit, mean = torch.ones(16, device=CUDA), features.mean(0)
        value = linear._objective(scaled, features, targets, unit=unit, mean=mean, penalty=0.1)
        assert value.device == scaled[0].grad.device == CUDA
        assert rehearsal.kernels.total() > 20
        with pytest.raises(HostWaits):  # L-BFGS reads the value: it decides where to go
            next(linear.sweep(features, targets, cs=[1.0], classes=10))


def test_a_step_of_finetuning_does_not_wait(tmp_path):
    settings = {
        "source": "synthetic:40:32",
        "arch": "vit_tiny",
        "patch_size": 16,
        "size": 32,
        "batch_size": 8,
    }
    settings |= {"output": tmp_path, "drop_path": 0.2, "mixup": 0.5, "workers": 0}
    config = load(FinetuneConfig, None, [f"{key}={value}" for key, value in settings.items()])
    with Rehearsal(answers=True) as rehearsal:
        run = Finetuning(config, OnGpu())
        run.loader.loader.pin = False
        rehearsal.answers = False
        batches = run.loader.batches()
        for step in range(2):
            run.take_step(*next(batches), step)
        assert rehearsal.by_part["clipping"] < 20


@pytest.mark.parametrize("channels", [3, 5])
def test_photometry_does_not_wait(channels):
    rows = torch.rand(12, len(Column))
    rows[:, Column.ORDER] = torch.arange(12).float()
    rows[::2, Column.JITTER] = rows[1::3, Column.SIGMA] = rows[2::3, Column.NOISE] = 0
    with Rehearsal() as rehearsal:
        augment = Augment(mean=(0.5,) * channels, std=(0.2,) * channels)
        augment = augment._apply(lambda tensor: tensor.to(CUDA, non_blocking=True))
        images = torch.zeros(12, channels, 48, 40, dtype=torch.uint8, device=CUDA)
        rehearsal.restart()
        out = augment(images, rows)
        assert (out.shape, out.dtype, out.device) == (images.shape, torch.float32, CUDA)
        assert rehearsal.kernels[("elsewhere", "aten._to_copy.default")] < 20  # not one for every operation
        assert rehearsal.kernels.total() < (300 if channels == 3 else 200)
