"""Images that are corrupted or copied on purpose, to see what features still recognise."""
