"""Models on the Hugging Face Hub, named hf-hub:OWNER/NAME wherever a folder is expected."""

from pathlib import Path

from vit.console import shorten

HUB = "hf-hub:"  # before a repository's name, as in timm's names
# All that is needed; nothing in them is executed.
FILES = ["*.json", "model.safetensors", "model-*-of-*.safetensors", "open_clip_model.safetensors"]


def download(name: str) -> Path:
    """Download a model from the Hub, and return its folder in huggingface_hub's read-only cache.

    The name is hf-hub:OWNER/NAME; @REVISION (a branch, tag or commit) may follow.

    Raises:
        ValueError: There is no such model, or neither the Hub nor a copy can be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, _, revision = name.removeprefix(HUB).partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=FILES))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{name} is not in the cache, and the Hub cannot be reached; connect to the internet, "
            f"or download it elsewhere with: hf download {repository} --local-dir FOLDER"
        ) from None
    except Exception as error:  # of many kinds, such as those of a proxy
        reason = shorten(str(error) or repr(error), 200)
        raise ValueError(
            f"{name} cannot be downloaded ({reason}); it must be {HUB}OWNER/NAME; check the "
            "network, and if it is private, log in with hf auth login"
        ) from None
