"""The commands of `dino-vit`: their settings, and a `run(config)` each."""
