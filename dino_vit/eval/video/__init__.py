"""What features say about each patch of an image: attention, colours, classes; and pictures of it."""
