"""Images in: where they lie (sources), how they are decoded (images), labels, statistics."""
