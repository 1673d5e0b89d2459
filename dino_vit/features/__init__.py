"""Features of images by frozen backbones, which training, reports and evaluations rest on."""
