"""What `accelerate launch` and torchrun start; the same as `dino-vit pretrain`."""

import sys

from dino_vit.cli import main

if __name__ == "__main__":  # DataLoader workers that are spawned import this file
    sys.exit(main(["pretrain", *sys.argv[1:]]))
