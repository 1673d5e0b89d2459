"""Supervised training of a whole network with a classifier, from trained weights or random ones.

    python eval/finetune.py imagenet/val train=imagenet/train weights=runs/vits16 output=runs/finetuned
    python eval/finetune.py imagenet/val train=imagenet/train arch=vit_small output=runs/supervised
    accelerate launch eval/finetune.py ...

AdamW, layer-wise learning rate decay, label smoothing, stochastic depth, a cosine after a warm-up (Touvron et
al., 2021; Bao et al., 2022). Expected on ImageNet, top-1: a ViT-S/16 from DINO's weights 81.5 %, one from
random weights under DeiT's recipe 79.9 % (Caron et al., 2021, table 6).
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
