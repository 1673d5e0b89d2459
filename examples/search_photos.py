"""Find the photos most similar to given ones, by their embeddings.

    dino-vit embed photos runs/photos output=photos.parquet
    python examples/search_photos.py photos.parquet photos/cat.jpg photos/dog.jpg

similar.png has a row for each given photo, followed by the most similar ones.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from pyarrow import parquet
from torch.nn.functional import normalize

import dino_vit

SIDE = 200  # pixels of a picture
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("embeddings", help="file of dino-vit embed")
parser.add_argument("queries", nargs="+", help="photos to find similar ones to")
parser.add_argument("-k", type=int, default=5, help="photos to find (default %(default)s)")
options = parser.parse_args()

table = parquet.read_table(options.embeddings)
names, facts = table["name"].to_pylist(), json.loads(table.schema.metadata[b"dino_vit"])
values = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(names), -1)
values = values / np.linalg.norm(values, axis=1, keepdims=True)
if facts["source"]["root"] is None:
    parser.error(f"{options.embeddings} does not say in which folder the photos are: embed a folder")
if facts["whiten"] or facts["beside"]:
    parser.error(f"{options.embeddings} has levelled or joined features: embed without whiten and +")
folder = Path(facts["source"]["root"])
backbone = dino_vit.load_backbone(facts["weights"]["path"], network=facts["weights"]["network"])
tokens, blocks = facts["tokens"]["kind"], facts["tokens"]["blocks"]
queries = backbone.embed(options.queries, tokens=tokens, blocks=blocks)
queries = normalize(queries.flatten(1)).numpy()
sheet = Image.new("RGB", (SIDE * (1 + options.k), SIDE * len(queries)), "white")
for row, (photo, cosines) in enumerate(zip(options.queries, queries @ values.T, strict=True)):
    nearest = [n for n in np.argsort(-cosines) if (folder / names[n]).resolve() != Path(photo).resolve()]
    print(photo, *(f"  {cosines[n]:.3f}  {names[n]}" for n in nearest[: options.k]), sep="\n")
    for column, path in enumerate([Path(photo), *(folder / names[n] for n in nearest[: options.k])]):
        picture = ImageOps.contain(ImageOps.exif_transpose(Image.open(path)).convert("RGB"), (SIDE, SIDE))
        sheet.paste(picture, (SIDE * column, SIDE * row))
sheet.save("similar.png")
