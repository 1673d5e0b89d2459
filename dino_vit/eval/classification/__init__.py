"""Classification of images by features: neighbours, linear layers, and what is measured during training."""
