r"""Copy detection by frozen features (Douze et al., 2009; Berman et al., 2019; Caron et al., 2021).

    python eval/copies.py originals=copydays/original queries=copydays/strong pairs=strong.csv \
        distractors=yfcc100m-10k whitening=yfcc100m-20k size=320 weights=dino_vitbase8_pretrain.pth
    accelerate launch eval/copies.py photos weights=runs/vits16

The features of an image (resized whole to a square, bicubic) are its CLS token and the generalised mean of
its patches, cut off below at 0 and with power 4, whitened. Originals are ranked by cosine. In Copydays the
first four digits of a name are the same for an original and its copies; `pairs` lists them as lines of
query,original.

Published on the subset "strong", with 10,000 distractors of YFCC100M and a whitening learned from 20,000
further images, mAP: ViT-B/16 at 224 pixels 81.7 %, ViT-B/8 at 320 pixels 85.5 %. That is the mAP by
trapezoids (`mean_ap_trapezoid` in the JSON), among the 20 nearest images.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["copies", *sys.argv[1:]]))
