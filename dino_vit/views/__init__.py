"""Views of images: geometry, sampling, loading, augment; and the evaluation transform."""
