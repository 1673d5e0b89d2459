"""Self-attention maps of a backbone's CLS token, head by head (Caron et al., 2021, figures 1 and 3).

    python eval/attention.py photos weights=runs/demo output=attention

Images keep their size, are padded to whole patches and cut back. The mask holds 0.6 of the attention in the
fewest patches. Expected: the heads of a network that has learned pick out different parts of the object in an
image; those of an untrained network follow brightness and edges at best.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["attention", *sys.argv[1:]]))
