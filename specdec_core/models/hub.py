"""Models from the Hugging Face hub, fetched only when the user names one: `hub:org/name` or `hub:org/name@revision`."""

from __future__ import annotations

import re
from pathlib import Path

from specdec_core.models.errors import MissingPackage, UnknownModel, Unreachable

PREFIX = "hub:"
PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
"""What is fetched: weights that cannot run code, configs and tokenizer, and the chat template."""

_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def download(name: str) -> Path:
    """The local folder of the hub model `hub:org/name[@revision]`, fetched into the hub's own cache if need be.

    Raises UnknownModel if the name is malformed or the hub has no such model, Unreachable if it cannot be fetched
    (no network, gated) and is not on this disk, MissingPackage without huggingface_hub.
    """
    match = _NAME.fullmatch(name.removeprefix(PREFIX))
    if match is None:
        raise UnknownModel(f"{name!r} is no hub model; expected {PREFIX}ORGANISATION/NAME, optionally @REVISION")
    repository, revision = match["repository"], match["revision"]
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise MissingPackage("hub models need the package huggingface_hub: pip install huggingface_hub") from None
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=PATTERNS))
    except errors.GatedRepoError as error:
        raise Unreachable(f"{name} is gated; ask for access on its page, then run `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UnknownModel(f"the hub has no model {repository}, or no revision {revision or 'main'} of it") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HTTPError, OSError) as error:
        raise Unreachable(
            f"{name} is not on this disk and could not be fetched ({type(error).__name__}); connect to the network, "
            "or name a registered model or a local folder"
        ) from error
