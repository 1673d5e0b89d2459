"""Find the images of an embedding file that are nearest to given images."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, TypeAdapter
from torch import Tensor

from dino_vit.commands import Result
from dino_vit.config.settings import Dimension, Settings, setting
from dino_vit.core.runtime import start_processes
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import printable
from dino_vit.data.sources.open import Source
from dino_vit.eval.embeddings import EmbeddedImages, read_image_embeddings
from dino_vit.eval.features.extraction import FeatureSpec, extract_features
from dino_vit.eval.features.store import weights_digest
from dino_vit.eval.maps.pictures import Panel, shorten, thumbnail, write_sheet
from dino_vit.eval.neighbours import format_cosines, nearest
from dino_vit.views.preparation import Preparation
from dino_vit.weights import load_backbone


class SearchConfig(Settings):
    """Find the images nearest to given ones among those that were embedded."""

    embeddings: str = Field(description="file that `dino-vit embed` wrote")
    images: tuple[str, ...] = Field(description="image files to find similar images to")
    weights: str | None = setting(None, "run folder or weights file; null: those of the embeddings")
    k: Dimension = setting(8, "nearest images to show")
    output: str = setting("search.png", "PNG to write; the same as JSON goes beside it")

    positional: ClassVar = ("embeddings", "images")


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
    embeddings = read_image_embeddings(config.embeddings)
    queries = ImageFiles(config.images)
    features = query_features(config, queries, embeddings.metadata)
    cosines, rows = nearest(embeddings.values, features, k=config.k)
    images, sheet, lines = EmbeddedImages(embeddings), [], []
    names: list[str] = []
    found: list[list[Neighbour]] = []
    for index, (query_cosines, query_rows) in enumerate(zip(cosines.tolist(), rows.tolist(), strict=True)):
        name = queries.name(index)
        lines.append(f"{name}:")
        panels = [Panel(thumbnail(queries, index, images.pixels), Path(name).name)]
        names.append(name)
        found.append([])
        texts = format_cosines(query_cosines)
        for cosine, text, row in zip(query_cosines, texts, query_rows, strict=True):
            one = Neighbour(
                name=embeddings.names[row],
                label=embeddings.labels[row],
                cosine=round(cosine, 6),
                index=int(embeddings.indices[row]),
                row=row,
            )
            lines.append(f"  {text}  {one.name}" + (f"  {one.label}" if one.label else ""))
            panels.append(images.panel(row, f"{text}  {shorten(one.label or one.name, 20)}"))
            found[-1].append(one)
        sheet.append(panels)
    write_sheet(sheet, output)
    results = [
        {"image": name, "nearest": [asdict(one) for one in of_image]}
        for name, of_image in zip(names, found, strict=True)
    ]
    written = {"embeddings": str(Path(config.embeddings).absolute()), "results": results}
    path = output.with_suffix(".json")
    write_bytes(path, json.dumps(written, indent=1).encode())
    lines.append(f"{output}: sheet of the nearest images; {path}: the same as JSON")
    return SearchResult(images=names, nearest=found, sheet=output, path=path, text="\n".join(lines))


class ImageFiles:
    """Image files in the given order, as a source; FilesSource would sort them and index them on disk."""

    classes: Sequence[str] = ()
    fingerprint = ""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()

    def label(self, index: int) -> int | None:
        return None

    def name(self, index: int) -> str:
        return printable(self.paths[index])


def query_features(config: SearchConfig, queries: Source, metadata: dict[str, Any]) -> Tensor:
    """Compute the features of the given images exactly as those in the file were computed."""
    recorded, tokens = metadata["weights"], metadata["tokens"]
    path = config.weights or recorded["path"]
    try:
        model = load_backbone(path, network=recorded["network"])
    except (ValueError, OSError) as error:
        raise ValueError(
            f"search needs the weights that computed the embeddings: {error}. If they were moved, give their "
            "new path with weights="
        ) from error
    if weights_digest(model) != recorded["sha256"]:
        raise ValueError(
            f"{path} are not the weights that computed the embeddings (step {recorded['step']} of "
            f"{recorded['path']}): give those with weights=, or embed the images again"
        )
    precision = getattr(torch, metadata["precision"])
    features = extract_features(
        model.to(start_processes().device),
        queries,
        range(len(queries)),
        preparation=TypeAdapter(Preparation).validate_python(metadata["preparation"]),
        batch_size=32,
        spec=FeatureSpec(tokens=tokens["kind"], blocks=tokens["blocks"]),
        autocast=None if precision == torch.float32 else precision,
    )
    if features.unreadable:
        raise ValueError(f"an image to search for cannot be read: {features.unreadable[0]}")
    return features.values
