"""Judge a run on a small set, beside the untrained network, the baselines and lightly-train's network.

By k-NN (k = 20) and a logistic regression, with 10,000 training images in the bank and 2,000 test images, or
with all (--whole); no run has seen a label. What decides between recipes is what a user gets: the mean of
k-NN of CLS token and cells, levelled, and of what `predict` makes of 200 labels: how many of 100 others, of
2,000 training images, it labels rightly. The note of the first table says it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dino_vit
from dino_vit.config.sections import BASELINES
from dino_vit.data.image_set import ImageSet
from dino_vit.data.labels import Labels
from dino_vit.data.open import open_source
from dino_vit.data.synthetic import make_textures
from dino_vit.eval.linear import count_correct
from dino_vit.eval.logistic import train_logistic
from dino_vit.eval.neighbours import weighted_knn
from dino_vit.eval.online import rankme
from dino_vit.features.frozen import FrozenBackbone, build_baseline
from dino_vit.features.readings import fit_levelling, levelled_spec
from dino_vit.models.backbone import Backbone, FeatureSpec
from dino_vit.reports.record import read_run
from dino_vit.training.networks import build_untrained
from dino_vit.views.build import build_eval_transform
from dino_vit.weights import load_backbone, save_backbone

TEXTURES, SIDE = 20_000, 32  # generated images, and their side
K, QUERIES = 20, 2000
Judged = tuple[int | None, int | None]  # images of the bank and of the queries; None: all
JUDGED: Judged = (10_000, QUERIES)
PENALTIES, ITERATIONS = (1e-3, 1e-2, 1e-1, 1.0), 200
LABELS, OF, DRAWS = 200, 2000, 3  # labels, of so many images of the bank, drawn at random
READ = "k-NN of CLS + cells, levelled", "predict, 200 labels"  # the figures that decide
PEER = "lightly-train"
Figures = dict[str, dict[str, float]]  # by who is judged, and by figure


def peer_of(output: Path) -> Path:
    """Return the folder of lightly-train's run beside ours."""
    return output.with_name(f"{output.name}-peer")


def parts(name: str, folders: Mapping[str, Path], judged: Judged) -> Iterator[tuple[ImageSet, list[int]]]:
    """Yield the bank and the queries: a source, and the indices of the images in a random order."""
    if name in folders:
        opened = [open_source(str(folders[name] / f"{part}.parquet")) for part in ("train", "test")]
    else:
        textures = make_textures(length=TEXTURES + QUERIES, size=SIDE)
        opened = [textures.subset(range(TEXTURES)), textures.subset(range(TEXTURES, len(textures)))]
    for source, most in zip(opened, judged, strict=True):
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
        yield source, order[:most].tolist()


def judge_run(output: Path, name: str, folders: Mapping[str, Path], judged: Judged = JUDGED) -> Figures:
    """Return the figures of the trained network, of the untrained one and of the baselines."""
    record = read_run(output)
    transform = build_eval_transform(record.config)
    sets = list(parts(name, folders, judged))
    targets = [torch.tensor([source.label(index) for index in indices]) for source, indices in sets]
    cls = slice(record.config.model.shape[0])

    def features(model: Backbone, spec: FeatureSpec) -> list[Tensor]:
        frozen = FrozenBackbone(model=model, transform=transform, batch_size=256)
        return [frozen.extract(source, indices, spec=spec).values for source, indices in sets]

    def knn(bank: Tensor, queries: Tensor) -> float:
        ranked = weighted_knn(bank, targets[0], queries, k=[K])[K]
        return 100 * float((ranked[:, 0] == targets[1]).float().mean())

    networks = {"trained": load_backbone(output), "untrained": build_untrained(record.config)[1].backbone}
    found: Figures = {}
    for title, model in networks.items():
        spec = levelled_spec(model)
        bank, queries = features(model, spec)
        found[title] = {
            "k-NN": knn(bank[:, cls], queries[:, cls]),
            READ[0]: knn(*map(fit_levelling(bank, spec.widths(model)), (bank, queries))),
            "linear": linear(bank[:, cls], targets[0], queries[:, cls], targets[1]),
            "effective rank": rankme(bank[:QUERIES, cls]),
        }
    for title in BASELINES:
        baseline = build_baseline(title, sets[0][0], pixels=transform.pixels)
        frozen = FrozenBackbone(model=baseline, transform=baseline.transform)
        found[title] = {"k-NN": knn(*(frozen.extract(source, indices).values for source, indices in sets))}
    if (peer := peer_of(output) / "weights.pth").exists():
        networks[PEER] = load_backbone(peer, format="timm", heads=record.config.model.shape[2])
        bank, queries = features(networks[PEER], FeatureSpec(tokens="cls+mean"))
        readings = (cls, slice(-networks[PEER].width, None))  # of CLS or of the mean patch, which it trains
        found[PEER] = {"k-NN": max(knn(bank[:, part], queries[:, part]) for part in readings)}
    few = sets[0][0].subset(sets[0][1][:OF])
    with tempfile.TemporaryDirectory() as folder:
        for title, figures in found.items():
            weights = f"{folder}/{title}.safetensors" if title in networks else title
            if title in networks:
                save_backbone(networks[title], weights, mean=transform.mean, std=transform.std)
            figures[READ[1]] = predicted(few, weights, folder)
    return found


def linear(bank: Tensor, bank_targets: Tensor, queries: Tensor, targets: Tensor) -> float:
    """Return the accuracy of a logistic regression whose penalty is chosen on a fifth of the bank."""
    held = len(bank) // 5
    classes = int(bank_targets.max()) + 1
    options: dict[str, Any] = {"cs": PENALTIES, "classes": classes, "max_iterations": ITERATIONS}
    heads = train_logistic(bank[held:], bank_targets[held:], **options)
    best = int(count_correct(heads, bank[:held], bank_targets[:held]).argmax())
    return 100 * int(count_correct(heads, queries, targets)[best]) / len(queries)


def predicted(images: ImageSet, weights: str, cache: str) -> float:
    """Return how many of 100 images `predict` labels rightly by a few others, on average over some draws."""
    truth, right = images.codes(), 0
    for draw in range(DRAWS):
        few = torch.randperm(len(images), generator=torch.Generator().manual_seed(draw))[:LABELS].numpy()
        codes = np.full(len(images), -1)
        codes[few] = truth[few]
        labelled = images.with_labels(Labels(codes.take, images.labels.names))
        found = dino_vit.predict(labelled, weights, cache=cache, verbose=False)
        names = np.array(images.labels.names)[np.delete(truth, few)]
        right += int((names == found.labels).sum())
    return 100 * right / (DRAWS * (len(images) - LABELS))
