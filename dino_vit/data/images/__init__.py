"""From the bytes of an image file to a tensor of the wanted channels, depth and scale."""
