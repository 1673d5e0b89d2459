import shutil

import torch
from einops import rearrange

from dino_vit.data.sources.open import open_source
from dino_vit.report import sheets
from dino_vit.report.explorer import data_uri
from dino_vit.report.record import read_run
from dino_vit.views.build import build_views
from dino_vit.views.loader import Loader
from dino_vit.views.photometry import Augment
from dino_vit.views.sampler import Sampler


def test_the_views_are_those_that_the_network_saw(made):
    config, epoch = read_run(made).config, 2
    source = open_source(config.data.source)
    rows = sheets.view_rows(config, source, epoch)
    sampler = Sampler(length=len(source), batch_size=8, seed=config.seed)
    loader = Loader(source=source, views=build_views(config), sampler=sampler)
    batch = next(loader.batches(epoch * sampler.steps_per_epoch))
    augment = Augment(mean=(0.0,) * 3, std=(1.0,) * 3)
    for sample, row in enumerate(rows):
        assert row.name == source.name(int(batch.samples[sample]))
        uris = []
        for size, pixels in batch.views.items():
            seen = rearrange(augment(pixels, batch.photometry[size]), "(v b) c y x -> v b c y x", b=8)
            for view in seen[:, sample]:
                uris.append(data_uri((view * 255).round().clamp(0, 255).to(torch.uint8)))
        assert [tile.uri for tile in row.tiles[1:]] == uris
        assert [tile.caption for tile in row.tiles] == [
            *("image", "global 1, 32 × 32 px", "global 2, 32 × 32 px"),
            *("local 1, 16 × 16 px", "local 2, 16 × 16 px"),
        ]


def test_an_unreadable_image_is_named_beside_the_views_of_its_substitute(made, tmp_path):
    shutil.copytree(made.parent / "images", tmp_path / "images")
    source, config = open_source(str(tmp_path / "images")), read_run(made).config
    first = int(Sampler(length=len(source), batch_size=1, seed=config.seed).order(0)[0])
    (tmp_path / "images" / source.name(first)).write_bytes(b"no image")
    row = sheets.view_rows(config, source, 0)[0]
    assert row.name.startswith(f"{source.name(first)}: ")
    assert row.name.endswith("replaced by another image")
    assert [tile.caption[:8] for tile in row.tiles] == ["global 1", "global 2", "local 1,", "local 2,"]
