"""Weighted k-nearest-neighbour classification of frozen features (Wu et al., 2018; Caron et al., 2021).

    python eval/knn.py imagenet/val train=imagenet/train weights=runs/vits16
    accelerate launch eval/knn.py imagenet/val train=imagenet/train weights=dino_deitsmall16_pretrain.pth

The normalised CLS token of each image (shorter side 256, bicubic; centre 224) is L2-normalised; the k
nearest training images vote for their class with exp(cosine / 0.07); k is 10, 20, 100 and 200. With one set
alone each image is classified by the others.

Expected on ImageNet-1k, top-1 at k = 20: the released ViT-S/16 74.5 %, S/8 78.3 %, B/16 76.1 %, B/8 77.4 %;
ViT-S/16 after the 100 epochs of configs/pretrain/vits16.yaml 69.3 %.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["knn", *sys.argv[1:]]))
