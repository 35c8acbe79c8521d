"""Fields of a replay buffer: from arrays to bytes, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._arrays import as_array
from ._errors import invalid

#: Items: an array per field, with one row per item. A TensorDict is one, too.
Data: TypeAlias = "Mapping[str, Any]"
#: Types of fields, as NumPy names them. NumPy has ``bfloat16`` with ml_dtypes; without it arrays of it are opaque elements of two bytes.
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128",
)  # fmt: skip


@dataclass(frozen=True)
class Field:
    """Name, type and shape of a field."""

    name: str
    dtype: str
    #: Fixed dimensions.
    shape: tuple[int, ...]
    #: Whether a first dimension of any length precedes them.
    jagged: bool

    def parts(self) -> tuple[str, str, list[int], bool]:
        """Returns the field for the native module."""
        return (self.name, self.dtype, list(self.shape), self.jagged)

    def describe(self) -> str:
        """Returns type and shape of one item: ``float32[*, 3]``."""
        sizes = [*(["*"] if self.jagged else []), *map(str, self.shape)]
        return f"{self.dtype}[{', '.join(sizes)}]"

    def empty(self) -> npt.NDArray[Any]:
        """Returns an array of no rows."""
        return np.empty((0, *self.shape), numpy_dtype(self.dtype))


Schema: TypeAlias = list[Field]

#: Type of bfloat16 elements where ml_dtypes is not installed, and in npz files.
OPAQUE = np.dtype("V2")
#: Bytes of an item with its fields, its tag and its head.
MAX_ITEM_BYTES = 4 << 20
HEAD_BYTES = 17
MAX_TAG_BYTES = 255


@dataclass(frozen=True)
class Encoded:
    """The elements of a field, as bytes."""

    field: Field
    #: Rows of an item, of a jagged field.
    lengths: npt.NDArray[np.uint32] | None
    #: One row per item, or per row of an item.
    values: npt.NDArray[Any]

    def rows(self, items: slice) -> tuple[str, str, list[int], list[int] | None, npt.NDArray[np.uint8]]:
        """Returns the column of some items for the native module, without a copy."""
        values, lengths = self.values, None
        if self.lengths is None:
            values = values[items]
        else:
            lengths = self.lengths[items].tolist()
            start = int(self.lengths[: items.start].sum())
            values = values[start : start + sum(lengths)]
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return (self.field.name, self.field.dtype, list(self.field.shape), lengths, flat)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: the item, or a row of a jagged item."""
        return self.values.dtype.itemsize * math.prod(self.field.shape)

    @property
    def count(self) -> int:
        """Number of items."""
        return len(self.values if self.lengths is None else self.lengths)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the type of a name."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return OPAQUE
    bits: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bits


def name_of(dtype: np.dtype[Any]) -> str:
    """Returns the name of a type."""
    return "bfloat16" if dtype == OPAQUE else dtype.name


def to_numpy(data: Data) -> dict[str, Any]:
    """Returns the fields of a dict or a TensorDict, with tensors as arrays."""
    if not isinstance(data, Mapping) and not hasattr(data, "items"):
        raise invalid(f"data is a {type(data).__name__}; required: a mapping from field to array")
    return {str(name): _plain(str(name), value) for name, value in data.items()}


def _plain(name: str, value: Any) -> Any:
    """Returns a tensor as array."""
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "detach"):
        rows = [_plain(name, row) for row in value]
        return Jagged(rows) if isinstance(value, Jagged) else rows
    if isinstance(value, Mapping):
        raise invalid(f"field {name} is nested; allowed: arrays and tensors, for example of TensorDict.flatten_keys")
    if not hasattr(value, "detach"):
        return value
    if getattr(value, "is_nested", False):
        return Jagged(_plain(name, row) for row in value.unbind())
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return tensor.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


class Jagged(list[Any]):
    """The arrays of a jagged field, which may be of equal lengths."""


def _is_jagged(value: Any) -> bool:
    """Whether a value is a list of arrays of different lengths."""
    if isinstance(value, Jagged) and value:
        return True
    if isinstance(value, np.ndarray) or not isinstance(value, (list, tuple)) or not value:
        return False
    rows = [np.shape(row) for row in value]
    return len(rows[0]) > 0 and len({row[0] if row else None for row in rows}) > 1


