"""Errors of the models: one family, and a full disk told apart from a damaged file."""

from __future__ import annotations

import errno

import pytest
from safetensors import SafetensorError

from specdec_core.models import errors


def test_all_are_model_errors_and_value_errors():
    kinds = ["UnknownModel", "MissingPackage", "Unreachable", "CorruptFile", "UnsupportedModel", "TokenizerMismatch"]
    for kind in kinds:
        assert issubclass(getattr(errors, kind), errors.ModelError)
    assert issubclass(errors.ModelError, ValueError)


def test_a_failed_write_gets_its_number_back():
    with pytest.raises(OSError, match="No space left") as caught, errors.safetensors_as_os_error():
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC


def test_other_errors_stay_what_they_are():
    with pytest.raises(SafetensorError), errors.safetensors_as_os_error():
        raise SafetensorError("Error while serializing: invalid header")
