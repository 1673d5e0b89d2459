"""Processes that see different images or labels say so, all of them, before any work."""

import os
import socket

import pytest
import torch.multiprocessing as mp

import dino_vit
from dino_vit.core.distributed import agree, end_processes, in_all_processes, share_work
from dino_vit.core.runtime import start_processes
from dino_vit.models.vit import VisionTransformer
from dino_vit.training import inputs
from dino_vit.training.pretrain import set_up
from tests.support.images import write_classes, write_synthetic
from tests.support.processes import finish, torchrun_environs
from tests.support.remote import serving, write_shards
from tests.support.runs import Run, server
from tests.support.training import configured

FEW = {"data.batch_size": 4, "optim.warmup_epochs": 0}


def pair_of(tmp_path, *settings):
    environs = torchrun_environs()
    started = [
        Run(tmp_path / "run", rank_settings, environ=e)
        for rank_settings, e in zip(settings, environs, strict=True)
    ]
    return finish(started, 2)


def write_images(folder, count):
    for number in range(count):
        write_synthetic(folder / f"{number}.png", number)


def test_a_run_on_different_images_does_not_begin(tmp_path):
    for number in (20, 19):
        write_images(tmp_path / f"photos-{number}", number)
    settings = [{**FEW, "data.source": tmp_path / f"photos-{number}"} for number in (20, 19)]
    host = socket.gethostname()
    for said in pair_of(tmp_path, *settings):
        assert "dino-vit pretrain: the processes see different images. " in said
        assert f"rank 0 on {host}: 20 images (images-20-" in said
        assert f"rank 1 on {host}: 19 images (images-19-" in said


def test_what_one_rank_cannot_open_all_report(tmp_path):
    write_images(tmp_path / "photos", 8)
    settings = [{**FEW, "data.source": tmp_path / name} for name in ("photos", "missing")]
    for said in pair_of(tmp_path, *settings):
        assert f"dino-vit pretrain: '{tmp_path}/missing' does not exist" in said


def test_ranks_with_different_settings_do_not_begin(tmp_path):
    for said in pair_of(tmp_path, {"optim.lr": 0.03}, {"optim.lr": 0.02}):
        assert "differ: optim.lr is 0.03 on rank 0 and 0.02 on rank 1. Give all of them" in said


def test_a_section_that_only_one_rank_was_given_is_named(tmp_path):
    first, second = pair_of(tmp_path, {"init.weights": "a.pth"}, {})
    assert "differ: init.weights is a.pth on rank 0 and nothing on rank 1. Give all of them" in first
    assert "differ: init is nothing on rank 0 and null on rank 1. Give all of them" in second


def test_ranks_that_would_use_images_in_different_orders_do_not_begin(tmp_path):
    """One reads a packed folder from its disk, the other over HTTP."""
    write_shards(tmp_path / "shards", 4, 8)
    with serving(tmp_path / "shards") as remote:
        sources = tmp_path / "shards" / "*.tar", f"{remote.url}/{{000..003}}.tar"
        settings = [{**FEW, "data.source": source, "data.cache": tmp_path / "copies"} for source in sources]
        for said in pair_of(tmp_path, *settings):
            assert "data.order is null on rank 0 and window on rank 1" in said


def test_ranks_that_would_compute_in_different_precisions_name_them(tmp_path):
    """Whatever their settings are."""
    arguments = torchrun_environs(), tmp_path
    mp.start_processes(check_ranks, arguments, nprocs=2, start_method=server.get_start_method())
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]


def check_ranks(rank, environs, folder):
    os.environ.update(environs[rank])
    accelerator, config = start_processes(), configured(folder / "run", {"compute.precision": "auto"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "choose_precision", lambda *_: ("no", "bf16")[rank])
        with pytest.raises(ValueError, match=r"compute\.precision is no on rank 0 and bf16 on"):
            set_up(config, accelerator)
    set_up(config, accelerator)
    (folder / f"done{rank}").touch()
    end_processes()


def test_commands_compare_what_their_ranks_see(tmp_path):
    write_classes(tmp_path / "photos0", "ab", 8)
    write_classes(tmp_path / "photos1", "ab", 7)
    for name in ("weights", "weights1"):
        model = VisionTransformer(image_size=32, patch_size=8, width=32, depth=1, heads=2)
        dino_vit.save_backbone(model, tmp_path / f"{name}.safetensors", mean=(0.5,) * 3, std=(0.2,) * 3)
    arguments = torchrun_environs(), tmp_path
    mp.start_processes(check_commands, arguments, nprocs=2, start_method=server.get_start_method())
    assert sorted(path.name for path in tmp_path.glob("done*")) == ["done0", "done1"]


def check_commands(rank, environs, folder):
    os.environ.update(environs[rank], DINO_VIT_CACHE=str(folder / f"cache{rank}"))
    start_processes()
    photos, labels = folder / f"photos{rank}", folder / f"labels{rank}.csv"
    rows = [f"a/{number}.png,{'xy'[number % 2]}\n" for number in range(8 - rank)]
    labels.write_text("name,label\n" + "".join(rows))
    calls = [("knn", photos, "labelled images"), ("linear", photos, "labelled images")]
    calls += [("embed", photos, "images")]
    weights = folder / "weights.safetensors"
    for name, source, what in calls:
        check_command(name, what, source, weights)
    check_command("compare", "images", photos, [weights, "untrained"])
    check_command("knn", "labelled images", folder / "photos0", weights, labels=labels)
    # A run that goes on may write a checkpoint between two processes that read its newest one.
    check_command("embed", "weights", folder / "photos0", folder / f"weights{rank or ''}.safetensors")
    check_agreement(rank)
    (folder / f"done{rank}").touch()
    end_processes()


def check_command(name, what, source, weights, **settings):
    with pytest.raises(ValueError, match=f"the processes see different {what}. rank 0 on .*; rank 1"):
        getattr(dino_vit, name)(source, weights, verbose=False, **settings)


def check_agreement(rank):
    def fail_on_one():
        if rank:
            raise KeyError("of rank 1")
        with in_all_processes():
            return share_work(list, range(10))

    with pytest.raises(KeyError, match="of rank 1"):
        agree("things", fail_on_one, str)
    with pytest.raises(ValueError, match="the processes see different"):
        agree("folders" if rank else "archives", lambda: 1, str)
    assert agree("things", lambda: 7 + rank, lambda _: "the same") == 7 + rank
