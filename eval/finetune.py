"""Supervised training of a whole network with a classifier, from trained weights.

    python eval/finetune.py imagenet/val train=imagenet/train weights=runs/vits16 output=runs/finetuned
    accelerate launch eval/finetune.py ...

AdamW, layer-wise learning rate decay, label smoothing, stochastic depth, a cosine after a warm-up (Touvron et
al., 2021; Bao et al., 2022). Expected on ImageNet, top-1: a ViT-S/16 from DINO's weights 81.5 % (Caron et
al., 2021, table 6).
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
