"""`python -m dino_vit` is `dino-vit`."""

import sys

from dino_vit.cli import main

if __name__ == "__main__":
    sys.exit(main())
