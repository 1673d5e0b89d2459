"""Objects followed through a video by their patches, and how well their masks fit."""
