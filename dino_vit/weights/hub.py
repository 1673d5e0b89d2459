"""Find weights by name: repositories of the Hugging Face Hub, and models of timm there."""

import json
from contextlib import suppress
from pathlib import Path

from dino_vit.config.sections import BASELINES
from dino_vit.core.storage import StorageError
from dino_vit.core.text import brief

PREFIXES = ("hf:", "timm:")  # of weights by name
INDEX = "model.safetensors.index.json"  # of weights in several files
HUB_FILES = ("model.safetensors", INDEX, "pytorch_model.bin")  # a config.json beside these is theirs
CONFIG = "config.json"
PROCESSOR = "preprocessor_config.json"


def is_name(source: object) -> bool:
    """Tell whether weights are given by name, not by path."""
    return isinstance(source, str) and (source in BASELINES or source.startswith(PREFIXES))


def fetch(name: str) -> Path:
    """Return the folder with the weights of a name, downloaded unless the hub's cache has them."""
    from huggingface_hub import snapshot_download  # takes a second

    repository = name.removeprefix("hf:") if name.startswith("hf:") else _of_timm(name)
    wanted = [CONFIG, PROCESSOR, INDEX, "model.safetensors", "model-*-of-*.safetensors"]
    try:
        folder = Path(snapshot_download(repository, allow_patterns=wanted))
        if not any((folder / file).exists() for file in HUB_FILES):
            snapshot_download(repository, allow_patterns=HUB_FILES[-1])
    except (OSError, ValueError) as error:  # all that the hub's library raises
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise StorageError(
            f"{name} could not be fetched, and the hub's cache does not have it ({reason}); run `hf download "
            f"{repository}` where there is a network, and give the folder that it prints"
        ) from error
    return folder


def _of_timm(name: str) -> str:
    """Return the repository of a model of timm."""
    try:
        import timm
    except ImportError as error:
        raise StorageError(f"{name} is found by timm: pip install timm") from error
    pretrained = None
    with suppress(RuntimeError):  # of a tag that does not exist
        pretrained = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    if pretrained is None or not pretrained.hf_hub_id:
        raise StorageError(f"{name}: no weights of this name on the hub; timm.list_pretrained() lists them")
    return str(pretrained.hf_hub_id)


def parts(index: Path) -> list[Path]:
    """Return the files of weights that an index names."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StorageError(f"{index} does not name the files of the weights") from error
    listed = {path.name for path in index.parent.iterdir() if path.is_file()}
    if strange := [str(name) for name in names if name not in listed]:
        raise StorageError(f"{index} names {brief(strange[0])}, which is no file beside it")
    return [index.with_name(name) for name in sorted(names)]
