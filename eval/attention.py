"""Self-attention maps of a backbone's CLS token, head by head (Caron et al., 2021, figures 1 and 3).

    python eval/attention.py photos weights=runs/demo output=attention

Images keep their size, or are enlarged to 24 patches, and are padded to whole patches. *Object* divides the
patches into two parts by their similarities, as TokenCut does. Expected: the heads of a network that has
learned pick out different parts of the object; those of an untrained one follow brightness and edges at best.
"""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main(["attention", *sys.argv[1:]]))
