"""The commands of `dino-vit`: the settings of each and a function that runs it."""


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 image" or "2,000 images"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
