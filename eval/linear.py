"""Linear classification of frozen features by logistic regressions, chosen on training images.

    python eval/linear.py imagenet/val train=imagenet/train weights=runs/vits16
    accelerate launch eval/linear.py ...

The optimum of scikit-learn's logistic regression for each of 13 values of C, on standardised features: the
CLS tokens of the last 1 or 4 blocks, with the mean patch token and without. The best is chosen on a tenth of
`train`. Papers report other protocols: DINOv2's is `eval/linear_grid.py`, that of 2021 `eval/dino2021.py`.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["linear", *sys.argv[1:]]))
