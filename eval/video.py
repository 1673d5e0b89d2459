"""Label propagation through the validation videos of DAVIS 2017 (Caron et al., 2021, table 5).

    python eval/video.py DAVIS weights=dino_deitsmall16_pretrain.pth precision=no
    accelerate launch eval/video.py DAVIS weights=runs/vits16 precision=no

DAVIS is the folder of the 480p set TrainVal, with JPEGImages, Annotations and ImageSets. Nothing is learned.
The shorter side of a frame becomes 480, the longer is cut to a multiple of 64. A patch takes the labels of
the first frame and the 7 before: the mean of those of its 5 nearest patches within 12 rows and columns,
weighted by exp(cosine / 0.1). J and F are those of the official evaluation: in all frames but the first and
the last, the mean over all objects. Masks are written as it expects them, a folder of PNG files for each
video. Frames are resized bicubically, where the published code does it bilinearly.

Published, J&F (J, F): ViT-S/16 61.8 (60.2, 63.4), ViT-B/16 62.3 (60.7, 63.9), ViT-S/8 69.9 (66.6, 73.1),
ViT-B/8 71.4 (67.9, 74.9).
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["propagate", *sys.argv[1:]]))
