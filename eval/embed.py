"""Embeddings of images by a frozen backbone: the last block's CLS token, or as asked (Caron et al., 2021).

    python eval/embed.py photos weights=runs/pretrain output=photos.parquet
    accelerate launch --config_file launch/accelerate_configs/multi_gpu.yaml eval/embed.py photos weights=...

Images are resized to about 256/224 of the backbone's size (bicubic), cropped and normalised.
The file is the same for any number of processes, also after a kill. Expected: what `backbone(images)` returns
for each image; its nearest neighbours are alike in content, those of pixels in colour.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["embed", *sys.argv[1:]]))
