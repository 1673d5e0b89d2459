"""Retrieval in Revisited Oxford and Paris (Radenović et al., 2018; Caron et al., 2021, table 3).

    python eval/retrieval.py roxford5k weights=dino_deitsmall16_pretrain.pth scales=[1,0.7071,0.5] boxes=false
    accelerate launch eval/retrieval.py rparis6k weights=runs/vits16 scales=[1,0.7071,0.5]

The folder holds the images and its ground truth, gnd_roxford5k.pkl or gnd_rparis6k.pkl, which is read without
running what a pickle may ask for. The longer side of an image is at most 512 pixels (`size`), a query is
the box that the ground truth gives, cut first; `boxes=false` leaves queries whole, as the code of 2021 does,
whose figures are given here. Images are ranked by the cosine of their CLS tokens, the mean
of three scales. mAP by trapezoids and mP@k as in the published evaluation, with its rules for junk images.

Published, mAP medium and hard: ViT-S/16 on ImageNet, Oxford 41.8 and 13.7, Paris 63.1 and 34.4; ViT-S/16 on
Google Landmarks v2, Oxford 51.5 and 24.3, Paris 75.3 and 51.6. `whitening=FOLDER` and tokens=gem are further
settings of the field, not of that table. Images are reduced bicubically, where the published code does it by
Lanczos' filter.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["retrieval", *sys.argv[1:]]))
