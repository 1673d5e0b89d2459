"""The settings of the commands, but for `pretrain` (`pretrain.py`).

They import no torch. The results of a command do not depend on its resumable settings.
"""

import os
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dino_vit.config.sections import BASELINES, PositiveShare, ResizeMode, Sources, Tokens, WeightsFormat
from dino_vit.config.settings import (
    Count,
    Dimension,
    Few,
    NonEmpty,
    NonNegative,
    Seed,
    Settings,
    Side,
    setting,
)
from dino_vit.core.text import brief

Network = Literal["teacher", "student"]
Whiten = Annotated[float, Field(ge=0, le=1)]
Precision = Literal["auto", "no", "bf16", "fp16"]
Pooled = Literal["cls", "mean", "cells", "cls+mean", "cls+cells"]
Block = Annotated[int, Field(ge=-1000, le=1000)]
MIN_IMAGES, MAX_IMAGES = 4, 6000  # on the map of a report
MapImages = Annotated[int, Field(ge=MIN_IMAGES, le=MAX_IMAGES)]
JsonFile = Annotated[str, Field(pattern=r"\.json$", examples=["FILE.json"])]
PngFile = Annotated[str, Field(pattern=r"\.png$", examples=["FILE.png"])]
TableFile = Annotated[str, Field(pattern=r"\.(csv|parquet)$", examples=["FILE.csv"])]
ParquetFile = Annotated[str, Field(pattern=r"\.parquet$", examples=["FILE.parquet"])]
SafetensorsFile = Annotated[str, Field(pattern=r"\.safetensors$", examples=["FILE.safetensors"])]
HtmlFile = Annotated[str, Field(pattern=r"\.html$", examples=["FILE.html"])]
UNTRAINED = "untrained"  # among the weights of `compare`
IN_PYTHON = "in Python none"
SEVERAL: bool = setting(False, "a cell of the file of labels has several labels of an image, as in sea;sky")
OVERWRITE: bool = setting(False, "replace files that exist", resumable=True)
RESULTS: str | None = setting(None, f"JSON file; null: in eval/ of the run, {IN_PYTHON}", resumable=True)


WHITEN: Whiten = setting(0.0, "0: features as they are; 0.5: levelled by their covariance; 1: whitened")
TOKENS = "CLS token, mean of the patches, that of 3 × 3 cells, or CLS with them"


def side_by_side(weights: str) -> list[str]:
    """Return the weights that are read side by side, as in runs/a+edges; a path may have a + in it."""
    return [weights] if os.path.exists(weights) else weights.split("+")


class BackboneConfig(Settings):
    """Send images through a frozen backbone."""

    positional: ClassVar[tuple[str, ...]] = ("source", "weights")
    source: str = Field(description="the images: a folder, a list, archives, Parquet, ... or `synthetic`")
    weights: str = Field(description="run folder, weights file, hf:OWNER/NAME, timm:NAME, or edges")
    network: Network = setting("teacher", "network of a checkpoint")
    size: Side | None = setting(None, "side in pixels, or [height, width]; null: that of the weights")
    resize_mode: ResizeMode | None = setting(
        None, "crop: resize, then centre-crop; whole: resize; null: by the weights"
    )
    batch_size: Dimension = setting(128, "images per process and forward pass", resumable=True)
    num_workers: Few | None = setting(None, "threads that read images; null: by the cores", resumable=True)
    precision: Precision = setting("auto", "auto: bf16 where it is native")
    overwrite: bool = OVERWRITE


class CachedConfig(BackboneConfig):
    """Evaluate a frozen backbone on the features of images, which are computed once and cached."""

    weights: str = Field(
        description="run folder, weights file, hf:OWNER/NAME, timm:NAME, edges; several: runs/a+edges"
    )
    cache: str | None = setting(None, "folder of features; null: features/ in DINO_VIT_CACHE", resumable=True)
    cache_gb: NonNegative = setting(50.0, "largest size of cached features and indexes", resumable=True)


