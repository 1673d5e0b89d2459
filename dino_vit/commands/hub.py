"""The upload of an exported folder to the Hugging Face hub."""

import logging
from pathlib import Path
from typing import Any

from dino_vit import __version__
from dino_vit.core import log
from dino_vit.core.text import brief

REASONS = {
    401: "the token is not valid; run `hf auth login`, or set HF_TOKEN",
    403: "the token may not write there; use one with write access",
    404: "there is no such repository, or the token may not see it",
}


def check_access(name: str) -> None:
    """Raise if there is no library, no token or no valid name to push with, before any work is done."""
    try:
        from huggingface_hub import get_token
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise ValueError("--push needs the hub's library: pip install 'dino-vit[hub]'") from None
    if name.count("/") != 1:
        raise ValueError(f"push={brief(name)} is not a repository; write OWNER/NAME")
    validate_repo_id(name)
    if get_token() is None:
        raise ValueError("--push needs a token with write access: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, name: str, *, private: bool) -> str:
    """Upload a folder in one commit, create the repository if there is none, and return its address."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants, utils

    log.info("%s: pushing to %s/%s", folder, constants.ENDPOINT, name)
    # Xet, the default where hf_xet is installed, needs storage servers that only huggingface.co has; LFS
    # works with every server of this protocol. The variable of this name is read on import only.
    constants.HF_HUB_DISABLE_XET = True
    if not log.isEnabledFor(logging.INFO):
        utils.disable_progress_bars()
    try:
        api = HfApi(token=True, library_name="dino-vit", library_version=__version__)
        url = api.create_repo(name, private=private or None, exist_ok=True)
        if private and not api.model_info(name).private:
            raise ValueError("it exists and is public; leave out --private, or choose another name")
        additions = [CommitOperationAdd(file.name, file) for file in sorted(folder.iterdir())]
        api.create_commit(name, additions, commit_message=f"Export by dino-vit {__version__}")
    except Exception as error:  # of the hub, the network, or an HTTP library that differs between versions
        raise ValueError(
            f"{folder} is exported, but was not pushed to {constants.ENDPOINT}/{name}: {_reason(error)}. "
            "To try again, repeat the command with --overwrite"
        ) from error
    return str(url)


def _reason(error: Exception) -> str:
    """Return why a push failed."""
    cause: Any = error.__cause__ if isinstance(error, RuntimeError) else error  # of the upload of a file
    status = getattr(getattr(cause, "response", None), "status_code", None)
    message = brief(" ".join(str(getattr(cause, "server_message", None) or cause).split()), 300)
    return f"{REASONS.get(status, f'the server answered {status}')} ({message})" if status else message
