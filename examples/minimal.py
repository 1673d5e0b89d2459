"""The whole method on a page: DINO (Caron et al., 2021) in PyTorch and einops, in minutes on a CPU.

    python examples/minimal.py train.parquet test.parquet  # columns image, label: CIFAR-10 as on the hub
    python examples/minimal.py photos/train photos/test  # or folders, with a folder for each class

The student sees all views of an image, the teacher only the two global ones. The student learns to predict
the teacher's output for one view from another; the teacher is a moving average of the student.
b images, g global views, v views (global ones first), n patches, d width, h heads, k prototypes
"""

import argparse
import copy
import io
import math
from pathlib import Path

import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from einops import rearrange
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler
from torchvision.datasets import ImageFolder
from torchvision.ops import StochasticDepth
from torchvision.transforms import v2

SIDE, PATCH, GRID, LOCALS = 32, 4, 8, 4  # of images and global views, SIDE = GRID * PATCH pixels; local views
WIDTH, DEPTH, HEADS, DROP_PATH, HIDDEN, BOTTLENECK, PROTOTYPES = 96, 4, 3, 0.1, 512, 64, 1024
STUDENT_TEMP, TEACHER_TEMP, CENTER_MOMENTUM = 0.1, 0.04, 0.9
BATCH, LR, MIN_LR, WEIGHT_DECAY, WEIGHT_DECAY_END = 64, 1e-3, 1e-6, 0.04, 0.4
EMA_MOMENTUM, WARMUP, FREEZE, CLIP = 0.98, 0.1, 0.01, 3.0  # warm-up and freeze are shares of the steps


class Block(nn.Module):  # attention and an MLP, each after a LayerNorm; left out for some images in training
    def __init__(self, drop_path: float) -> None:
        super().__init__()
        self.drop = StochasticDepth(drop_path, "row")
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 4 * WIDTH), "fc2": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:  # (b, 1 + n, d)
        q, k, v = rearrange(self.attn["qkv"](self.norm1(x)), "b n (t h d) -> t b h n d", t=3, h=HEADS)
        attended = F.scaled_dot_product_attention(q, k, v)  # softmax(q kᵀ / √d) v, (b, h, n, d)
        x = x + self.drop(self.attn["proj"](rearrange(attended, "b h n d -> b n (h d)")))
        return x + self.drop(self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))


class VisionTransformer(nn.Module):  # images whose sides are multiples of the patch in, the CLS token out
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + GRID**2, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(DROP_PATH * i / (DEPTH - 1)) for i in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def interpolate_pos_embs(self, rows: int, columns: int) -> Tensor:
        """Resample the positions to another grid, as the local views need: (1, 1 + rows·columns, d)."""
        cls, patches = self.pos_embed[:, :1], self.pos_embed[:, 1:]
        field = rearrange(patches, "1 (r c) d -> 1 d r c", r=GRID)
        field = F.interpolate(field, size=(rows, columns), mode="bicubic")
        return torch.cat([cls, rearrange(field, "1 d r c -> 1 (r c) d")], dim=1)

    def forward(self, images: Tensor) -> Tensor:  # (b, 3, height, width) -> (b, d)
        patches = self.patch_embed["proj"](images)  # (b, d, rows, columns)
        cls = self.cls_token.expand(len(images), -1, -1)
        x = torch.cat([cls, rearrange(patches, "b d r c -> b (r c) d")], dim=1)
        x = x + self.interpolate_pos_embs(*patches.shape[-2:])
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Network(nn.Module):  # a backbone, and a head that compares its output with the prototypes
    def __init__(self) -> None:
        super().__init__()
        self.backbone = VisionTransformer()
        mlp = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU()
        self.mlp = nn.Sequential(*mlp, nn.Linear(HIDDEN, BOTTLENECK))
        self.prototypes = nn.Parameter(torch.empty(PROTOTYPES, BOTTLENECK).uniform_(-1, 1) * BOTTLENECK**-0.5)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, views: list[Tensor]) -> Tensor:  # by size, (views of it · b, 3, s, s) each -> (v·b, k)
        x = torch.cat([self.backbone(of_size) for of_size in views])  # multi-crop: one pass for each size
        return F.normalize(self.mlp(x), dim=-1) @ F.normalize(self.prototypes, dim=-1).T  # cosines


def dino_loss(student: Tensor, teacher: Tensor, center: Tensor, images: int) -> Tensor:
    """Return the cross-entropy of teacher (g·b, k) and student (v·b, k) over all pairs of different views."""
    targets = rearrange(((teacher - center) / TEACHER_TEMP).softmax(-1), "(g b) k -> g b k", b=images)
    log_probs = rearrange((student / STUDENT_TEMP).log_softmax(-1), "(v b) k -> v b k", b=images)
    pairs = -torch.einsum("g b k, v b k -> g v", targets, log_probs) / images
    return (pairs.sum() - pairs.diagonal().sum()) / (pairs.numel() - len(pairs))  # none predicts itself


def cosine(step: int, total: int, start: float, end: float, warmup: int = 0) -> float:
    """Return the value of a schedule: a linear warm-up from 0 to `start`, then a cosine to `end`."""
    if step < warmup:
        return start * step / max(warmup - 1, 1)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


