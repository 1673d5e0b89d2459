"""Features of photos in scikit-learn: groups of similar photos, and a classifier where there are labels.

    python examples/scikit_features.py photos runs/photos

The folder of a photo is its label.
"""

import argparse

from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize

import dino_vit

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("photos", help="folder")
parser.add_argument("weights", help="run or file of weights")
parser.add_argument("--groups", type=int, default=8)
options = parser.parse_args()

features = dino_vit.embed(options.photos, weights=options.weights, output="features.parquet", verbose=False)
groups = KMeans(options.groups, random_state=0).fit_predict(normalize(features.values))
for group in range(options.groups):
    names = [name for name, its_group in zip(features.names, groups, strict=True) if its_group == group]
    print(f"group {group}, {len(names)} photos: {', '.join(names[:5])}")
if len(set(features.labels)) > 1:
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    shares = cross_val_score(classifier, features.values, features.labels)
    print(f"classified correctly: {100 * shares.mean():.1f} %, in five parts that were left out in turn")