class LabelledConfig(Settings):
    """Labelled images to evaluate on, and to learn from."""

    source: str = Field(description="labelled images to evaluate on: folder, list, archives, ...")
    labels: str | None = setting(None, "CSV, JSON or Parquet of source's labels, or none; null: its own")
    train: str | None = setting(None, "images to train on; null: split train, or all of source but a fifth")
    train_labels: str | None = setting(None, "CSV, JSON or Parquet of train's labels, or none; null: its own")
    several: bool = SEVERAL

    def contradictions(self) -> Iterator[str]:
        """Yield a setting that would have no effect."""
        if self.train_labels and not self.train:
            yield "train_labels are those of train, which is not given"


class SupervisedConfig(LabelledConfig):
    """The same, with a classifier that is trained."""

    seed: Seed = setting(0, "seed of every random number")


class KnnConfig(LabelledConfig, CachedConfig):
    """Measure how good features are: classify labelled images by their nearest neighbours."""

    examples: ClassVar = ("knn photos runs/demo", "knn photos/val runs/demo train=photos/train")
    writes: ClassVar = "eval/knn"
    train: str | None = setting(None, "images of the bank; null: split train, or for each image the others")
    k: NonEmpty[Count] = setting((20, 10, 100, 200), "numbers of neighbours; the first is reported in detail")
    tokens: Pooled = setting("cls", TOKENS)
    blocks: Few = setting(1, "last blocks whose tokens are joined")
    whiten: Whiten = WHITEN
    output: JsonFile | None = RESULTS


class LinearConfig(SupervisedConfig, CachedConfig):
    """Measure how good features are: train linear classifiers on them, with the network frozen."""

    examples: ClassVar = ("linear photos runs/pretrain",)
    writes: ClassVar = "eval/linear"
    output: JsonFile | None = RESULTS


class PredictConfig(CachedConfig):
    """Label all images by a few that have labels, with a confidence for each."""

    examples: ClassVar = (
        "predict photos runs/pretrain labels=few.csv",
        "predict new runs/pretrain train=labelled classifier=classifier.safetensors output=new.csv",
        "predict newer classifier.safetensors output=newer.csv",
    )
    writes: ClassVar = "predictions.csv"
    source: str = Field(description="images to label: those without a label, or all if train is given")
    weights: str = Field(
        description="run folder, weights file, edges, runs/a+edges, or what classifier= wrote"
    )
    train: str | None = setting(None, "images that have labels; null: those of source")
    labels: str | None = setting(None, "CSV, JSON or Parquet with the labels, or none; null: the images' own")
    several: bool = SEVERAL
    output: TableFile | None = setting(
        None, f"CSV or Parquet, with JSON beside it; null: predictions.csv, {IN_PYTHON}"
    )
    confident: PositiveShare | None = setting(
        None, "also write the table without guesses below this confidence, beside it; null: no"
    )
    tokens: Pooled | None = setting(None, "tokens as of knn; null: what cross-validation takes")
    blocks: Few = setting(1, "last blocks whose tokens are joined")
    whiten: Whiten = WHITEN
    classifier: SafetensorsFile | None = setting(None, "file to keep the classifier and its backbone in")

    def contradictions(self) -> Iterator[str]:
        """Yield a setting that would have no effect."""
        if self.classifier == self.weights:
            yield "classifier would overwrite weights; give another name"
        if self.classifier and len(side_by_side(self.weights)) > 1:
            yield "classifier keeps one backbone in a file; give weights without others beside them"


class LabelConfig(CachedConfig):
    """Write a page to label images by: typical ones first, then guesses to check."""

    examples: ClassVar = (
        "label photos runs/pretrain",
        "label photos runs/pretrain labels=few.csv guesses=predictions.csv output=check.html",
    )
    labels: str | None = setting(None, "CSV, JSON or Parquet with the labels so far; null: none")
    guesses: str | None = setting(None, "table that predict wrote, to be checked; null: none")
    output: HtmlFile = setting("label.html", "page to write")
    images: MapImages = setting(2000, "images on the page; with more, their pictures are smaller")
    seed: Seed = setting(0, "seed of which images are shown")


