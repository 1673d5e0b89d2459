"""Find the images of an embedding file that are nearest to given images; none is found by itself."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor

from dino_vit.config.embeddings import SearchConfig
from dino_vit.config.outputs import check_outputs
from dino_vit.core.storage import write_bytes
from dino_vit.core.text import Result, printable, public
from dino_vit.core.work import after_figures
from dino_vit.data.custom import wrap
from dino_vit.data.image_set import ImageSet
from dino_vit.eval.embeddings.embed import Embeddings, embedded_panels, read_image_embeddings
from dino_vit.eval.features import check_finite
from dino_vit.eval.maps.pictures import Panel, draw_sheet, shorten, thumbnail
from dino_vit.eval.neighbours import nearest
from dino_vit.eval.results import write_results
from dino_vit.weights import load_backbone


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
    sheet: Path | None  # if there is an output
    path: Path | None  # of the JSON file


def run(config: SearchConfig) -> SearchResult:
    """Find the nearest images to each given one; with an output, write a sheet and the same as JSON."""
    output = None if config.output is None else Path(config.output)
    path = output and output.with_suffix(".json")
    check_outputs(config, *filter(None, (output, path)))
    embeddings = read_image_embeddings(config.embeddings)
    queries = wrap([*map(Path, config.images)])
    cosines, rows = nearest(embeddings.values, query_features(config, queries, embeddings), k=config.k + 1)
    embedded = embeddings.metadata["source"]
    folder = embedded.get("root") or embedded["spec"]
    neighbours = []
    for image, *nearest_rows in zip(config.images, rows.tolist(), cosines.tolist(), strict=True):
        images = []
        for row, cosine in zip(*nearest_rows, strict=True):
            name, index = embeddings.names[row], int(embeddings.indices[row])
            if os.path.realpath(os.path.join(folder, name)) != os.path.realpath(image):
                images.append(Neighbour(name, embeddings.labels[row], round(cosine, 6), index, row))
        neighbours.append(images[: config.k])
    names, lines = [printable(public(image)) for image in config.images], list[str]()
    for name, images in zip(names, neighbours, strict=True):
        lines.append(f"{name}:")
        lines += [f"  {near.cosine:.4f}  {near.name}  {near.label or ''}".rstrip() for near in images]
    if output and path:
        with after_figures():
            write_bytes(output, draw_neighbours(embeddings, queries, names, neighbours))
        pairs = zip(names, neighbours, strict=True)
        results = [{"image": name, "nearest": images} for name, images in pairs]
        write_results(path, {"embeddings": str(Path(config.embeddings).absolute()), "results": results})
        lines.append(f"{output}: sheet of the nearest images; {path}: the same as JSON")
    return SearchResult(images=names, nearest=neighbours, sheet=output, path=path, text="\n".join(lines))


def draw_neighbours(
    embeddings: Embeddings, queries: ImageSet, names: Sequence[str], neighbours: Sequence[Sequence[Neighbour]]
) -> bytes:
    """Draw each given image beside those nearest to it."""
    captions = [
        (near.row, f"{near.cosine:.4f}  {shorten(near.name, 22)}") for images in neighbours for near in images
    ]
    panels, sheet = iter(embedded_panels(embeddings, captions)), list[list[Panel]]()
    for query, images in enumerate(neighbours):
        given = thumbnail(queries, query, embeddings.transform.pixels), Path(names[query]).name
        sheet.append([given, *islice(panels, len(images))])
    return draw_sheet(sheet)


def query_features(config: SearchConfig, queries: ImageSet, embeddings: Embeddings) -> Tensor:
    """Compute the features of the given images exactly as those in the file were computed."""
    recorded = embeddings.metadata["weights"]
    try:
        model = load_backbone(config.weights or recorded["path"], network=recorded["network"])
    except (ValueError, OSError) as error:
        text = f"search needs the weights that computed the embeddings: {error}"
        raise ValueError(f"{text}. If they were moved, give their new path with weights=") from error
    features = embeddings.freeze(model).extract(queries, range(len(queries)), embeddings.spec)
    if features.unreadable:
        image = features.unreadable[0]
        path = printable(public(config.images[int(image.name)]))
        raise ValueError(f"an image to search for cannot be read: {path}: {image.reason}")
    check_finite(features.values, model)
    return features.values
