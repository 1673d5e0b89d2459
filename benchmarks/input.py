"""The input path on one thread: 2 × 224 and 8 × 96 pixel views of 500 × 375 JPEGs.

The published pipeline (PIL images through torchvision's transforms, one view after the other) beside decode,
cut and photometry as training runs them: one process, interleaved repeats. `python -m benchmarks.input`
"""

import io
import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torch.nn import functional as F
from torchvision import transforms

from dino_vit.augment import Augment
from dino_vit.data.decode import decode
from dino_vit.data.loader import Batch, Loader
from dino_vit.data.sampler import Sampler
from dino_vit.views import dino_views

T = TypeVar("T")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photos:
    """Smooth noise of many scales under fine grain: JPEGs of about the size and cost of photographs."""

    fingerprint = "photos"

    def __init__(self, count: int) -> None:
        self.files = [self._jpeg(torch.Generator().manual_seed(seed)) for seed in range(count)]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        return self.files[index]

    def label(self, index: int) -> None:
        return None

    def name(self, index: int) -> str:
        return str(index)

    @staticmethod
    def _jpeg(generator: torch.Generator) -> bytes:
        image = 6 * torch.randn(1, 3, 375, 500, generator=generator)
        for cells in (3, 6, 12, 25, 50):
            noise = torch.randn(1, 3, cells, math.ceil(cells * 4 / 3), generator=generator)
            image += 60 / math.sqrt(cells) * F.interpolate(noise, size=(375, 500), mode="bicubic")
        pixels = (image[0] + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy()
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
        return buffer.getvalue()


class Blur:
    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, image: Image.Image) -> Image.Image:
        if random.random() >= self.probability:
            return image
        return image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0)))


class Solarise:
    def __init__(self, probability: float) -> None:
        self.probability = probability

    def __call__(self, image: Image.Image) -> Image.Image:
        return ImageOps.solarize(image) if random.random() < self.probability else image


def reference() -> Callable[[bytes], list[Tensor]]:
    """Return the published pipeline as a function from a file to its ten views."""

    def view(size: int, scale: tuple[float, float], *rest: object) -> Callable[[Image.Image], Tensor]:
        bicubic = transforms.InterpolationMode.BICUBIC
        crop = transforms.RandomResizedCrop(size, scale=scale, interpolation=bicubic)
        jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
        colour = [transforms.RandomHorizontalFlip(0.5), jitter, transforms.RandomGrayscale(0.2)]
        last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        composed: Callable[[Image.Image], Tensor] = transforms.Compose([crop, *colour, *rest, *last])
        return composed

    first = view(224, (0.4, 1.0), Blur(1.0))
    second = view(224, (0.4, 1.0), Blur(0.1), Solarise(0.2))
    local = view(96, (0.05, 0.4), Blur(0.5))

    def views(data: bytes) -> list[Tensor]:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return [make(image) for make in (first, second, *[local] * 8)]

    return views


def main(images: int = 16, repeats: int = 9) -> None:
    torch.set_num_threads(1)
    photos = Photos(images)
    pipeline = reference()
    loader = Loader(
        source=photos, views=dino_views(), sampler=Sampler(length=images, batch_size=images, seed=0)
    )
    batches = loader.batches()
    augment = Augment(mean=MEAN, std=STD)

    def photometry(batch: Batch) -> list[Tensor]:
        return [augment(views, batch.photometry[size]) for size, views in batch.views.items()]

    seconds: dict[str, list[float]] = {}

    def clock(name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        seconds.setdefault(name, []).append((time.perf_counter() - start) / images)
        return result

    for _ in range(repeats + 1):
        clock("reference", lambda: [pipeline(data) for data in photos.files])
        clock("decode", lambda: [decode(data, "") for data in photos.files])
        batch = clock("worker", lambda: next(batches))
        clock("photometry", partial(photometry, batch))

    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    rows = {
        "reference: everything, PIL": medians["reference"],
        "decode alone": medians["decode"],
        "worker: read, decode, draw, cut, collate": medians["worker"],
        "photometry on the CPU": medians["photometry"],
        "worker and photometry": medians["worker"] + medians["photometry"],
    }
    size = np.mean([len(data) for data in photos.files]) / 1024
    print(f"{images} JPEGs of {size:.0f} KiB, torch {torch.__version__}, 1 thread, median of {repeats}")
    print(f"{'':42}{'ms/image':>9}{'images/s':>10}{'x reference':>13}")
    for name, value in rows.items():
        print(f"{name:42}{1000 * value:9.2f}{1 / value:10.0f}{medians['reference'] / value:13.1f}")


if __name__ == "__main__":
    main()
