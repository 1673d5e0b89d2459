"""Runs in this process, and what became of their tensors."""

import os
import signal
from types import MappingProxyType

import torch
from accelerate import Accelerator

from dino_vit.config.loading import load
from dino_vit.config.pretrain import PretrainConfig
from dino_vit.core.process import Interruption
from dino_vit.training.loop import train
from dino_vit.training.pretrain import set_up
from dino_vit.training.reporter import Reporter
from tests.support.runs import TINY, assert_same_end, steps


def configured(output, settings, defaults=TINY):
    merged = {**defaults, "output": output, **settings}
    return load(PretrainConfig, None, [f"{key}={value}" for key, value in merged.items()])


def opened(output, settings, defaults=TINY):
    return set_up(configured(output, settings, defaults), Accelerator())


def trained(output, settings=MappingProxyType({}), defaults=TINY):
    """Train in this process and return the state."""
    state = opened(output, settings, defaults)
    with Interruption() as interruption, Reporter(state) as reporter:
        assert train(state, reporter, interruption)
    return state


def interrupted(output, settings, step):
    """Train in this process until a signal comes at a step that is logged."""
    state = opened(output, settings)
    with Interruption() as interruption:

        def stop(metrics):
            if metrics.step == step:
                os.kill(os.getpid(), signal.SIGTERM)

        with Reporter(state, on_metrics=stop) as reporter:
            assert not train(state, reporter, interruption)


def assert_resumes_exactly(folder, settings, step=7):
    """Check that a run, by default of 10 steps, that was interrupted ends as one that was not."""
    settings = {"budget.steps": 10, **settings}
    trained(folder / "whole", settings)
    interrupted(folder / "run", settings, step)
    assert steps(folder / "run")[-1] in (step, step + 1)
    trained(folder / "run", settings)
    assert_same_end(folder / "run", folder / "whole", settings["budget.steps"])


def tensors_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def without_key_biases(tensors):
    """Return tensors without the biases of keys: no softmax sees them, so rounding alone moves them."""
    kept = dict(tensors)
    for name in [name for name in kept if name.endswith("qkv.bias")]:
        query, _, value = kept.pop(name).chunk(3)
        kept |= {f"{name}.query": query, f"{name}.value": value}
    return kept


def moved(before, after):
    """Return the names of the tensors that changed."""
    return {name for name in before if not torch.equal(before[name], after[name])}
