"""Runs in this process, and what became of their tensors."""

from types import MappingProxyType

import torch
from accelerate import Accelerator

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.signals import Interruption
from dino_vit.training.loop import train
from dino_vit.training.reporter import Reporter
from dino_vit.training.setup import set_up
from tests.support.runs import TINY


def configured(output, settings, defaults=TINY):
    merged = {**defaults, "output": output, **settings}
    return load(PretrainConfig, None, [f"{key}={value}" for key, value in merged.items()])


def opened(output, settings):
    return set_up(configured(output, settings), Accelerator())


def trained(output, settings=MappingProxyType({})):
    """Train in this process and return the state."""
    found = opened(output, settings)
    with Interruption() as interruption, Reporter(found) as reporter:
        assert train(found.state, reporter, interruption)
    return found.state


def tensors_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def moved(before, after):
    """Return the names of the tensors that changed."""
    return {name for name in before if not torch.equal(before[name], after[name])}
