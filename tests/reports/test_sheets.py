import numpy as np
import torch
from einops import rearrange

from dino_vit.cli import main
from dino_vit.data.sources.open import open_source
from dino_vit.eval.frozen import BackboneConfig, frozen_backbone
from dino_vit.eval.maps.pictures import heat
from dino_vit.reports import sheets
from dino_vit.reports.explorer import build_map, data_uri
from dino_vit.reports.record import read_run
from dino_vit.views.augment import Augment
from dino_vit.views.build import build_views
from dino_vit.views.loader import Loader
from dino_vit.views.sampler import Sampler
from tests.support.images import write_synthetic
from tests.support.reports import picture_of


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
            seen = rearrange(augment(pixels, batch.augment[size]), "(v b) c y x -> v b c y x", b=8)
            for view in seen[:, sample]:
                uris.append(data_uri((view * 255).round().clamp(0, 255).to(torch.uint8)))
        assert [tile.uri for tile in row.tiles[1:]] == uris
        assert [tile.caption for tile in row.tiles] == [
            *("image", "global 1, 32 × 32 px", "global 2, 32 × 32 px"),
            *("local 1, 16 × 16 px", "local 2, 16 × 16 px"),
        ]


def test_attention_is_drawn_at_the_resolution_of_the_command(made, tmp_path):
    for number in range(4):
        write_synthetic(tmp_path / "images" / f"{number}.png", number, size=90)  # no whole number of patches
    source = open_source(str(tmp_path / "images"))
    teacher = frozen_backbone(BackboneConfig(source="synthetic", weights=str(made)))
    found = build_map(teacher, source, [0, 1, 2, 3])
    command = ["attention", str(tmp_path / "images"), f"weights={made}", f"output={tmp_path / 'maps'}"]
    assert main(command) == 0
    for row in sheets.attention_rows(teacher, source, found):
        maps = torch.from_numpy(np.load(tmp_path / "maps" / f"{row.name[:-4]}.attention.npy"))
        assert maps.shape == (2, 12, 12)
        assert [tile.caption for tile in row.tiles] == ["image", "mean of heads", "head 0", "head 1"]
        for values, tile in zip((maps.mean(dim=0), *maps), row.tiles[1:], strict=True):
            pixels = torch.from_numpy(picture_of(tile.uri))
            middles = (torch.arange(11) * 8 + 4) * len(pixels) // 90
            shown, expected = pixels[middles][:, middles, 2], heat(values)[2, :11, :11]  # blue varies most
            assert torch.corrcoef(torch.stack([shown.flatten(), expected.flatten()]))[0, 1] > 0.85
