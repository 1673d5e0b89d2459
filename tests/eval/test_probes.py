import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dino_vit.eval import probes
from dino_vit.eval.probes import (
    count_correct,
    head_losses,
    initial_weight,
    top_classes,
    train_heads,
)
from dino_vit.views.sampler import Sampler

CPU = torch.device("cpu")
COLUMNS = (slice(8, 16), slice(0, 24), slice(8, 24))
RATES = (0.024, 2.4, 24.0)  # at a batch of 256


def labelled(count, seed, classes=5, width=24):
    """Features whose classes overlap, so that the accuracy of a good probe is far from 0 and 100 %."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (count,), generator=generator)
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(7))
    return 0.5 * centers[targets] + torch.randn(count, width, generator=generator), targets


def trained(features, targets, **changes):
    setting = {"columns": COLUMNS, "rates": RATES, "classes": 5, "steps": 60, "batch_size": 32, "seed": 3}
    return train_heads(features, targets, **{**setting, **changes}, device=CPU)


def single_probe(features, targets, columns, rate, *, steps=60, batch_size=32):
    """One cell by torch's own layer, loss, optimiser and schedule, from the same start in the same order."""
    (start,) = trained(features, targets, columns=[columns], rates=[0.0], steps=1)
    probe = nn.Linear(start.weight.shape[-1], 5)
    with torch.no_grad():
        probe.weight.copy_(start.weight[0])
        probe.bias.zero_()
    optimizer = torch.optim.SGD(probe.parameters(), lr=rate * batch_size / 256, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    plans = Sampler(length=len(features), global_batch=batch_size, seed=3).batch_specs()
    for _, plan in zip(range(steps), plans, strict=False):
        loss = nn.functional.cross_entropy(
            probe(features[plan.samples][:, columns]), targets[plan.samples], reduction="mean"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return probe


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_the_loss_of_each_head_is_that_of_its_scores(task, monkeypatch):
    monkeypatch.setattr(probes, "_MAX_SCORES", 40)  # a few images at a time
    features, targets = labelled(23, seed=1)
    if task != "multiclass":
        targets = F.one_hot(targets, 5).float()
    (heads,) = trained(*labelled(40, seed=2), columns=[slice(0, 24)], steps=5)
    naive = {"multiclass": F.cross_entropy, "multilabel": F.binary_cross_entropy_with_logits}[task]
    expected = [naive(features @ w.T + b, targets) for w, b in zip(heads.weight, heads.bias, strict=True)]
    found = head_losses(heads, features, targets, task)
    torch.testing.assert_close(found.float(), torch.stack(expected), rtol=1e-5, atol=0)


def test_every_cell_of_the_grid_is_the_single_probe_with_that_setting():
    features, targets = labelled(400, seed=0)
    images, truth = labelled(2000, seed=1)
    percents = []
    for heads in trained(features, targets):
        right = count_correct(heads, images, truth)
        for cell, rate in enumerate(RATES):
            probe = single_probe(features, targets, heads.columns, rate)
            torch.testing.assert_close(heads.weight[cell], probe.weight.data, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(heads.bias[cell], probe.bias.data, atol=1e-4, rtol=1e-4)
            alone = (probe(images[:, heads.columns]).argmax(1) == truth).sum()
            percents.append(100 * float(right[cell]) / len(truth))
            assert percents[-1] == pytest.approx(100 * float(alone) / len(truth), abs=0.2)
    assert max(percents) - min(percents) > 5, "the cells differ, or this would show nothing"


def test_classifying_in_blocks_equals_classifying_at_once(monkeypatch):
    features, targets = labelled(50, seed=0)
    heads = trained(features, targets, steps=10)[1]
    expected = heads.scores(features[:, heads.columns])
    monkeypatch.setattr(probes, "_MAX_SCORES", 7 * heads.bias.numel())
    right = [int((expected[:, head].argmax(1) == targets).sum()) for head in range(3)]
    assert count_correct(heads, features, targets).tolist() == right
    for best, columns in ((5, 5), (3, 3), (9, 5)):
        ranked = top_classes(heads, features, head=2, k=best)
        assert torch.equal(ranked, expected[:, 2].argsort(dim=1, descending=True)[:, :columns])


def test_heads_of_several_labels_follow_the_gradient_of_their_cross_entropy():
    features, targets = torch.randn(64, 5), (torch.rand(64, 3) < 0.4).float()
    settings = {"columns": [slice(1, 5)], "rates": [2.0], "batch_size": 64, "seed": 0, "classes": 3}
    (head,) = train_heads(features, targets, **settings, steps=1, device=CPU)
    start = initial_weight(3, 4, 0).requires_grad_()
    bias = torch.zeros(3, requires_grad=True)
    logits = features[:, 1:] @ start.T + bias
    loss = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / 64
    loss.backward()
    torch.testing.assert_close(head.weight[0], start.detach() - 0.5 * start.grad)
    torch.testing.assert_close(head.bias[0], -0.5 * bias.grad)
