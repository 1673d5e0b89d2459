"""Compare backbones on the same images."""
