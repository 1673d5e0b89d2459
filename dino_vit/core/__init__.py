"""What everything may use and what knows no image: processes, launch, random numbers, files, checkpoints."""

import logging

log = logging.getLogger("dino_vit")  # of the whole library
