import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dino_vit.core.distributed import (
    all_gather,
    all_reduce_mean,
    all_reduce_sum,
    broadcast_int,
    end_processes,
    lost_process,
    rank,
    unanswered,
    world_size,
)
from dino_vit.method.optim import reduce_loss
from dino_vit.method.targets import Center, Targets, sinkhorn_center
from dino_vit.method.terms.koleo import koleo_loss
from dino_vit.models.head import convert_sync_batchnorm
from tests.support.naive import as_logits
from tests.support.runs import server
from tests.support.terms import cls_term


def test_a_process_that_finds_no_other_is_lost_before_there_is_a_group(monkeypatch):
    refused = RuntimeError("Gloo connectFullMesh failed with timed out connecting: Connection refused")
    assert not lost_process(refused)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_process(refused)
    assert unanswered(refused)
    assert not unanswered(dist.DistNetworkError("Connection reset by peer"))


def test_two_processes_agree(tmp_path):
    logits = torch.randn(8, 5)
    features = logits.clone().requires_grad_()
    koleo = koleo_loss(features)
    (gradient,) = torch.autograd.grad(koleo, features)
    alone = sinkhorn_center([logits], 0.1), koleo.detach(), gradient
    arguments = f"file://{tmp_path / 'rendezvous'}", logits, alone
    mp.start_processes(_check_in_process, arguments, nprocs=2, start_method=server.get_start_method())
    assert sorted(os.listdir(tmp_path))[:2] == ["done0", "done1"]


def _check_in_process(number, rendezvous, logits, alone):
    dist.init_process_group("gloo", init_method=rendezvous, rank=number, world_size=2)
    try:
        assert (rank(), world_size()) == (number, 2)
        mine = torch.full((2,), float(number))
        assert all_reduce_mean(mine).tolist() == [0.5, 0.5]
        assert mine.tolist() == [number, number]
        assert broadcast_int(7 + number) == 7
        assert lost_process(RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"))
        assert not lost_process(FileNotFoundError("/data/gloomy does not exist"))
        assert not unanswered(RuntimeError("[../gloo/transport/tcp/pair.cc] Connection closed by peer"))
        assert not unanswered(TimeoutError("the server timed out"))
        _check_gather(number)
        torch.manual_seed(0)
        _check_batch_norm(number)
        _check_center(number, logits)
        _check_statistics(number, logits)
        _check_terms(number, logits, *alone)
        loss = torch.tensor(float("inf") if number else 1.0)
        assert not reduce_loss(loss, torch.tensor(1.0))[1]
        assert reduce_loss(torch.tensor(1.0 + number), torch.tensor(1.0)) == (1.5, True)
    finally:
        end_processes()
    open(rendezvous.removeprefix("file://").replace("rendezvous", f"done{number}"), "w").close()


def _check_gather(number):
    for rows in ((2, 3), (0, 2), (1, 1), (0, 0)):
        rows_of_both = torch.arange(2.0 * sum(rows), requires_grad=True).view(-1, 2)
        mine = rows_of_both.split(rows)[number]
        gathered = all_gather(mine)
        assert torch.equal(gathered, rows_of_both)
        assert not gathered.requires_grad
    assert all_gather(torch.full((1,), number)).tolist() == [0, 1]


def _check_batch_norm(number):
    """Over rows of which process 1 has more, and over none; beside PyTorch's on all of them."""
    rows = torch.randn(9, 4, 2) * 3 + 5
    ours, theirs = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4)
    convert_sync_batchnorm(ours)
    for layer in (ours, theirs):
        torch.nn.init.uniform_(layer.weight, generator=torch.Generator().manual_seed(0))
    shared, whole = rows.split((3, 6))[number].clone().requires_grad_(), rows.clone().requires_grad_()
    factor = torch.arange(72.0).view(9, 4, 2)
    (ours(shared) * factor.split((3, 6))[number]).sum().backward()
    (expected := theirs(whole)).mul(factor).sum().backward()
    torch.testing.assert_close(ours(shared), expected.split((3, 6))[number])
    torch.testing.assert_close(shared.grad, whole.grad.split((3, 6))[number])
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(all_reduce_sum(parameter.grad), theirs.get_parameter(name).grad)
    theirs(whole)
    # With a gradient they would keep the graph of every step.
    assert not any(buffer.requires_grad for buffer in ours.buffers())
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(ours.get_buffer(name), theirs.get_buffer(name))
    ours(rows[:0])
    ours(rows[:number, :, :1])  # one row over all processes
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def _check_terms(number, logits, center, koleo, koleo_gradient):
    """Compare with what one process computes of all rows."""
    part = logits.chunk(2)[number].clone().requires_grad_()
    torch.testing.assert_close(sinkhorn_center([part], 0.1), center)
    value = koleo_loss(part)
    (gradient,) = torch.autograd.grad(value, part)
    torch.testing.assert_close(value.detach(), koleo)
    torch.testing.assert_close(gradient / 2, koleo_gradient.chunk(2)[number])  # as if averaged


def _check_center(number, logits):
    center = Center(prototypes=5)
    center(as_logits(logits.chunk(2)[number]), 0.04)
    center.update()
    torch.testing.assert_close(center.center, 0.1 * logits.mean(0, keepdim=True))


def _check_statistics(number, logits):
    center = torch.zeros(1, 5)
    loss = torch.tensor([3.0, 5.0])[number]
    term = cls_term()
    sums = term.sums(loss, Targets([logits.chunk(2)[number]], center, 0.5))
    statistics = term.figures(sums, 1)
    targets = (logits / 0.5).softmax(-1)
    entropy = -(targets * targets.log()).sum(-1).mean()
    mean = targets.mean(0)
    torch.testing.assert_close(statistics["mean_output_entropy"], -(mean * mean.log()).sum())
    torch.testing.assert_close(statistics["output_entropy"], entropy)
    torch.testing.assert_close(statistics["student_divergence"], 4.0 - entropy)
    assert statistics["prototypes_in_use"] == len(set(logits.argmax(-1).tolist()))