class CompareConfig(SupervisedConfig, CachedConfig):
    """Compare the weights of several trainings on the same images, and say which to take."""

    examples: ClassVar = (
        "compare photos runs/a runs/b",
        "compare photos runs/a edges pixels untrained output=baselines.json",
    )
    # Several, where the other commands take one.
    weights: NonEmpty[str] = Field(  # type: ignore[assignment]
        description="run folders, weights files, edges, pixels, untrained (the network of the first)"
    )
    output: JsonFile | None = setting(None, f"JSON file; null: comparison.json, {IN_PYTHON}")
    writes: ClassVar = "comparison.json"

    def contradictions(self) -> Iterator[str]:
        """Yield weights that leave nothing to compare."""
        yield from super().contradictions()
        if len(set(self.weights)) < len(self.weights):
            yield "weights are given twice; give each once"
        if len(self.weights) < 2:
            yield f"give two weights or more, such as {brief(self.weights[0])} edges pixels untrained"
        if UNTRAINED in self.weights and not self.trained:
            yield "untrained has the network of other weights: give these too"

    @property
    def trained(self) -> list[str]:
        """The weights that name a network."""
        parts = [part for weights in self.weights for part in side_by_side(weights)]
        return [weights for weights in parts if weights not in (UNTRAINED, *BASELINES)]


class AttentionConfig(Settings):
    """Draw what a network attends to in images."""

    examples: ClassVar = ("attention photos runs/pretrain output=maps",)
    positional: ClassVar = ("source", "weights")
    source: str = Field(description="image, folder, glob or any other source of images")
    weights: str = Field(description="run folder, weights file, hf:OWNER/NAME or timm:NAME")
    output: str | None = setting(None, f"folder for pictures and maps; null: attention, {IN_PYTHON}")
    writes: ClassVar = "attention"
    overwrite: bool = OVERWRITE
    network: Network = setting("teacher", "network of a checkpoint")
    count: Count | None = setting(12, "number of images, from all over the source; null: all")
    size: Dimension | None = setting(None, "pixels of the shorter side; null: at most twice the weights'")
    longest: Dimension | None = setting(1024, "shrink images whose longer side has more pixels; null: never")
    block: Block = setting(-1, "block whose attention is drawn; negative numbers count from the last")


class EmbedConfig(CachedConfig):
    """Write a feature vector for each image to a Parquet file."""

    writes: ClassVar = "embeddings.parquet"
    examples: ClassVar = ("embed photos runs/pretrain output=photos.parquet",)
    labels: str | None = setting(None, "CSV, JSON or Parquet of the images' labels, or none; null: its own")
    several: bool = SEVERAL
    output: ParquetFile | None = setting(None, f"file to write; null: embeddings.parquet, {IN_PYTHON}")
    tokens: Tokens = setting("cls", f"{TOKENS}; the patches, or all tokens")
    blocks: Few = setting(1, "last blocks whose tokens are joined")
    whiten: Whiten = WHITEN
    precision: Precision = setting("no", "no: float32; auto: bf16 where it is native")

    def contradictions(self) -> Iterator[str]:
        """Yield what has no covariance."""
        if self.whiten and self.tokens in ("patches", "all"):
            yield f"whiten={self.whiten:g} is of one vector an image, not of tokens={self.tokens}"


class DemoConfig(Settings):
    """Try it: train a small network on generated images in minutes, and show what it learned."""

    examples: ClassVar = ("demo --quick", "demo")
    resumes: ClassVar = True
    output: str = setting("runs/demo", "folder of the run; a second call resumes it")
    seed: Seed = setting(0, "seed of every random number")
    quick: bool = setting(False, "a shorter run: about 90 seconds of one core")
    steps: Count | None = setting(None, "optimiser steps; null: about two minutes of two cores")


