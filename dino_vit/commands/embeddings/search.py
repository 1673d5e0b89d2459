"""Find the images of an embedding file that are nearest to given images."""

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from dino_vit.commands import Result
from dino_vit.config.settings import Dimension, Settings, setting
from dino_vit.core.runtime import start_processes
from dino_vit.core.text import printable
from dino_vit.data.custom import CustomSource
from dino_vit.data.sources.source import Source
from dino_vit.eval.accuracy import write_results
from dino_vit.eval.embeddings import Embeddings, embedded_panels, read_image_embeddings
from dino_vit.eval.features import FrozenBackbone
from dino_vit.eval.knn import nearest
from dino_vit.eval.maps.pictures import Panel, shorten, thumbnail, write_sheet
from dino_vit.models.tokens import FeatureSpec
from dino_vit.weights import load_backbone


class SearchConfig(Settings):
    """Find the images nearest to given ones among those that were embedded."""

    embeddings: str = Field(description="file that `dino-vit embed` wrote")
    images: tuple[str, ...] = Field(description="image files to find similar images to")
    weights: str | None = setting(None, "run folder or weights file; null: those of the embeddings")
    k: Dimension = setting(8, "nearest images to show")
    output: str = setting("search.png", "PNG to write; the same as JSON goes beside it")

    positional: ClassVar = ("embeddings", "images")
    examples: ClassVar = ("search photos.parquet cat.jpg dog.jpg output=found.png",)


@dataclass(frozen=True)
class Neighbour:
    """An embedded image, and how near it is to a given one."""

    name: str
    label: str | None
    cosine: float
    index: int  # in the source that was embedded
    row: int  # of the embedding file


@dataclass(frozen=True, kw_only=True)
class SearchResult(Result):
    """The nearest images to each given one."""

    images: list[str]  # the given ones
    nearest: list[list[Neighbour]]  # to each of them, the nearest first
    sheet: Path
    path: Path  # of the JSON file


def run(config: SearchConfig) -> SearchResult:
    """Find the nearest images to each given one, and write them as a sheet and as JSON."""
    output = Path(config.output)
    if output.suffix != ".png":
        raise ValueError(f"output={output} must end in .png")
    embeddings, queries = read_image_embeddings(config.embeddings), CustomSource([*map(Path, config.images)])
    cosines, rows = nearest(embeddings.values, query_features(config, queries, embeddings), k=config.k)
    names, lines, captions = list(map(printable, config.images)), list[str](), list[tuple[int, str]]()
    neighbours: list[list[Neighbour]] = []
    for name, of_rows, of_cosines in zip(names, rows.tolist(), cosines.tolist(), strict=True):
        lines.append(f"{name}:")
        neighbours.append([])
        for row, cosine in zip(of_rows, of_cosines, strict=True):
            text = f"{cosine:.4f}"
            image, label = embeddings.names[row], embeddings.labels[row]
            index = int(embeddings.indices[row])
            neighbours[-1].append(Neighbour(image, label, round(cosine, 6), index, row))
            lines.append(f"  {text}  {image}" + (f"  {label}" if label else ""))
            captions.append((row, f"{text}  {shorten(label or image, 20)}"))
    panels, sheet = iter(embedded_panels(embeddings, captions)), list[list[Panel]]()
    for query, images in enumerate(neighbours):
        given = thumbnail(queries, query, embeddings.transform.pixels), Path(names[query]).name
        sheet.append([given, *islice(panels, len(images))])
    write_sheet(sheet, output)
    path = output.with_suffix(".json")
    results = [
        {"image": name, "nearest": list(map(asdict, images))}
        for name, images in zip(names, neighbours, strict=True)
    ]
    write_results(path, {"embeddings": str(Path(config.embeddings).absolute()), "results": results})
    lines.append(f"{output}: sheet of the nearest images; {path}: the same as JSON")
    return SearchResult(images=names, nearest=neighbours, sheet=output, path=path, text="\n".join(lines))


def query_features(config: SearchConfig, queries: Source, embeddings: Embeddings) -> Tensor:
    """Compute the features of the given images exactly as those in the file were computed."""
    recorded, tokens = embeddings.metadata["weights"], embeddings.metadata["tokens"]
    path = config.weights or recorded["path"]
    try:
        model = load_backbone(path, network=recorded["network"])
    except (ValueError, OSError) as error:
        raise ValueError(
            f"search needs the weights that computed the embeddings: {error}. If they were moved, give their "
            "new path with weights="
        ) from error
    precision = getattr(torch, embeddings.metadata["precision"])
    frozen = FrozenBackbone(
        model=model.to(start_processes().device),
        transform=embeddings.transform,
        autocast=None if precision == torch.float32 else precision,
    )
    if frozen.weights_digest != recorded["sha256"]:
        raise ValueError(
            f"{path} are not the weights that computed the embeddings (step {recorded['step']} of "
            f"{recorded['path']}): give those with weights=, or embed the images again"
        )
    spec = FeatureSpec(tokens=tokens["kind"], blocks=tokens["blocks"])
    features = frozen.extract(queries, range(len(queries)), spec)
    if features.unreadable:
        image = features.unreadable[0]
        path = printable(config.images[int(image.name)])
        raise ValueError(f"an image to search for cannot be read: {path}: {image.reason}")
    return features.values
