"""A folder of images of four colours, and files of labels for half of them."""

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 60, 200), "green": (40, 180, 60), "red": (200, 40, 50), "white": (230, 230, 230)}
IMAGES = 96


def write_photos(folder):
    """Write images, of which every second has its colour, and whether it is dark, in a file."""
    random, names = np.random.default_rng(0), [*COLOURS]
    (folder / "photos").mkdir()
    labels, tags = ["name,label"], ["name,tags"]
    for row in range(IMAGES):
        colour = names[row // 2 % len(names)]
        light = random.uniform(0.7, 1.0)
        pixels = light * np.array(COLOURS[colour]) + random.normal(0, 12, (32, 32, 3))
        name = f"{row:03}.png"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / "photos" / name)
        if row % 2 == 0:
            labels.append(f"{name},{colour}")
            tags.append(f"{name},{colour};{'dark' if light < 0.85 else 'light'}")
    for name, lines in {"labels": labels, "tags": tags}.items():
        (folder / f"{name}.csv").write_text("\n".join(lines))


def colour_of(name):
    return [*COLOURS][int(name[:3]) // 2 % len(COLOURS)]


def shuffled(photos):
    """Write labels that no image says anything about, so that confidences are low and differ."""
    rows = (photos / "labels.csv").read_text().splitlines()[1:]
    labels = np.random.default_rng(1).permutation([row.partition(",")[2] for row in rows])
    lines = (f"{row.partition(',')[0]},{label}" for row, label in zip(rows, labels, strict=True))
    (photos / "random.csv").write_text("\n".join(["name,label", *lines]))
    return photos / "random.csv"
