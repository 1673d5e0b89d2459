"""What a page shows of the images: the map of a teacher, the views of training, attention."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from einops import rearrange

from dino_vit.cli import main
from dino_vit.commands import report
from dino_vit.commands.report import draw
from dino_vit.config.commands import BackboneConfig, ReportConfig
from dino_vit.data.image_set import random_indices
from dino_vit.data.images.decode import read_image
from dino_vit.data.images.pixels import RGB
from dino_vit.data.labels import Labels
from dino_vit.data.open import open_source
from dino_vit.data.synthetic import make_textures
from dino_vit.features.frozen import frozen_backbone
from dino_vit.features.readings import fit_levelling, levelled_spec
from dino_vit.reports.record import read_run
from dino_vit.views.augment import Augment
from dino_vit.views.build import build_views
from dino_vit.views.loader import Loader
from dino_vit.views.pictures import heat, overlay
from dino_vit.views.sampler import Sampler
from tests.support.images import write_synthetic
from tests.support.reports import picture_of


def test_the_map_holds_the_neighbours_of_the_teacher(made):
    teacher = frozen_backbone(BackboneConfig(source="synthetic", weights=str(made)))
    source = open_source(read_run(made).config.data.source)
    indices, data = report.build_map(teacher, source, random_indices(source, seed=0)[:40])
    spec = levelled_spec(teacher.model)
    features = replace(teacher, batch_size=7).extract(source, indices, spec).values
    features = fit_levelling(features, spec.widths(teacher.model))(features)
    unit = features / features.norm(dim=1, keepdim=True)
    for row in range(40):
        cosines = {other: float(unit[row] @ unit[other]) for other in range(40) if other != row}
        nearest = sorted(cosines, key=cosines.get, reverse=True)[: report.NEIGHBOURS]
        near = data["neighbours"][row]
        assert [cosines[other] for other in near] == pytest.approx([cosines[n] for n in nearest], abs=1e-5)
        assert row not in near
    labels = [data["classes"][number][0] for number in data["labels"]]
    assert labels == [source.labels.names[source.label(index)] for index in indices]
    assert [count for _, count in data["classes"]] == sorted(map(labels.count, set(labels)), reverse=True)
    assert {picture_of(uri).shape for uri in data["photos"]} == {(32, 32, 3)}
    shapes = {picture_of(uri).shape for uri in data["attention"]}
    assert shapes == {(8, 8, 3)}, "of 64 px, although it was trained on 32"
    assert np.array(data["positions"]).min() >= 0
    assert np.ptp(data["positions"], axis=0) == pytest.approx(1, abs=1e-3), "both sides are filled"
    assert picture_of(data["thumbnails"]["uri"]).shape == (6 * 64, 7 * 64, 3)


def test_the_map_shows_images_with_labels_first():
    labels = np.full(50, -1, dtype=np.int32)
    labels[[3, 10, 41]] = 0, 1, 1
    source = make_textures(length=50).with_labels(Labels(labels.take, ("a", "b")))
    indices = report.images_of_map(source, seed=0, count=20)
    assert {*indices[-3:]} == {3, 10, 41}, "drawn above the others"
    assert len({*indices}) == 20
    assert len(report.images_of_map(source, seed=0, count=2)) == 2


def test_tsne_keeps_groups_together_and_stands_a_collapse():
    middles = torch.nn.functional.normalize(torch.randn(4, 16), dim=1)
    group = torch.arange(80) % 4
    features = torch.nn.functional.normalize(middles[group] + 0.05 * torch.randn(80, 16), dim=1)
    positions = report.tsne(features)
    nearest = torch.cdist(positions, positions).fill_diagonal_(math.inf).argmin(dim=1)
    assert (group[nearest] == group).float().mean() > 0.95
    assert report.tsne(features[:1].expand(4, -1)).isfinite().all()


def test_the_views_are_those_that_the_network_saw(made):
    config, epoch = read_run(made).config, 2
    source = open_source(config.data.source)
    rows = report.view_rows(config, source, epoch)
    sampler = Sampler(length=len(source), global_batch=8, seed=config.seed)
    loader = Loader(source=source, views=build_views(config), sampler=sampler)
    batch = next(loader.batches(epoch * sampler.steps_per_epoch))
    augment = Augment(mean=(0.0,) * 3, std=(1.0,) * 3)
    assert len(rows) == report.ROWS
    for sample, row in enumerate(rows):
        assert row.name == source.name(int(batch.samples[sample]))
        uris = []
        for size, pixels in batch.views.items():
            seen = rearrange(augment(pixels, batch.augment[size]), "(v b) c y x -> v b c y x", b=8)
            for view in seen[:, sample]:
                uris.append(report.data_uri((view * 255).round().clamp(0, 255).to(torch.uint8)))
        assert [tile.uri for tile in row.tiles[1:]] == uris
        assert [tile.caption for tile in row.tiles] == [
            *("image", "global 1, 32 × 32 px", "global 2, 32 × 32 px"),
            *("local 1, 16 × 16 px", "local 2, 16 × 16 px"),
        ]


def test_the_views_are_of_an_epoch_that_was_trained(made):
    record = read_run(made)
    record.history[-1:] = [replace(record.history[-1], epoch=2.0)]  # of a run of two epochs
    source = open_source(record.config.data.source)
    views = draw(record, ReportConfig(run=str(made), images=4)).views
    assert views == report.view_rows(record.config, source, 1)


def test_attention_is_drawn_at_the_resolution_of_the_command(made, tmp_path):
    for number in range(4):
        write_synthetic(tmp_path / "images" / f"{number}.png", number, size=64)
    source = open_source(str(tmp_path / "images"))
    teacher = frozen_backbone(BackboneConfig(source="synthetic", weights=str(made)))
    command = ["attention", str(tmp_path / "images"), f"weights={made}", f"output={tmp_path / 'maps'}"]
    assert main(command) == 0
    rows = report.attention_rows(teacher, source, [0, 1, 2, 3])
    assert len(rows) == 4
    for row in rows:
        maps = torch.from_numpy(np.load(tmp_path / "maps" / f"{row.name[:-4]}-{row.name[:-4]}.attention.npy"))
        assert maps.shape == (2, 8, 8)
        assert [tile.caption for tile in row.tiles] == ["image", "mean of heads", "head 0", "head 1"]
        picture = read_image(source, int(row.name[:-4]), RGB)
        drawn = picture_of(report.draw_tile(overlay(picture, maps.mean(dim=0), (8, 8)), "").uri)
        assert np.array_equal(picture_of(row.tiles[1].uri), drawn)
        for values, tile in zip(maps, row.tiles[2:], strict=True):
            pixels = torch.from_numpy(picture_of(tile.uri))
            middles = torch.arange(8) * 24 + 12
            shown, expected = pixels[middles][:, middles, 2], heat(values)[2]  # blue varies most
            assert torch.corrcoef(torch.stack([shown.flatten(), expected.flatten()]))[0, 1] > 0.85


def test_whole_images_of_any_shape_are_shown_and_attended_to(made, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (4, 400, 1000, 3), dtype=np.uint8)
    np.save(tmp_path / "wide.npy", pixels)
    teacher = frozen_backbone(BackboneConfig(source="synthetic", weights=str(made)))
    _, data = report.build_map(teacher, open_source(str(tmp_path / "wide.npy")), [0, 1, 2, 3])
    assert {picture_of(uri).shape for uri in data["photos"]} == {(128, 320, 3)}
    # Twice as wide as high at most: 51 × 128 px.
    assert {picture_of(uri).shape for uri in data["attention"]} == {(6, 16, 3)}


def test_one_hot_patch_does_not_make_all_others_black():
    values = torch.linspace(0, 1, 64).reshape(8, 8)
    values[0, 0] = 1000
    brightness = heat(values).float().mean(0).flatten()
    assert brightness[1:].max() > 100
    assert brightness[1:].diff().ge(-1).all()
    assert heat(torch.zeros(4, 4)).max() <= 4
