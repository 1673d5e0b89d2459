"""Evaluations wait for a GPU at their ends, or as often for a chunk: not for each batch, step or query."""

import pytest
import torch

from dino_vit import VisionTransformer, save_backbone, vit_tiny
from dino_vit.config.loading import load
from dino_vit.core.distributed import to_device
from dino_vit.core.process import in_batches
from dino_vit.data.stores.files import open_folder
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.linear import count_correct, head_scores
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.online import OnlineEvaluation
from dino_vit.features.frozen import FrozenBackbone
from dino_vit.models.backbone import FeatureSpec
from dino_vit.views.augment import Augment, Column
from dino_vit.views.eval_transform import EvalTransform
from eval.finetune import FinetuneConfig, Finetuning
from eval.linear_grid import train_heads
from tests.support.images import write_synthetic
from tests.support.rehearsal import CUDA, OnGpu, Rehearsal

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("splits", [("train", "val"), ("",)], ids=["splits", "one set"])
def test_an_evaluation_in_training_runs_on_a_gpu(tmp_path, splits):
    for number, split in enumerate(splits * 12):
        write_synthetic(tmp_path / split / "ab"[number // 2 % 2] / f"{number}.png", number)
    with Rehearsal(answers=True):
        model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2).to(CUDA)
        transform = EvalTransform(size=(32, 32), mean=MEAN, std=STD)
        evaluation = OnlineEvaluation(source=open_folder(tmp_path), transform=transform, seed=0)
        assert (evaluation.votes > 0) == (len(splits) > 1)
        assert evaluation(model).knn is not None
        assert evaluation.guesses() is not None


@pytest.mark.parametrize("tokens", ["cls", "cls+mean", "patches"])
def test_features_are_computed_without_a_wait_between_batches(tokens):
    with Rehearsal(answers=True) as rehearsal:
        model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=2, heads=2).to(CUDA)
        source, transform = (
            make_textures(length=20, size=40),
            EvalTransform(size=(32, 32), mean=MEAN, std=STD),
        )
        frozen = FrozenBackbone(model=model, transform=transform, autocast=torch.bfloat16)
        batches = frozen.features(source, in_batches(range(20), 8), FeatureSpec(tokens=tokens))
        next(batches)
        rehearsal.answers = False
        later = list(batches)
        assert [len(batch.values) for batch in later] == [8, 4]
        assert {batch.values.device for batch in later} == {CUDA}


def test_votes_are_counted_on_the_device():
    with Rehearsal(answers=True) as rehearsal:
        labels = torch.arange(10, device=CUDA).repeat(50)
        bank, queries = (torch.randn(count, 16, device=CUDA) for count in (500, 100))
        ranked = weighted_knn(bank, labels, queries, k=[5, 20])
        assert ranked[20].shape == (100, 5)
        # Whether bank and queries are finite; the number of different labels is a shape.
        assert rehearsal.waits.total() == 2 + 1


@pytest.mark.parametrize("device", [CUDA, torch.device("cpu")])
def test_probes_are_trained_without_a_wait_between_steps(device):
    found = set()
    for steps in (2, 5):
        with Rehearsal(answers=True) as rehearsal:
            features, targets = torch.randn(200, 16), torch.arange(10).repeat(20)
            features, targets = (to_device(one, device) for one in (features, targets))
            options = {"rates": [0.1, 0.01], "classes": 10, "batch_size": 32, "seed": 0, "device": CUDA}
            columns = [slice(0, 16), slice(8, 16)]
            heads = train_heads(features, targets, columns=columns, steps=steps, **options)
            found.add(rehearsal.waits.total())
            rehearsal.answers = False
            if device == CUDA:
                count_correct(heads[1], features, targets)
                assert head_scores(heads[0], features).shape == (200, 2, 10)
    assert len(found) == 1


def test_a_step_of_finetuning_does_not_wait(tmp_path):
    save_backbone(vit_tiny(image_size=32), tmp_path / "vit.safetensors", mean=MEAN, std=STD)
    settings = {
        "source": "synthetic:40:32",
        "weights": tmp_path / "vit.safetensors",
        "batch_size": 8,
    }
    settings |= {"output": tmp_path, "drop_path": 0.2, "workers": 0}
    config = load(FinetuneConfig, None, [f"{key}={value}" for key, value in settings.items()])
    with Rehearsal(answers=True) as rehearsal:
        run = Finetuning(config, OnGpu())
        rehearsal.answers = False
        batches = run.loader.batches()
        for step in range(2):
            run.take_step(*next(batches), step)
        assert rehearsal.by_part["clipping"] < 20
        rehearsal.answers = True
        assert run.evaluate()["top-1"].images > 0


@pytest.mark.parametrize("channels", [3, 5])
def test_photometry_does_not_wait(channels):
    rows = torch.rand(12, len(Column))
    rows[:, Column.ORDER] = torch.arange(12).float()
    rows[::2, Column.JITTER] = rows[1::3, Column.SIGMA] = 0
    with Rehearsal() as rehearsal:
        augment = Augment(mean=(0.5,) * channels, std=(0.2,) * channels)
        augment = augment._apply(lambda tensor: to_device(tensor, CUDA))
        images = torch.zeros(12, channels, 48, 40, dtype=torch.uint8, device=CUDA)
        rehearsal.restart()
        out = augment(images, rows)
        assert (out.shape, out.dtype, out.device) == (images.shape, torch.float32, CUDA)
        assert rehearsal.kernels[("elsewhere", "aten._to_copy.default")] < 20  # not one for every operation
        assert rehearsal.kernels.total() < (180 if channels == 3 else 80)
