"""One training step as the 2021 code takes it, in its order and with its costs: what ours is compared with.

Written from the description of that code: attention spelled out, a pass for each width in a row, every pair
of views in the loss on its own, a host read for each clipped tensor, a loop over parameters for the teacher.
Parameters are named as there, and so as ours, but for the normalised prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(batch, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = Attention(width, heads), MLP(width)
        self.drop_path = drop_path

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))

    def drop(self, x: Tensor) -> Tensor:
        if self.drop_path == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_path
        kept = torch.floor(keep + torch.rand(len(x), 1, 1, dtype=x.dtype, device=x.device))
        return x / keep * kept


class PatchEmbed(nn.Module):
    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Backbone(nn.Module):
    def __init__(
        self, *, size: int, patch: int, width: int, depth: int, heads: int, drop_path: float
    ) -> None:
        super().__init__()
        self.patch, self.side = patch, size // patch
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + self.side**2, width))
        self.patch_embed = PatchEmbed(patch, width)
        rates = torch.linspace(0, drop_path, depth).tolist()
        self.blocks = nn.ModuleList(Block(width, heads, rate) for rate in rates)
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images)
        x = torch.cat((self.cls_token.expand(len(images), -1, -1), patches), dim=1)
        x = x + self.positions(images.shape[-2] // self.patch, images.shape[-1] // self.patch)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]

    def positions(self, height: int, width: int) -> Tensor:
        if height == width == self.side:
            return self.pos_embed
        square = self.pos_embed[:, 1:].reshape(1, self.side, self.side, -1).permute(0, 3, 1, 2)
        scale = ((height + 0.1) / self.side, (width + 0.1) / self.side)
        resized = F.interpolate(square, scale_factor=scale, mode="bicubic")
        return torch.cat((self.pos_embed[:, :1], resized.flatten(2).transpose(1, 2)), dim=1)


class Head(nn.Module):
    def __init__(self, *, width: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        hiddens = (nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.mlp = nn.Sequential(*hiddens, nn.Linear(hidden, bottleneck))
        self.last_layer = parametrizations.weight_norm(nn.Linear(bottleneck, prototypes, bias=False))
        self.last_layer.parametrizations["weight"].original0.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1, p=2))


class Network(nn.Module):
    def __init__(self, backbone: Backbone, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Take one tensor a view; views of one width that follow each other pass together."""
        features, start = [], 0
        for end in range(1, len(views) + 1):
            if end == len(views) or views[end].shape[-1] != views[start].shape[-1]:
                features.append(self.backbone(torch.cat(list(views[start:end]))))
                start = end
        return self.head(torch.cat(features))


class Loss(nn.Module):
    center: Tensor

    def __init__(self, *, prototypes: int, views: int, student_temp: float, momentum: float) -> None:
        super().__init__()
        self.views, self.student_temp, self.momentum = views, student_temp, momentum
        self.register_buffer("center", torch.zeros(1, prototypes))

    def forward(self, student: Tensor, teacher: Tensor, teacher_temp: float) -> Tensor:
        students = (student / self.student_temp).chunk(self.views)
        teachers = F.softmax((teacher - self.center) / teacher_temp, dim=-1).detach().chunk(2)
        total, pairs = student.new_zeros(()), 0
        for g, target in enumerate(teachers):
            for v, said in enumerate(students):
                if v != g:
                    total = total + torch.sum(-target * F.log_softmax(said, dim=-1), dim=-1).mean()
                    pairs += 1
        with torch.no_grad():
            mean = torch.sum(teacher, dim=0, keepdim=True) / len(teacher)
            self.center = self.center * self.momentum + mean * (1 - self.momentum)
        return total / pairs


def load(network: Network, state: Mapping[str, Tensor]) -> None:
    """Take over the parameters of one of our networks."""
    prototypes = {"weight_g": "original0", "weight_v": "original1"}
    names = {
        f"head.last_layer.{k}": f"head.last_layer.parametrizations.weight.{v}" for k, v in prototypes.items()
    }
    network.load_state_dict({names.get(name, name): tensor for name, tensor in state.items()})


def parameter_groups(network: nn.Module) -> list[dict[str, object]]:
    """Group parameters by whether they decay: biases and what has one axis do not."""
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    free = [p for name, p in trained if name.endswith(".bias") or p.ndim == 1]
    decayed = [p for name, p in trained if not (name.endswith(".bias") or p.ndim == 1)]
    return [{"params": decayed}, {"params": free, "weight_decay": 0.0}]


class Trainer:
    """What a step of that code touches; fp16 and its scaler on CUDA, float32 elsewhere."""

    def __init__(
        self, student: Network, teacher: Network, loss: Loss, *, clip: float, device: torch.device
    ) -> None:
        self.student, self.teacher, self.loss = (part.to(device) for part in (student, teacher, loss))
        self.teacher.requires_grad_(False)
        self.clip, self.device, self.fp16 = clip, device, device.type == "cuda"
        self.optimizer = torch.optim.AdamW(parameter_groups(student))
        self.scaler = torch.amp.GradScaler(device.type) if self.fp16 else None

    def step(
        self, views: Sequence[Tensor], *, lr: float, weight_decay: float, momentum: float, teacher_temp: float
    ) -> float:
        """Take one step on views (images, 3, h, w), of which the first two are global; return its loss."""
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = lr
            if index == 0:
                group["weight_decay"] = weight_decay
        with torch.autocast(self.device.type, torch.float16, enabled=self.fp16):
            teacher_said = self.teacher(views[:2])
            said = self.student(views)
            loss = self.loss(said, teacher_said, teacher_temp)
        value = loss.item()
        if not math.isfinite(value):
            raise FloatingPointError(f"the reference's loss is {value}")
        self.optimizer.zero_grad()
        self._update(loss)
        with torch.no_grad():
            for ours, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                theirs.data.mul_(momentum).add_((1 - momentum) * ours.detach().data)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return value

    def _update(self, loss: Tensor) -> None:
        if self.scaler is None:
            torch.autograd.backward(loss)
            self._clip()
            self.optimizer.step()
        else:
            torch.autograd.backward(self.scaler.scale(loss))
            self.scaler.unscale_(self.optimizer)
            self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _clip(self) -> None:
        for parameter in self.student.parameters():
            if parameter.grad is not None:
                factor = self.clip / (parameter.grad.norm(2).item() + 1e-6)
                if factor < 1:
                    parameter.grad.mul_(factor)
