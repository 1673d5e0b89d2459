"""The input path on one thread: 2 × 224 and 8 × 96 pixel views of 500 × 375 JPEGs.

Decode, cut and photometry as training runs them beside the published pipeline (PIL images through
torchvision's transforms, one view after the other) and the same pipeline in its transforms v2, whose images
are tensors of bytes: one process, interleaved repeats. `python -m benchmarks.input`
"""

import io
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from benchmarks.measure import Table, arguments, compare, report
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.data.images.decode import decode
from dino_vit.data.stores.calls import wrap
from dino_vit.views.build import build_augment, build_views
from dino_vit.views.geometry import choose_boxes, draw_box_numbers
from dino_vit.views.loader import Batch, Loader
from dino_vit.views.sampler import Sampler

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Photos:
    """Smooth noise of many scales under fine grain: JPEGs of about the size and cost of photographs."""

    fingerprint = "photos"

    def __init__(self, count: int, side: int = 500) -> None:
        self.files = [self._jpeg(torch.Generator().manual_seed(seed), side) for seed in range(count)]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> bytes:
        return self.files[index]

    def label(self, index: int) -> None:
        return None

    def name(self, index: int) -> str:
        return str(index)

    @staticmethod
    def _jpeg(generator: torch.Generator, side: int) -> bytes:
        levels = 6 * torch.randn(1, 3, 375, 500, generator=generator)
        for cells in (3, 6, 12, 25, 50):
            noise = torch.randn(1, 3, cells, math.ceil(cells * 4 / 3), generator=generator)
            levels += 60 / math.sqrt(cells) * F.interpolate(noise, size=(375, 500), mode="bicubic")
        pixels = (levels[0] + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy()
        buffer = io.BytesIO()
        image = Image.fromarray(pixels).resize((side, side * 3 // 4))
        image.save(buffer, "JPEG", quality=90)
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


def published_views(config: PretrainConfig) -> Callable[[Image.Image], list[Tensor]]:
    """Return the published pipeline as a function from an image to its views."""

    def view(size: int, scale: tuple[float, float], *rest: object) -> Callable[[Image.Image], Tensor]:
        bicubic = transforms.InterpolationMode.BICUBIC
        crop = transforms.RandomResizedCrop(size, scale=scale, interpolation=bicubic)
        jitter = transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
        colour = [transforms.RandomHorizontalFlip(0.5), jitter, transforms.RandomGrayscale(0.2)]
        last = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        composed: Callable[[Image.Image], Tensor] = transforms.Compose([crop, *colour, *rest, *last])
        return composed

    views = config.views
    side = views.global_shape[0]
    first = view(side, views.global_scale, Blur(1.0))
    second = view(side, views.global_scale, Blur(0.1), Solarise(0.2))
    local = view(views.local_shape[0], views.local_scale, Blur(0.5))
    return lambda image: [make(image) for make in (first, second, *[local] * views.local_count)]


def tensor_views(config: PretrainConfig) -> Callable[[Tensor], list[Tensor]]:
    """Return the published pipeline in torchvision's transforms v2, for bytes (3, height, width)."""

    def view(size: int, scale: tuple[float, float], blur: float, solarise: float = 0) -> v2.Transform:
        bicubic = v2.InterpolationMode.BICUBIC
        return v2.Compose(
            [
                v2.RandomResizedCrop(size, scale=scale, interpolation=bicubic, antialias=True),
                v2.RandomHorizontalFlip(0.5),
                v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8),
                v2.RandomGrayscale(0.2),
                v2.RandomApply([v2.GaussianBlur(9, (0.1, 2.0))], p=blur),  # 9: as DINOv2's code has it
                v2.RandomSolarize(128, p=solarise),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )

    views = config.views
    side = views.global_shape[0]
    first = view(side, views.global_scale, 1.0)
    second = view(side, views.global_scale, 0.1, 0.2)
    local = view(views.local_shape[0], views.local_scale, 0.5)
    return lambda image: [make(image) for make in (first, second, *[local] * views.local_count)]


def run(*, repeats: int, threads: int, images: int = 16) -> list[Table]:
    """Measure everything on one thread, as a loader's worker has one; `threads` changes nothing."""
    del threads
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_table(repeats, images), _growth(repeats, images)]
    finally:
        torch.set_num_threads(before)


def _table(repeats: int, images: int) -> Table:
    photos, views = Photos(images), build_views(PretrainConfig())
    sampler = Sampler(length=images, global_batch=images, seed=0)
    batches = Loader(source=wrap(photos), views=views, sampler=sampler).batches()
    augment = build_augment(PretrainConfig())
    published, in_tensors = published_views(PretrainConfig()), tensor_views(PretrainConfig())

    def worker() -> Batch:
        return next(batches)

    def everything() -> list[Tensor]:
        return _augmented(worker(), augment)

    def pil() -> list[list[Tensor]]:
        return [published(Image.open(io.BytesIO(data)).convert("RGB")) for data in photos.files]

    def tensors() -> list[list[Tensor]]:
        files = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in photos.files]
        return [in_tensors(decode_image(file, ImageReadMode.RGB)) for file in files]

    box_draws = draw_box_numbers(views, seed=0, epoch=0, samples=np.arange(images))
    boxes = [choose_boxes(views, of_image, height=375, width=500).tolist() for of_image in box_draws]

    def decode_and_cut() -> list[Tensor]:
        """Do what cannot be left out, with torchvision and torch alone and boxes known before."""
        cut = []
        for data, own in zip(photos.files, boxes, strict=True):
            image = decode(data, "")[None]
            for (top, left, h, w), view in zip(own, views, strict=True):
                part = image[:, :, top : top + h, left : left + w]
                cut.append(F.interpolate(part, size=view.size, mode="bicubic", antialias=True))
        return cut

    rows = [
        compare(
            f"{name} (beside: {beside})", {"dino-vit": ours, "other": other}, items=images, repeats=repeats
        )
        for name, ours, beside, other in (
            ("everything", everything, "published, PIL", pil),
            ("everything", everything, "published, transforms v2", tensors),
            ("a worker's share", worker, "published, PIL", pil),
            ("a worker's share", worker, "decode and cut alone", decode_and_cut),
        )
    ]
    size = sum(len(data) for data in photos.files) / images / 1024
    note = (
        f"{images} JPEGs of 500 × 375 pixels and {size:.0f} KiB; 2 views of 224 and 8 of 96 pixels from each."
    )
    return Table("Input, CPU, one thread", "images a second", rows, note)


def _growth(repeats: int, images: int) -> Table:
    """Measure what each further local view costs, beside a decoding of its own for every view."""
    photos, config = Photos(images), PretrainConfig()
    augment, rows = build_augment(config), []
    for count in (2, 4, 8, 16):
        views = build_views(config)[-1:] * count
        sampler = Sampler(length=images, global_batch=images, seed=0)
        together = Loader(source=wrap(photos), views=views, sampler=sampler).batches()
        apart = [
            Loader(source=wrap(photos), views=views[:1], sampler=sampler).batches() for _ in range(count)
        ]
        work: dict[str, Callable[[], object]] = {
            "decoded once": partial(_all_next, [together], augment),
            "decoded for each view": partial(_all_next, apart, augment),
        }
        rows.append(compare(f"{count} views of 96 pixels", work, items=images * count, repeats=repeats))
    return Table("Views of an image, CPU, one thread", "views a second", rows)


def _all_next(loaders: Sequence[Iterator[Batch]], augment: nn.Module) -> list[list[Tensor]]:
    return [_augmented(next(loader), augment) for loader in loaders]


def _augmented(batch: Batch, augment: nn.Module) -> list[Tensor]:
    return [augment(views, batch.augment[size]) for size, views in batch.views.items()]


def main() -> None:
    parser = arguments(__doc__ or "")
    options = parser.parse_args()
    report(run(repeats=options.repeats, threads=options.threads), options)


if __name__ == "__main__":
    main()
