"""Linear classification of frozen features (Caron et al., 2021, table 2; Oquab et al., 2023, table 4).

    python eval/linear.py imagenet/val train=imagenet/train weights=runs/vits16
    python eval/linear.py imagenet/val train=imagenet/train weights=runs/vits16 method=dino2021
    accelerate launch eval/linear.py ...

The grid is DINOv2's: 13 rates, the CLS tokens of the last 1 or 4 blocks, with the mean patch token and
without, 12,500 steps of 1,024 images of the centre crop. `method=dino2021` is the protocol of the paper:
augmented views, 100 epochs; for a ViT-S the CLS tokens of the last 4 blocks, for a ViT-B
dino2021.blocks=1 dino2021.mean=true.

`method=logistic` is the optimum of scikit-learn's logistic regression for each of 45 values of C.

Expected on ImageNet with method=dino2021, top-1 in %: ViT-S/16 of 100 epochs 74.0, of 300 epochs 76.0; the
released ViT-S/16 77.0, S/8 79.7, B/16 78.2, B/8 80.1.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["linear", *sys.argv[1:]]))
