"""Views of images: geometry, sampling, loading, photometry; and the evaluation transform."""
