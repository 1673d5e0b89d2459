"""Linear classification of frozen features (Oquab et al., 2023, table 4).

    python eval/linear.py imagenet/val train=imagenet/train weights=runs/vits16 method=grid select=source
    accelerate launch eval/linear.py ...

The grid is DINOv2's: 13 rates, the CLS tokens of the last 1 or 4 blocks, with the mean patch token and
without, 12,500 steps of 1,024 images of the centre crop. As published, the best head is the one that is best
on the images that it is judged by (`select=source`); by default it is chosen on a tenth of `train`.

`method=logistic standardise=false` is the optimum of scikit-learn's logistic regression on the CLS token for
each of 45 values of C. Without `method`, up to 100,000 images to learn from are classified by regressions on
standardised features, which are better for few images and not those of papers. The
protocol of 2021 is `eval/dino2021.py`.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["linear", *sys.argv[1:]]))
