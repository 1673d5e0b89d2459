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
        "see a transformer learn without a label, in minutes on a laptop",
        "Pretrain a small vision transformer on generated images, evaluate it beside the untrained network "
        "and raw pixels, draw its attention and write a report. The same command goes on where it was "
        "interrupted.",
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
        "write a page that tells of a run",
        "Write one HTML file that tells of a run: its curves in words, the views that it saw, where its "
        "network looks, which images it finds alike, and a map of them. With --serve, show it while the run "
        "goes on.\n\n  dino-vit report runs/pretrain\n  dino-vit report runs/pretrain --serve",
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
        "draw the attention maps of a backbone",
        "Draw the attention that a backbone's CLS token pays to the patches of some images.",
    ),
    "embed": Job(
        "dino_vit.commands.embeddings.embed",
        "dino_vit.commands.embeddings.embed:EmbedConfig",
        "run",
        "write the embeddings of images to a file",
        "Write the embeddings of images to Parquet, npy or safetensors, with names, labels and metadata. "
        "Features are cached as they are computed: run the same command again to resume.\n\n"
        "  dino-vit embed photos weights=runs/pretrain output=photos.parquet",
    ),
    "search": Job(
        "dino_vit.commands.embeddings.search",
        "dino_vit.commands.embeddings.search:SearchConfig",
        "run",
        "find the images nearest to given ones",
        "Find the nearest images to given ones in an embedding file; write them as a sheet and as JSON.\n\n"
        "  dino-vit search photos.parquet cat.jpg dog.jpg output=found.png",
    ),
    "duplicates": Job(
        "dino_vit.commands.embeddings.duplicates",
        "dino_vit.commands.embeddings.duplicates:DuplicatesConfig",
        "run",
        "list images that are nearly the same",
        "List pairs and groups of images in an embedding file whose cosine is at least a threshold.\n\n"
        "  dino-vit duplicates photos.parquet threshold=0.97 output=duplicates.csv",
    ),
}
