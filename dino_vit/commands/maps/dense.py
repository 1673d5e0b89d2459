"""Evaluate the patch features of a frozen backbone by masks: neighbours of patches, and a linear layer."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from dino_vit.commands import format_table
from dino_vit.config.settings import Count, Few, FewOrZero, NonEmpty, Positive, setting
from dino_vit.core.distributed import all_gather, is_main_process, share
from dino_vit.core.progress import progress
from dino_vit.core.randomness import RngPurpose, random_bits
from dino_vit.data.sources.masks import IGNORED, MaskedSource, open_masks
from dino_vit.eval.accuracy import results_path, write_results
from dino_vit.eval.features.extraction import Extraction, FeatureSpec, in_batches
from dino_vit.eval.features.frozen import EvaluationConfig, FrozenBackbone, frozen_backbone
from dino_vit.eval.knn import weighted_knn
from dino_vit.eval.linear import LinearHeads, sweep
from dino_vit.eval.maps.dense import Overlaps, mean_iou, patch_classes, pixel_accuracy, upsample
from dino_vit.eval.maps.pictures import Panel, as_picture, colour_classes, write_sheet

JUDGES = {"k-NN of patches": "knn", "linear layer": "linear"}
MOST_ITERATIONS = 200  # of the linear layer


class DenseConfig(EvaluationConfig):
    """Classify the pixels of images by their patches, on features of a frozen backbone."""

    train: str | None = setting(None, "images with masks to learn from; null: every other one of source")
    k: Few = setting(20, "neighbours of a patch")
    temperature: Positive = setting(0.07, "a neighbour's vote is exp(cosine / temperature)")
    patches: Count = setting(50_000, "patches to learn from, at most; as many of each image")
    cs: NonEmpty[Positive] = setting((0.01, 1.0, 100.0), "inverse penalties of the linear layer to try")
    pictures: FewOrZero = setting(8, "images to draw, beside their masks and the predictions")
    output: str | None = setting(
        None,
        "JSON file, with the picture beside; null: dense.json in eval/ of the run or beside the weights",
    )


class Batch(NamedTuple):
    """Patches of some images, and the class of each pixel."""

    features: Tensor  # (images, h, w, width)
    masks: Tensor  # uint8 (images, H, W)
    indices: list[int]


class Bank(NamedTuple):
    """Patches to learn from."""

    features: Tensor  # (patches, width)
    classes: Tensor


def run(config: DenseConfig) -> int:
    """Learn from the patches of some images, judge the pixels of others, write JSON and a picture."""
    with frozen_backbone(config) as frozen:
        queries = open_masks(config.source)
        places: Sequence[int] = range(len(queries))
        if config.train is None:
            learned, learned_places, places = queries, places[::2], places[1::2]
        else:
            learned = open_masks(config.train)
            learned_places = range(len(learned))
        if not places or not learned_places:
            raise ValueError(f"{config.source} has {len(queries)} image, which leaves none to judge")
        classes = list(queries.classes)
        bank = _bank(config, frozen, learned, learned_places, len(classes))
        layer, c = _linear_layer(bank, config.cs, len(classes))
        overlaps, rows = _judge(config, frozen, queries, places, bank, layer)
        path = results_path("dense", weights=config.weights, output=config.output)
        true = overlaps["knn"].true.sum(0)
        results = {
            "weights": frozen.describe_weights(),
            "settings": config.model_dump(mode="json"),
            "images": len(overlaps["knn"].true),
            "bank": len(bank.features),
            "c": c,
            "classes": classes,
            "largest_class": {
                "name": classes[int(true.argmax())],
                "percent": float(100 * true.max() / true.sum()),
            },
            **{name: _figures(of_judge, classes) for name, of_judge in overlaps.items()},
        }
        if is_main_process():
            write_results(path, results)
            written = [str(path)]
            if rows:
                picture = path.with_suffix(".png")
                titles = ["image", "mask", *JUDGES]
                write_sheet([[Panel(one) for one in row] for row in rows], picture, titles=titles)
                written.append(str(picture))
            print("\n\n".join([_table(results), "\n".join(written)]))
    return 0


def _read(frozen: FrozenBackbone, source: MaskedSource, places: Sequence[int], title: str) -> Iterator[Batch]:
    """Yield batches of images in order, their masks cropped as the images are."""
    preparation, device = frozen.preparation, frozen.device
    grid = frozen.model.grid_of(*preparation.size)
    extraction = Extraction(
        frozen.model,
        source,
        preparation=preparation,
        spec=FeatureSpec(tokens="patches"),
        autocast=frozen.autocast,
        threads=frozen.config.readers,
    )
    with progress(title, len(places)) as advance:
        for found in extraction(in_batches(places, frozen.config.batch_size)):
            indices = found.indices.tolist()
            if indices:
                masks = torch.stack([preparation.place_mask(source.mask(index)) for index in indices])
                features = rearrange(found.values, "b (h w) d -> b h w d", h=grid[0])
                yield Batch(features, masks.to(device), indices)
            advance(len(indices) + len(found.unreadable))


def _bank(
    config: DenseConfig, frozen: FrozenBackbone, source: MaskedSource, places: Sequence[int], classes: int
) -> Bank:
    """Return patches with a class: as many of each image, drawn at random."""
    each = max(1, config.patches // len(places))
    grid = frozen.model.grid_of(*frozen.preparation.size)
    features, kinds = [], []
    for batch in _read(frozen, source, places, "patches to learn from"):
        of_patches = patch_classes(batch.masks, grid, classes).flatten(1)
        count = of_patches.shape[1]
        keys = np.array(batch.indices)[:, None], np.arange(count)
        order = torch.from_numpy(np.argsort(random_bits(0, RngPurpose.EVALUATION, *keys), axis=1))
        chosen = order[:, :each].to(frozen.device)
        rows = batch.features.flatten(1, 2).gather(1, chosen[..., None].expand(-1, -1, frozen.model.width))
        known = of_patches.gather(1, chosen)
        features.append(rows[known != IGNORED])
        kinds.append(known[known != IGNORED])
    bank = Bank(torch.cat(features), torch.cat(kinds).long())
    if not len(bank.features):
        raise ValueError("no patch to learn from has a class: check the masks, of which 255 means none")
    return bank


def _linear_layer(bank: Bank, cs: Sequence[float], classes: int) -> tuple[LinearHeads, float]:
    """Return the linear layer whose penalty is the best for a fifth of the patches, those of other images."""
    held = len(bank.features) // 5
    features = F.normalize(bank.features, dim=1)
    fits = sweep(features[held:], bank.classes[held:], cs=cs, classes=classes, max_iterations=MOST_ITERATIONS)

    def right(head: LinearHeads) -> int:
        best = head.scores(features[:held])[:, 0].argmax(1)
        return int((best == bank.classes[:held]).sum())

    best = max(fits, key=lambda fit: right(fit.head))
    return best.head, best.c


def _judge(
    config: DenseConfig,
    frozen: FrozenBackbone,
    source: MaskedSource,
    places: Sequence[int],
    bank: Bank,
    layer: LinearHeads,
) -> tuple[dict[str, Overlaps], list[list[Tensor]]]:
    """Return the overlaps of all images with each judge, and rows of pictures of the first ones."""
    classes = len(source.classes)
    counted: dict[str, list[Overlaps]] = {name: [] for name in JUDGES.values()}
    rows: list[list[Tensor]] = []
    mine = share(range(len(places)))
    for batch in _read(frozen, source, places[mine.start : mine.stop], "images to judge"):
        size = batch.masks.shape[1], batch.masks.shape[2]
        flat = batch.features.flatten(0, 2)
        ranked = weighted_knn(
            bank.features, bank.classes, flat, k=[config.k], temperature=config.temperature
        )[config.k][:, 0]
        scores = {
            "knn": F.one_hot(ranked.to(flat.device), classes).float(),
            "linear": layer.scores(flat)[:, 0],
        }
        shape = dict(zip("bhw", batch.features.shape[:3], strict=True))
        predicted = {
            name: upsample(rearrange(score, "(b h w) c -> b c h w", **shape), size)
            for name, score in scores.items()
        }
        for name, kinds in predicted.items():
            counted[name].append(Overlaps.of(kinds, batch.masks, classes))
        for row, index in list(enumerate(batch.indices))[: max(0, config.pictures - len(rows))]:
            maps = [batch.masks[row], *(kinds[row] for kinds in predicted.values())]
            image = as_picture(frozen.preparation.read(source, index))
            rows.append([image, *(colour_classes(one.cpu(), image) for one in maps)])
    joined = {
        name: Overlaps(*(all_gather(torch.cat(parts)) for parts in zip(*of_judge, strict=True)))
        for name, of_judge in counted.items()
    }
    return joined, rows


def _figures(overlaps: Overlaps, classes: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a judge for a results file."""
    right, predicted, true = (part.sum(0) for part in overlaps)
    iou = 100 * right / (predicted + true - right).clamp(min=1)
    return {
        "mean_iou": mean_iou(overlaps)._asdict(),
        "pixel_accuracy": pixel_accuracy(overlaps)._asdict(),
        "iou": {name: float(iou[i]) for i, name in enumerate(classes) if true[i] > 0},
    }


def _table(results: dict[str, Any]) -> str:
    rows = [
        [title, *(_cell(results[name][figure]) for figure in ("mean_iou", "pixel_accuracy"))]
        for title, name in JUDGES.items()
    ]
    largest = results["largest_class"]
    head = f"pixels of {results['images']:,} images, learned from {results['bank']:,} patches of others"
    note = f"{largest['name']}, the largest class, has {largest['percent']:.1f} % of the pixels"
    return f"{head}\n\n{format_table(['', 'mIoU %', 'pixels %'], rows)}\n{note}"


def _cell(one: dict[str, float]) -> str:
    return f"{one['percent']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
