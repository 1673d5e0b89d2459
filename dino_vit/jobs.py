"""The commands that are a config and a function of it, in the order of `dino-vit --help`."""

from typing import NamedTuple


class Job(NamedTuple):
    """A command that is a config and a function of it: where they are, and what the command does."""

    module: str
    config: str
    run: str
    help: str
    description: str


JOBS = {
    "inspect-data": Job(
        "dino_vit.commands.inspect_data",
        "dino_vit.commands.inspect_data:InspectConfig",
        "run",
        "say what is in a source of images",
        "Look at a source of images before training on it: counts, formats, sizes, channels, depths, labels, "
        "mean and std, what cannot be read and why, and a sheet of the views that training would cut.",
    ),
    "pack": Job(
        "dino_vit.commands.pack",
        "dino_vit.commands.pack:PackConfig",
        "run",
        "write a source as tar shards",
        "Write any source of images as tar shards with digests: few large files where there were many small.",
    ),
    "demo": Job(
        "dino_vit.commands.demo",
        "dino_vit.commands.demo:DemoConfig",
        "run",
        "pretrain a small transformer without labels, in minutes on a laptop",
        "Pretrain a small vision transformer on generated images, compare it with the untrained network and "
        "raw pixels, draw its attention and write a report. The same command resumes an interrupted run.",
    ),
    "pretrain": Job(
        "dino_vit.training.loop",
        "dino_vit.config.pretrain:PretrainConfig",
        "pretrain",
        "train a vision transformer on images without labels",
        "Train a vision transformer on images without labels. The same command goes on where its output "
        "folder stands.\n\n  dino-vit pretrain data.source=photos\n  accelerate launch launch/pretrain.py "
        "--config configs/pretrain/vits16.yaml data.source=photos",
    ),
    "report": Job(
        "dino_vit.commands.report",
        "dino_vit.commands.report:ReportConfig",
        "run",
        "write a page about a run",
        "Write one HTML file about a run: its curves with explanations, augmented views, attention maps, "
        "nearest neighbours, and a map of the images. With --serve, show it in a browser while the run goes "
        "on.\n\n  dino-vit report runs/pretrain\n  dino-vit report runs/pretrain --serve",
    ),
    "knn": Job(
        "dino_vit.commands.knn",
        "dino_vit.commands.knn:KnnConfig",
        "run",
        "classify images by their nearest neighbours",
        "Classify images by the labels of their nearest neighbours, among the other images or in a set of "
        "their own.\n\n  dino-vit knn photos weights=runs/demo\n"
        "  dino-vit knn val train=train weights=runs/demo",
    ),
    "linear": Job(
        "dino_vit.commands.linear",
        "dino_vit.commands.linear:LinearConfig",
        "run",
        "train linear classifiers on a frozen backbone",
        "Train linear classifiers on a frozen backbone, and count how often they are right. Without `train`, "
        "a fifth of the images is held out to be tried on.\n\n"
        "  dino-vit linear photos/val train=photos/train weights=runs/pretrain\n"
        "  dino-vit linear photos weights=runs/pretrain method=logistic",
    ),
    "finetune": Job(
        "dino_vit.commands.finetune",
        "dino_vit.eval.finetuning:FinetuneConfig",
        "run",
        "train a whole network with a classifier on labelled images",
        "Train a whole network with a classifier on labelled images, from trained weights or at random. The "
        "same command goes on where its output folder stands.\n\n"
        "  dino-vit finetune photos/val train=photos/train weights=runs/pretrain\n"
        "  dino-vit finetune photos arch=vit_small",
    ),
    "attention": Job(
        "dino_vit.commands.attention",
        "dino_vit.commands.attention:AttentionConfig",
        "run",
        "draw where a backbone looks",
        "Draw the attention that a backbone's CLS token pays to the patches of some images.",
    ),
    "embed": Job(
        "dino_vit.commands.embed",
        "dino_vit.commands.embed:EmbedConfig",
        "run",
        "write the embeddings of images to a file",
        "Write the embeddings of images to Parquet, npy or safetensors, with names, labels and provenance. "
        "Features are kept as they are made: what was killed goes on where it stopped.\n\n"
        "  dino-vit embed photos weights=runs/pretrain output=photos.parquet",
    ),
    "search": Job(
        "dino_vit.commands.search",
        "dino_vit.commands.search:SearchConfig",
        "run",
        "show the images nearest to given ones",
        "Show the images nearest to given ones among those that were embedded, as a sheet and as JSON.\n\n"
        "  dino-vit search photos.parquet cat.jpg dog.jpg output=found.png",
    ),
    "duplicates": Job(
        "dino_vit.commands.duplicates",
        "dino_vit.commands.duplicates:DuplicatesConfig",
        "run",
        "list images that are nearly the same",
        "List the pairs and groups of embedded images whose cosine is above a threshold.\n\n"
        "  dino-vit duplicates photos.parquet threshold=0.97 output=duplicates.csv",
    ),
}
