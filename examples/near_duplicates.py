"""List groups of photos that are nearly the same, by their embeddings.

    dino-vit embed photos runs/photos output=photos.parquet
    python examples/near_duplicates.py photos.parquet --cosine 0.95

It needs SciPy, which comes with scikit-learn (`pip install scikit-learn`).
nearest.png is a histogram of the cosines of photos with their nearest neighbours. Copies are at the right
end, often after a gap: set --cosine there. The value depends on the network and the photos.
"""

import argparse

import matplotlib.pyplot as plt
import numpy as np
from pyarrow import parquet
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("embeddings", help="file of dino-vit embed")
parser.add_argument("--cosine", type=float, default=0.95, help="of copies, at least (default %(default)s)")
options = parser.parse_args()

table = parquet.read_table(options.embeddings)
names, labels = table["name"].to_pylist(), table["label"].to_pylist()
values = table["embedding"].combine_chunks().flatten().to_numpy().reshape(len(names), -1)
values = values / np.linalg.norm(values, axis=1, keepdims=True)
nearest, pairs = [], []
for start in range(0, len(values), 1000):
    cosines = values[start : start + 1000] @ values.T
    cosines[np.arange(len(cosines)), start + np.arange(len(cosines))] = -1  # a photo is no copy of itself
    nearest.append(cosines.max(1))
    rows, columns = np.nonzero(cosines >= options.cosine)
    pairs.append((start + rows, columns))
first, second = np.concatenate(pairs, axis=1)
_, group = connected_components(coo_array((np.ones(len(first)), (first, second)), (len(names), len(names))))
for number in np.flatnonzero(np.bincount(group) > 1):
    photos = [f"  {names[n]}  {labels[n] or ''}".rstrip() for n in np.flatnonzero(group == number)]
    print(f"{len(photos)} photos:", *photos, sep="\n")
plt.hist(np.concatenate(nearest), bins=100, log=True)
plt.axvline(options.cosine, color="black")
plt.savefig("nearest.png")
