"""What each process that tests start would do first, done in the one that they are forked from."""

import torch._dynamo  # noqa: F401  # by making an optimiser, 2 s

from dino_vit.cli import build_parser
from dino_vit.data.open import open_source
from dino_vit.training import pretrain  # noqa: F401
from tests.support.textures import draw_once

build_parser(["pretrain"])  # and so the settings of all commands, 0.4 s
draw_once()
textures = open_source("synthetic:64:32")
for row in range(len(textures)):
    textures.read(row)
