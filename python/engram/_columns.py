"""Fields of a replay buffer: from arrays to bytes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._arrays import as_array
from ._errors import invalid

#: Items: an array per field, with one row per item. A TensorDict is one, too.
Data: TypeAlias = "Mapping[str, Any]"
#: Types of fields, as NumPy names them. ``bfloat16`` needs ml_dtypes in NumPy.
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


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the type of a name; without ml_dtypes ``bfloat16`` is its bits, uint16."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(np.uint16)
    bits: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bits


def to_numpy(data: Data) -> dict[str, Any]:
    """Returns the fields of a dict or a TensorDict, with tensors as arrays."""
    if not isinstance(data, Mapping) and not hasattr(data, "items"):
        raise invalid(f"data is a {type(data).__name__}; required: a mapping from field to array")
    return {str(name): _plain(value) for name, value in data.items()}


def _plain(value: Any) -> Any:
    """Returns a tensor as array; bfloat16 tensors as their bits with the type of ml_dtypes."""
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "detach"):
        return [_plain(row) for row in value]
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        return tensor.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def _is_jagged(value: Any) -> bool:
    """Whether a value is a list of arrays of different lengths."""
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
        if array.dtype.name not in DTYPES:
            raise invalid(f"field {name} has dtype {array.dtype}; allowed: {', '.join(DTYPES)}")
        if array.ndim == 0:
            raise invalid(f"field {name} is a single value; required: one row per item")
        schema.append(Field(name, array.dtype.name, array.shape[1:], jagged))
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
    counts = {column.field.name: len(column.values if column.lengths is None else column.lengths) for column in encoded}
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
    if array.dtype != numpy_dtype(field.dtype):
        # Python's numbers have no type of their own.
        if isinstance(value, np.ndarray) or not np.can_cast(array.dtype, numpy_dtype(field.dtype), "same_kind"):
            raise _mismatch(field, f"{array.dtype}{list(array.shape[1:])}")
        array = array.astype(numpy_dtype(field.dtype))
    return array


def _mismatch(field: Field, found: str) -> Exception:
    return invalid(f"field {field.name} has {found} per item; the buffer has {field.describe()}")


def decode(columns: Sequence[tuple[str, str, list[int], npt.NDArray[np.uint32] | None, npt.NDArray[np.uint8]]]) -> dict[str, Any]:
    """Returns the fields of a batch, without a copy; a jagged field is a list of arrays."""
    fields: dict[str, Any] = {}
    for name, dtype, shape, lengths, data in columns:
        kind = numpy_dtype(dtype)
        rows = data.size // (kind.itemsize * max(int(np.prod(shape)), 1)) if np.prod(shape) else 0
        values = data.view(kind).reshape(rows, *shape)
        fields[name] = values if lengths is None else np.split(values, np.cumsum(lengths)[:-1])
    return fields
