"""What a record must look like. A bad record is refused before it is written, by the name of the offending field."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


class RecordError(ValueError):
    """A record, or a file of records, is not what its schema says; the message names the field or line."""


@dataclass(frozen=True)
class Schema:
    """Fields of one kind of record.

    fields  name → type: int, float, bool, str, dict, list[…] or a union with None. An int passes for a float, numpy
            scalars and arrays for the Python values they hold; a bool is no int. Every field must be there.
    check   what must hold between the fields; raises RecordError.
    version is raised whenever a field changes its meaning, so that old files are refused and not misread.
    """

    name: str
    version: int
    fields: Mapping[str, Any]
    check: Callable[[Mapping[str, Any]], None] | None = None

    @classmethod
    def of(cls, kind: type, version: int = 1, name: str | None = None) -> Schema:
        """The schema of a dataclass: its fields and their annotations."""
        return cls(name or kind.__name__.lower(), version, typing.get_type_hints(kind))

    def describe(self) -> dict[str, str]:
        """Field → type in words, for a file's header."""
        return {name: _words(kind) for name, kind in self.fields.items()}

    def validated(self, record: Any) -> dict[str, Any]:
        """The record (mapping or dataclass instance) as plain JSON values; RecordError names what is wrong."""
        if dataclasses.is_dataclass(record) and not isinstance(record, type):
            record = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        if not isinstance(record, Mapping):
            raise RecordError(f"a {self.name!r} record is a mapping or a dataclass, got {type(record).__name__}")
        self._same_names(record)
        plain = {name: self._value(name, record[name], kind) for name, kind in self.fields.items()}
        if self.check is not None:
            self.check(plain)
        return plain

    def _same_names(self, record: Mapping[str, Any]) -> None:
        missing = [name for name in self.fields if name not in record]
        unknown = [str(name) for name in record if name not in self.fields]
        if missing or unknown:
            raise RecordError(
                f"a {self.name!r} record (version {self.version}) lacks {missing or 'nothing'} and has unknown fields "
                f"{unknown or 'none'}: expected exactly {list(self.fields)}"
            )

    def _value(self, name: str, value: Any, kind: Any) -> Any:
        plain = _plain(value)
        if not _fits(plain, kind):
            raise RecordError(f"field {name!r} of a {self.name!r} record is {plain!r}: expected {_words(kind)}")
        if not _finite(plain):
            raise RecordError(
                f"field {name!r} of a {self.name!r} record is not finite ({plain!r}): expected a finite number, "
                "or None in a field that allows it"
            )
        return plain


def _plain(value: Any) -> Any:
    """Numpy scalars and arrays as Python numbers and lists, tuples as lists, also inside lists and mappings."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(kind))
    if origin in (list, tuple):
        item = typing.get_args(kind)[0]
        return isinstance(value, list) and all(_fits(one, item) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if kind in (None, types.NoneType):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(_finite(item) for item in value)
    if isinstance(value, dict):
        return all(_finite(item) for item in value.values())
    return True


def _words(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
