"""The commands that look at the patches of images."""
