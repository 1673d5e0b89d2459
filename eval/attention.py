"""Self-attention maps of a backbone's CLS token, head by head (Caron et al., 2021, figure 1).

    python eval/attention.py weights=runs/demo source=photos output=attention.png

Expected: the heads of a network that has learned pick out different parts of the object in an image; those of
an untrained network follow brightness and edges at best.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["attention", *sys.argv[1:]]))