def infer(columns: Mapping[str, Any]) -> Schema:
    """Returns the fields that a first write declares."""
    if not columns:
        raise invalid("data has no fields; required: at least one")
    schema = []
    for name, value in columns.items():
        jagged = _is_jagged(value)
        array = as_array(f"field {name}", value[0] if jagged else value)
        if name_of(array.dtype) not in DTYPES:
            raise invalid(f"field {name} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
        if array.ndim == 0:
            raise invalid(f"field {name} is a single value; required: one row per item")
        schema.append(Field(name, name_of(array.dtype), array.shape[1:], jagged))
    return schema


def encode(schema: Schema, columns: Mapping[str, Any]) -> tuple[int, list[Encoded]]:
    """Returns the number of items, and their columns; checks both against the schema."""
    unknown = [name for name in columns if name not in {field.name for field in schema}]
    absent = [field.name for field in schema if field.name not in columns]
    if unknown or absent:
        names = ", ".join(field.name for field in schema)
        problem = f"unknown fields {unknown}" if unknown else f"no fields {absent}"
        raise invalid(f"data has {problem}; required: {names}")
    encoded = [_encode(field, columns[field.name]) for field in schema]
    counts = {column.field.name: column.count for column in encoded}
    if len(set(counts.values())) != 1:
        raise invalid(f"the fields have different numbers of items: {counts}")
    return next(iter(counts.values())), encoded


def _encode(field: Field, value: Any) -> Encoded:
    if not field.jagged:
        array = _typed(field, value)
        if array.shape[1:] != field.shape:
            raise _mismatch(field, f"{array.dtype}{list(array.shape[1:])}")
        return Encoded(field, None, array)
    rows = [_typed(field, row) for row in value]
    wrong = [row for row in rows if row.shape[1:] != field.shape]
    if wrong:
        raise _mismatch(field, f"{wrong[0].dtype}[*, {', '.join(map(str, wrong[0].shape[1:]))}]")
    lengths = np.array([len(row) for row in rows], np.uint32)
    return Encoded(field, lengths, np.concatenate(rows) if rows else field.empty())


def _typed(field: Field, value: Any) -> npt.NDArray[Any]:
    array = as_array(f"field {field.name}", value)
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(numpy_dtype(field.dtype))
    if array.ndim == 0:
        raise _mismatch(field, f"a single {array.dtype}")
    if field.dtype == "bfloat16" and array.dtype == OPAQUE:
        array = array.view(numpy_dtype("bfloat16"))
    if array.dtype != numpy_dtype(field.dtype):
        # Python's numbers have no type of their own.
        if isinstance(value, np.ndarray) or not np.can_cast(array.dtype, numpy_dtype(field.dtype), "same_kind"):
            raise _mismatch(field, f"{array.dtype}{list(array.shape[1:])}")
        array = array.astype(numpy_dtype(field.dtype))
    return array


def _mismatch(field: Field, found: str) -> Exception:
    return invalid(f"field {field.name} has {found} per item; the buffer has {field.describe()}")


def check_sizes(encoded: Sequence[Encoded], count: int, tags: Sequence[bytes] | None) -> None:
    """Refuses tags and items that are too large for the cluster."""
    bytes_of = np.full(count, HEAD_BYTES, np.int64)
    for column in encoded:
        bytes_of += column.row_bytes if column.lengths is None else 4 + column.lengths.astype(np.int64) * column.row_bytes
    if tags is not None:
        lengths = np.array([len(tag) for tag in tags], np.int64)
        if (lengths > MAX_TAG_BYTES).any():
            row = int(np.argmax(lengths > MAX_TAG_BYTES))
            raise invalid(f"tag[{row}]: {lengths[row]} bytes are not allowed; allowed: at most {MAX_TAG_BYTES}")
        bytes_of += lengths
    if (bytes_of > MAX_ITEM_BYTES).any():
        row = int(np.argmax(bytes_of > MAX_ITEM_BYTES))
        raise invalid(f"item {row}: {bytes_of[row]} bytes are not allowed; allowed: at most {MAX_ITEM_BYTES} with its tag")


def split_rows(lengths: npt.NDArray[np.uint32], values: npt.NDArray[Any]) -> Jagged:
    """Returns an array per item of a jagged field, without a copy."""
    return Jagged(np.split(values, np.cumsum(lengths, dtype=np.int64)[:-1]) if len(lengths) else [])


def decode(columns: Sequence[tuple[str, str, list[int], npt.NDArray[np.uint32] | None, npt.NDArray[np.uint8]]]) -> dict[str, Any]:
    """Returns the fields of a batch, without a copy; a jagged field is a list of arrays."""
    fields: dict[str, Any] = {}
    for name, dtype, shape, lengths, data in columns:
        kind = numpy_dtype(dtype)
        rows = data.size // (kind.itemsize * max(int(np.prod(shape)), 1)) if np.prod(shape) else 0
        values = data.view(kind).reshape(rows, *shape)
        fields[name] = values if lengths is None else split_rows(lengths, values)
    return fields
