"""From an image to views on the device: geometry, sampling, loading, photometry; the evaluation transform."""
