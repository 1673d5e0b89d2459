"""Search a million embeddings in milliseconds with FAISS, by an index of which a query visits a few cells.

    python examples/million_photos.py photos.parquet photos/cat.jpg photos/dog.jpg

photos.parquet is what `dino-vit embed photos weights=runs/photos output=photos.parquet` wrote.
"""

import argparse
import json
import time

import faiss
from pyarrow import parquet
from sklearn.preprocessing import normalize

import dino_vit

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("embeddings", help="file of dino-vit embed")
parser.add_argument("queries", nargs="+", help="photos to find similar ones to")
options = parser.parse_args()

table = parquet.read_table(options.embeddings)
names, facts = table["name"].to_pylist(), json.loads(table.schema.metadata[b"dino_vit"])
values = normalize(table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(names), -1))
cells = max(1, int(len(values) ** 0.5))
index = faiss.index_factory(values.shape[1], f"IVF{cells},SQ8", faiss.METRIC_INNER_PRODUCT)  # a byte a value
index.train(values[:: max(1, len(values) // (256 * cells))])
index.add(values)
faiss.extract_index_ivf(index).nprobe = max(1, cells // 16)

backbone = dino_vit.load_backbone(facts["weights"]["path"], network=facts["weights"]["network"])
tokens, blocks = facts["tokens"]["kind"], facts["tokens"]["blocks"]
for photo in options.queries:
    query = backbone.embed(photo, tokens=tokens, blocks=blocks).reshape(1, -1)
    query = normalize(query.numpy()).astype("float32")
    start = time.perf_counter()
    cosines, rows = index.search(query, 5)
    print(f"{photo}: {1000 * (time.perf_counter() - start):.1f} ms")
    for cosine, row in zip(cosines[0], rows[0], strict=True):
        if row >= 0:
            print(f"  {cosine:.3f}  {names[row]}")
