"""Find weights by name: repositories of the Hugging Face Hub, and models of timm there."""

import json
from contextlib import suppress
from pathlib import Path

from dino_vit.core import log
from dino_vit.core.storage import StorageError
from dino_vit.core.text import brief

PREFIXES = ("hf:", "timm:")  # of weights by name
INDEX = "model.safetensors.index.json"  # of weights in several files
HUB_FILES = ("model.safetensors", INDEX, "pytorch_model.bin")  # a config.json beside these is theirs
PROCESSOR = "preprocessor_config.json"


def is_name(source: object) -> bool:
    """Tell whether weights are given by name, not by path."""
    return isinstance(source, str) and source.startswith(PREFIXES)


def fetch(name: str) -> Path:
    """Return the folder with the weights of a name, downloaded unless the hub's cache has them."""
    from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache  # takes a second
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def download(*files: str) -> Path:
        """Return the first file that there is."""
        for file in files[:-1]:
            with suppress(EntryNotFoundError):
                return Path(hf_hub_download(repository, file))
        return Path(hf_hub_download(repository, files[-1]))

    repository = name.removeprefix("hf:") if name.startswith("hf:") else _of_timm(name)
    try:
        path = download(*HUB_FILES)
        for part in parts(path) if path.name == INDEX else []:
            download(part.name)
        config = download("config.json")  # without it the heads, say, would be guessed
        try:
            download(PROCESSOR)
        except LocalEntryNotFoundError:  # not on this machine, and the network is away
            absent = try_to_load_from_cache(repository, PROCESSOR) is _CACHED_NO_EXIST
            if not absent and "pretrained_cfg" not in json.loads(config.read_bytes()):
                log.warning(
                    "%s: its %s could not be fetched, so size, mean and std of its images are assumed; run "
                    "`hf download %s` where there is a network",
                    *(name, PROCESSOR, repository),
                )
        except EntryNotFoundError:
            pass  # the repository has none, as those of timm
    except (OSError, ValueError) as error:  # all that the hub's library raises
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise StorageError(
            f"{name} could not be fetched, and the hub's cache does not have it ({reason}). Where there is a "
            f"network, run `hf download {repository}`, and give the folder that it prints"
        ) from error
    return path.parent


def _of_timm(name: str) -> str:
    """Return the repository of a model of timm."""
    try:
        import timm
    except ImportError as error:
        raise StorageError(f"{name} is found by timm: pip install 'dino-vit[timm]'") from error
    pretrained = None
    with suppress(RuntimeError):  # of a tag that does not exist
        pretrained = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    if pretrained is None or not pretrained.hf_hub_id:
        text = f"{name}: timm {timm.__version__} knows no weights of this name on the hub"
        raise StorageError(f"{text}; timm.list_pretrained() names those that there are")
    return str(pretrained.hf_hub_id)


def parts(index: Path) -> list[Path]:
    """Return the files of weights that an index names."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise StorageError(f"{index} does not name the files of the weights") from error
    if strange := [str(name) for name in names if Path(str(name)).name != name]:
        raise StorageError(f"{index} names {brief(strange[0])}, which is no file beside it")
    return [index.with_name(name) for name in sorted(names)]
