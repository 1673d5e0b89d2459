"""Pretrain on a folder of photos, without labels, and find the photos that look like some of them.

    python examples/search_photos.py photos photos/cat.jpg photos/dog.jpg --minutes 20

The run goes to runs/photos, where a second call finds it finished, or goes on with it.
"""

import argparse

import dino_vit

if __name__ == "__main__":  # which DataLoader workers on macOS must not run again
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", help="folder")
    parser.add_argument("queries", nargs="+", help="photos to find similar ones to")
    parser.add_argument("--minutes", type=float, default=20, help="of pretraining (default %(default)s)")
    options = parser.parse_args()

    run = dino_vit.pretrain(options.photos, "runs/photos", recipe="auto", budget={"minutes": options.minutes})
    print(run.outcome)
    embedded = dino_vit.embed(options.photos, weights=run.folder, output="photos.parquet", verbose=False)
    found = dino_vit.search(embedded.path, options.queries, k=5, output="similar.png", verbose=False)
    for image, nearest in zip(found.images, found.nearest, strict=True):
        print(image)
        for one in nearest:
            print(f"  {one.cosine:.3f}  {one.name}")
    print(f"{found.sheet} shows them, {dino_vit.report(run, verbose=False).path} the run")