class InspectConfig(Settings):
    """Check images before training: how many, which sizes, which cannot be read."""

    examples: ClassVar = ("inspect-data photos sheet=views.png",)
    positional: ClassVar = ("source",)
    source: Sources = Field(description="folder, image, list, archives, tables, hf:OWNER/NAME, arrays")
    labels: str | None = setting(None, "file of labels by name, .csv or .json, or none; null: its own")
    several: bool = SEVERAL
    count: Count | None = setting(2000, "images to inspect, evenly spread over the source; null: all")
    max_pixels: Count = setting(200_000_000, "a larger image is not decoded")
    sheet: PngFile | None = setting(None, "PNG to write of the views that training would use; null: none")
    overwrite: bool = OVERWRITE
    pretrain: str | None = setting(None, "config file of the training to show views of; null: recipe=auto")
    as_json: bool = setting(False, "print JSON, with every unreadable image")


class PackConfig(Settings):
    """Pack many image files into a few tar files (shards), which are read faster."""

    examples: ClassVar = ("pack photos photos-packed", "pack shards index_only=true")
    positional: ClassVar = ("source", "output")
    source: str = Field(description="folder, list, archives, tables: see `dino-vit inspect-data --help`")
    output: str | None = setting(None, "folder to write; it must not exist or be empty")
    labels: str | None = setting(None, "file of labels by name, .csv or .json, or none; null: its own")
    several: bool = SEVERAL
    index_only: bool = setting(False, "write only a catalogue of tar or zip archives, beside them")
    shard_size: Count = setting(512, "approximate size of a shard in MiB")
    size: Count | None = setting(None, "reduce larger images to this shorter side in pixels; null: none")


class ReportConfig(Settings):
    """Write an HTML page about a training run: curves, a map of the images, attention."""

    examples: ClassVar = ("report runs/pretrain",)
    positional: ClassVar = ("run",)

    run: str = Field(description="folder of the run")
    output: HtmlFile | None = setting(None, "file to write; null: report.html in the folder of the run")
    overwrite: bool = OVERWRITE
    source: Sources | None = setting(None, "where the images are now; null: where the run read them")
    labels: str | None = setting(None, "file of labels for the map, or none; null: as in the run")
    images: MapImages = setting(500, "images on the map; with more, their pictures are smaller")


class WeightsConfig(Settings):
    """A backbone as another library or a run has written it."""

    positional: ClassVar[tuple[str, ...]] = ("source",)
    source: str = Field(description="weights file (.pth, .pt, .safetensors), run folder or hub folder")
    network: Network = setting("teacher", "network of a training checkpoint")
    source_format: WeightsFormat | None = setting(None, "format, where files look alike; null: detected")
    heads: Few | None = setting(None, "attention heads, for a width that does not imply them")
    image_size: Side | None = setting(None, "resample the positions to this size; null: as stored")


class InspectWeightsConfig(WeightsConfig):
    """Show what a file or folder of weights holds: format, architecture, normalisation, step."""

    examples: ClassVar = ("inspect-weights runs/pretrain",)
    as_json: bool = setting(False, "print JSON")


class ExportConfig(WeightsConfig):
    """Write weights for another library (timm, Hugging Face, ONNX), and check that the features agree."""

    positional: ClassVar = ("source", "out")
    examples: ClassVar = ("export runs/pretrain vits16.pth --format timm",)
    out: str = Field(
        description="file to write (.pth, .pt, .safetensors, .onnx), or folder for huggingface and timm"
    )
    format: Literal["reference", "timm", "huggingface", "onnx"] = Field(description="format to write")
    classifier: bool = setting(False, "onnx: probabilities, by the classifier in a file that predict wrote")
    overwrite: bool = OVERWRITE

    def contradictions(self) -> Iterator[str]:
        """Yield settings that would have no effect."""
        if self.classifier and self.format != "onnx":
            yield f"classifier is for format=onnx, not {self.format}"
