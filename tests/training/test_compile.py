"""What `compute.compile=auto` decides, and that compiled blocks train and resume as plain ones do."""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from dino_vit.models.head import DINOHead
from dino_vit.models.student_teacher import Need, build_networks
from dino_vit.training.networks import COMPILED_STEPS, choose_compile, compile_networks, missing_for_compile
from tests.support.rehearsal import one_of_two
from tests.support.runs import RESNET, TINY, assert_same_readings, steps, tensors
from tests.support.training import interrupted, opened, trained


@pytest.fixture
def auto_compiles(monkeypatch):
    """As on a GPU with all that compiling needs."""
    monkeypatch.setattr("dino_vit.training.networks.choose_compile", lambda wanted, *_: wanted == "auto")
    monkeypatch.setattr("dino_vit.training.networks.missing_for_compile", lambda: None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what the compiler's own modules warn of
@pytest.mark.parametrize("method", ["dino", "dinov2"])
def test_auto_compiles_blocks_in_few_graphs_and_changes_no_checkpoint(
    tmp_path, monkeypatch, auto_compiles, method
):
    settings = {"optim.lr": 0.003, "model.depth": 4, "model.drop_path": 0.1, "optim.warmup_epochs": 0}
    settings |= {"loss.patch_weight": 1} if method == "dinov2" else {"compute.precision": "bf16"}
    trained(tmp_path / "plain", {**settings, "compute.compile": "false"})
    counter = CompileCounterWithBackend("aot_eager")
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
        torch._dynamo.reset()
        interrupted(tmp_path / "run", settings, 8)
    # Of the student and of the teacher: a last block that gives fewer tokens has a graph of its own.
    assert counter.frame_count == (4 if method == "dino" else 3)
    step = steps(tmp_path / "run")[-1]
    assert tensors(tmp_path / "run", step).keys() == tensors(tmp_path / "plain", 20).keys()
    trained(tmp_path / "run", {**settings, "compute.compile": "false"})  # and resumes without
    assert_same_readings(tmp_path / "run", tmp_path / "plain", "loss", rtol=1e-4)


def test_auto_says_that_it_compiles_or_why_not(tmp_path, monkeypatch, auto_compiles):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    (said,) = [note for note in opened(tmp_path / "a", {}).run.notes if "compile" in note]
    assert "compute.compile=false" in said
    assert len(compiled) == 2 * TINY["model.depth"]
    compiled.clear()
    assert not [
        note for note in opened(tmp_path / "b", {"compute.compile": "false"}).run.notes if "compile" in note
    ]
    monkeypatch.setattr("dino_vit.training.networks.missing_for_compile", lambda: "there is no Triton")
    (said,) = [note for note in opened(tmp_path / "c", {}).run.notes if "compile" in note]
    assert "there is no Triton" in said
    assert not compiled
    without_blocks = opened(tmp_path / "d", RESNET)
    assert not [note for note in without_blocks.run.notes if "compile" in note]


def test_no_graph_is_split_where_gradients_are_exchanged(monkeypatch):
    """By default each megabyte, and then every 25, would be a graph of its own."""
    architecture = {"image_size": 32, "patch_size": 8, "width": 192, "depth": 2, "heads": 3}
    head = {"prototypes": 16, "hidden_dim": 16, "bottleneck_dim": 8}
    student, teacher = build_networks(
        backbone=architecture, drop_path=0, heads={"head": partial(DINOHead, **head)}
    )
    compile, counter = torch.compile, CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend=counter))
    monkeypatch.setattr(torch._dynamo.config, "optimize_ddp", True)
    torch._dynamo.reset()
    with one_of_two():
        compile_networks([student, teacher], whole=True)
        needs = [Need("cls", "head"), Need("prototypes", "head")]
        outputs = DistributedDataParallel(student)([torch.randn(2, 3, 32, 32)], needs)
        outputs[needs[0]].sum().backward()
    assert counter.frame_count == 1


def test_auto_compiles_long_runs_on_cuda():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_compile("auto", cuda, COMPILED_STEPS)
    assert not choose_compile("auto", cuda, COMPILED_STEPS - 1)
    assert not choose_compile("auto", cpu, 100_000)
    assert not choose_compile("auto", torch.device("mps"), 100_000)
    assert choose_compile(True, cpu, 100)
    assert not choose_compile(False, cuda, 100_000)


def test_what_compiling_for_a_gpu_needs_is_found(tmp_path, monkeypatch):
    compiler = tmp_path / "a-compiler"
    compiler.touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CC", f"{compiler} -O2")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr("sysconfig.get_path", lambda _: tmp_path)
    assert missing_for_compile() is None
    (tmp_path / "Python.h").unlink()
    assert "headers" in missing_for_compile()
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    assert "C compiler" in missing_for_compile()
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert "Triton" in missing_for_compile()


def test_a_third_run_of_a_process_is_compiled_too(monkeypatch):
    """Dynamo would count the graphs of all runs towards the limit of a block's function."""
    compile, counter = torch.compile, CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile(function, backend=counter))
    torch._dynamo.reset()
    counts = []
    for width in (32, 64, 96, 128):
        architecture = {"image_size": 32, "patch_size": 8, "width": width, "depth": 3, "heads": 2}
        head = partial(DINOHead, prototypes=16, hidden_dim=16, bottleneck_dim=8)
        networks = build_networks(backbone=architecture, drop_path=0, heads={"head": head})
        compile_networks(networks, whole=False)
        before = counter.frame_count
        with torch.no_grad():
            for network in networks:
                network([torch.randn(2, 3, 32, 32), torch.randn(4, 3, 16, 16)], [Need("cls")])
        counts.append(counter.frame_count - before)
    assert counts == counts[:1] * 4
