"""The settings of `embed`, and of the commands that read what it wrote."""

from typing import Annotated, ClassVar

from pydantic import Field

from dino_vit.config.commands import IN_PYTHON, OVERWRITE, CachedConfig, JsonFile, PngFile, Precision
from dino_vit.config.sections import Tokens
from dino_vit.config.settings import Count, Dimension, Few, NonEmpty, Settings, setting

Cosine = Annotated[float, Field(gt=-1, le=1)]
ParquetFile = Annotated[str, Field(pattern=r"\.parquet$", examples=["FILE.parquet"])]


class EmbedConfig(CachedConfig):
    """Write the embeddings of images to a file."""

    writes: ClassVar = "embeddings.parquet"
    examples: ClassVar = ("embed photos runs/pretrain output=photos.parquet",)
    labels: str | None = setting(None, "CSV or JSON file of the images' labels; null: the source's own")
    output: ParquetFile | None = setting(None, f"file to write; null: embeddings.parquet, {IN_PYTHON}")
    tokens: Tokens = setting("cls", "CLS token, mean of the patches, both, the patches, or all tokens")
    blocks: Few = setting(1, "last blocks whose tokens are joined")
    precision: Precision = setting("no", "no: float32; auto: bf16 where it is native")


class SearchConfig(Settings):
    """Find the images nearest to given ones among those that were embedded."""

    writes: ClassVar = "search.png"
    positional: ClassVar = ("embeddings", "images")
    examples: ClassVar = ("search photos.parquet cat.jpg dog.jpg output=found.png",)
    embeddings: str = Field(description="file that `dino-vit embed` wrote")
    images: NonEmpty[str] = Field(description="image files to find similar images to")
    weights: str | None = setting(None, "run folder, weights file or name; null: those of the embeddings")
    k: Dimension = setting(8, "nearest images to show")
    overwrite: bool = OVERWRITE
    output: PngFile | None = setting(None, f"picture, with JSON beside it; null: search.png, {IN_PYTHON}")


class DuplicatesConfig(Settings):
    """List images that are nearly the same, those with two labels or in two splits first."""

    examples: ClassVar = ("duplicates photos.parquet output=duplicates.json",)
    positional: ClassVar = ("embeddings",)
    embeddings: str = Field(description="file that `dino-vit embed` wrote")
    threshold: Cosine | None = setting(None, "minimum cosine of a pair; null: chosen by the features")
    pairs: Count = setting(10_000, "closest pairs to list; groups are formed by all pairs")
    output: JsonFile | None = setting(
        None, f"JSON, with sheets beside it; null: duplicates.json, {IN_PYTHON}"
    )
    overwrite: bool = OVERWRITE
    writes: ClassVar = "duplicates.json"
