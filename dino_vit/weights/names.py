"""Weights by name: `hf:OWNER/NAME` of the Hugging Face Hub, `timm:NAME` of timm's models there."""

from contextlib import suppress
from pathlib import Path

from dino_vit.weights.metadata import HUB_FILES, WeightsError

PREFIXES = ("hf:", "timm:")
OTHERS = ("config.json", "preprocessor_config.json")


def is_name(source: object) -> bool:
    """Tell whether weights are given by name, not by path."""
    return isinstance(source, str) and source.startswith(PREFIXES)


def fetch(name: str) -> Path:
    """Return the folder with the weights of a name, downloaded unless the hub's cache has them."""
    from huggingface_hub import hf_hub_download  # takes a second to import
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository = name.removeprefix("hf:") if name.startswith("hf:") else _of_timm(name)
    try:
        for file in ("model.safetensors", *HUB_FILES):
            try:
                path = Path(hf_hub_download(repository, file))
                break
            except LocalEntryNotFoundError:
                raise
            except EntryNotFoundError:
                continue
        else:
            raise WeightsError(f"{name}: {repository} on the hub has none of {', '.join(HUB_FILES)}")
        for other in OTHERS:
            with suppress(EntryNotFoundError):
                hf_hub_download(repository, other)
    except WeightsError:
        raise
    except (OSError, ValueError) as error:  # all that the hub's library raises
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise WeightsError(
            f"{name} could not be fetched, and the hub's cache does not have it ({reason}). Where there is a "
            f"network, run `hf download {repository}`, and give the folder that it prints"
        ) from error
    return path.parent


def _of_timm(name: str) -> str:
    """Return the repository of a model of timm."""
    try:
        import timm
    except ImportError as error:
        raise WeightsError(f"{name} is found by timm: pip install 'dino-vit[timm]'") from error
    try:
        known = timm.get_pretrained_cfg(name.removeprefix("timm:"))
    except RuntimeError:  # a tag that there is not
        known = None
    if known is None or not known.hf_hub_id:
        wrong = "knows no weights of this name" if known is None else "has no file of it on the hub"
        advice = "timm.list_pretrained() names those that there are"
        raise WeightsError(f"{name}: timm {timm.__version__} {wrong}; {advice}")
    return str(known.hf_hub_id)
