"""Images in: where they lie (sources), how they are read (decode), in which order (sampler), in batches."""