class DINO:  # `step` is algorithm 1 of the paper, with its schedules
    def __init__(self, student: Network, total: int) -> None:
        self.student, self.steps_taken, self.total = student, 0, total
        self.teacher = copy.deepcopy(student).requires_grad_(False).eval()
        self.center = torch.zeros(1, PROTOTYPES)
        biases = [p for p in student.parameters() if p.ndim == 1]  # and norms, which do not decay
        weights = [p for p in student.parameters() if p.ndim > 1]
        self.optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])

    def step(self, views: list[Tensor]) -> float:  # by size, the global views first
        step, total, images = self.steps_taken, self.total, len(views[0]) // len(GLOBAL_VIEWS)
        for group in self.optimizer.param_groups:
            group["lr"] = cosine(step, total, LR, MIN_LR, warmup=int(WARMUP * total))
        self.optimizer.param_groups[0]["weight_decay"] = cosine(step, total, WEIGHT_DECAY, WEIGHT_DECAY_END)
        with torch.no_grad():
            teacher = self.teacher(views[:1])
        loss = dino_loss(self.student(views), teacher, self.center, images)
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.student.parameters():
            nn.utils.clip_grad_norm_(parameter, CLIP)  # each tensor on its own
        if step < FREEZE * total:
            self.student.prototypes.grad = None  # they wait until the backbone has begun to learn
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                average.lerp_(parameter, 1 - cosine(step, total, EMA_MOMENTUM, 1.0))
            self.center.lerp_(teacher.mean(dim=0, keepdim=True), 1 - CENTER_MOMENTUM)  # after it was used
        self.steps_taken += 1
        return loss.item()

    def features(self, images: Tensor) -> Tensor:  # uint8 (b, 3, s, s) -> (b, d)
        return self.teacher.backbone(NORMALISE(images))


def view(side: int, scale: tuple[float, float], blur: float, solarise: float) -> v2.Compose:
    """Return the transform that makes one view of an image, another one each time."""
    crop = v2.RandomResizedCrop(side, scale, interpolation=v2.InterpolationMode.BICUBIC)
    jitter = v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8)
    soften = v2.RandomApply([v2.GaussianBlur(5, (0.1, 2.0))], blur)
    colour = [jitter, v2.RandomGrayscale(0.2), soften, v2.RandomSolarize(128, solarise)]
    return v2.Compose([crop, v2.RandomHorizontalFlip(), *colour, NORMALISE])


NORMALISE = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.45] * 3, [0.25] * 3)])
GLOBAL_VIEWS = [view(SIDE, (0.4, 1.0), 1.0, 0.0), view(SIDE, (0.4, 1.0), 0.1, 0.2)]
LOCAL_VIEWS = [view(SIDE // 2, (0.05, 0.4), 0.5, 0.0)] * LOCALS


def multi_crop(images: list[Tensor]) -> list[Tensor]:
    """Return the views by size, (views of it · b, 3, s, s): the first of all images, then the second, ..."""
    views = GLOBAL_VIEWS, LOCAL_VIEWS
    return [torch.stack([view(image) for view in of_size for image in images]) for of_size in views]


def read(source: Path) -> tuple[Tensor, Tensor]:
    """Return the images of a Parquet file or of class folders, uint8 (images, 3, s, s), and their labels."""
    if source.is_dir():
        rows = ImageFolder(source).samples
    else:
        table = pq.read_table(source).to_pylist()
        rows = [(io.BytesIO(row["image"]["bytes"]), row["label"]) for row in table]
    resize = v2.Compose([v2.PILToTensor(), v2.Resize((SIDE, SIDE), v2.InterpolationMode.BICUBIC)])
    images = [resize(Image.open(file).convert("RGB")) for file, _ in rows]
    return torch.stack(images), torch.tensor([label for _, label in rows])


@torch.no_grad()
def knn(features, train: Tensor, labels: Tensor, test: Tensor, truth: Tensor, k: int = 20) -> str:
    """Return the accuracy of a vote of the k nearest features, each weighted by exp(cosine / 0.07)."""
    bank, queries = (F.normalize(torch.cat([*map(features, x.split(500))])) for x in (train, test))
    nearest = [(part @ bank.T).topk(k) for part in queries.split(500)]
    cosines, rows = (torch.cat(parts) for parts in zip(*nearest, strict=True))  # (tests, k)
    votes = F.one_hot(labels)[rows] * (cosines / 0.07).exp()[..., None]  # (tests, k, classes)
    return f"k-NN {(votes.sum(1).argmax(1) == truth).float().mean():.1%}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("train", type=Path, help="Parquet file or folder to learn from")
    parser.add_argument("test", type=Path, help="the same of other images, to judge by")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = *read(options.train), *read(options.test)
    dino = DINO(Network(), options.steps)
    print(f"raw pixels: {knn(lambda x: x.flatten(1).float(), *data)}; untrained: {knn(dino.features, *data)}")
    order = RandomSampler(data[0], num_samples=options.steps * BATCH)  # epoch after epoch
    for views in DataLoader(data[0], BATCH, sampler=order, collate_fn=multi_crop, num_workers=1):
        loss = dino.step(views)
        if dino.steps_taken % max(1, options.steps // 10) == 0:
            print(f"step {dino.steps_taken}: loss {loss:.3f}, {knn(dino.features, *data)}", flush=True)
    torch.save(dino.teacher.backbone.state_dict(), "minimal.pth")  # dino_vit.load_backbone reads it
