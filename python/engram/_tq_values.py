"""Values of TransferQueue as bytes, and back: tensors, arrays, bytes and JSON. No pickle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ._errors import invalid

#: Kind, dtype and shape of a value: ``("torch", "float32", (3,))``.
Form = tuple[str, str, tuple[int, ...]]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Values:
    """The values of a field, one per row, as bytes."""

    field: str
    forms: list[Form]
    lengths: npt.NDArray[np.uint32]
    data: Bytes

    @property
    def largest(self) -> int:
        """Bytes of the largest value."""
        return int(self.lengths.max(initial=0))


def encode(field: str, values: Any) -> Values:
    """Encodes the rows of a field: a tensor, dense or nested, or a sequence of values."""
    if isinstance(values, torch.Tensor) and not values.is_nested:
        form = ("torch", str(values.dtype).removeprefix("torch."), tuple(values.shape[1:]))
        data = _bytes_of(values)
        return Values(field, [form] * len(values), np.full(len(values), data.size // max(len(values), 1), np.uint32), data)
    rows = values.unbind() if isinstance(values, torch.Tensor) else list(values)
    parts = [_encode(field, value) for value in rows]
    lengths = np.array([data.size for _, data in parts], np.uint32)
    joined = np.concatenate([data for _, data in parts]) if parts else np.empty(0, np.uint8)
    return Values(field, [form for form, _ in parts], lengths, joined)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data: Bytes = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return data


def _encode(field: str, value: Any) -> tuple[Form, Bytes]:
    value = getattr(value, "data", value) if type(value).__name__ == "NonTensorData" else value
    if isinstance(value, torch.Tensor):
        return ("torch", str(value.dtype).removeprefix("torch."), tuple(value.shape)), _bytes_of(value)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        array = np.ascontiguousarray(value)
        return ("numpy", value.dtype.str, tuple(value.shape)), np.frombuffer(array.tobytes(), np.uint8)
    if isinstance(value, (bytes, bytearray)):
        return ("bytes", "", ()), np.frombuffer(bytes(value), np.uint8)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        allowed = "tensors, arrays, bytes, and JSON"
        raise invalid(f"field {field} has a {type(value).__name__}, which is not supported; allowed: {allowed}") from error
    if json.loads(text) != value:
        raise invalid(f"field {field} has a value that JSON changes: {value!r}; allowed: tensors, arrays, bytes, and JSON")
    return ("json", "", ()), np.frombuffer(text.encode(), np.uint8)


def describe(group: Sequence[Values]) -> tuple[npt.NDArray[np.uint32], Bytes]:
    """Returns lengths and bytes of the descriptions of rows: names and forms of their fields."""
    fields = [values.field for values in group]
    count = len(group[0].forms) if group else 0
    if count and all(values.forms.count(values.forms[0]) == count for values in group):
        row = _description(tuple((values.field, values.forms[0]) for values in group))
        return np.full(count, len(row), np.uint32), np.frombuffer(row * count, np.uint8)
    rows = [_description(tuple(zip(fields, forms, strict=True))) for forms in zip(*(values.forms for values in group), strict=True)]
    return np.array([len(row) for row in rows], np.uint32), np.frombuffer(b"".join(rows), np.uint8)


@lru_cache(maxsize=4096)
def _description(fields: tuple[tuple[str, Form], ...]) -> bytes:
    return json.dumps([[field, *form] for field, form in fields], separators=(",", ":")).encode()


@lru_cache(maxsize=4096)
def forms_of(description: bytes) -> dict[str, Form]:
    """Returns the forms of a row's fields, in the order of its columns."""
    return {field: (kind, dtype, tuple(shape)) for field, kind, dtype, shape in json.loads(description)}


def common_row(lengths: npt.NDArray[np.uint32], data: Bytes) -> bytes | None:
    """Returns the row that all rows are equal to; ``None`` if they differ."""
    if not len(lengths) or (lengths != lengths[0]).any():
        return None
    rows = data.reshape(len(lengths), int(lengths[0]))
    return rows[0].tobytes() if (rows == rows[0]).all() else None


def tensors(columns: dict[str, tuple[Form, Bytes]], rows: int) -> dict[str, torch.Tensor] | None:
    """Returns fields whose rows are tensors of one form, as TransferQueue's backends return them: nested with the jagged layout, scalars dense.

    They share the memory of the bytes. ``None`` if a field is none of these, or empty.
    """
    found: dict[str, torch.Tensor] = {}
    for field, ((kind, dtype, shape), data) in columns.items():
        if kind != "torch" or not data.size:
            return None
        if not shape:
            found[field] = _tensor(dtype, (rows,), data)
            continue
        offsets = torch.arange(rows + 1) * shape[0]
        found[field] = torch.nested.nested_tensor_from_jagged(
            _tensor(dtype, (rows * shape[0], *shape[1:]), data), offsets, min_seqlen=shape[0], max_seqlen=shape[0]
        )
    return found


def decode(form: Form, data: Bytes) -> Any:
    """Returns a value; a tensor or an array shares the memory of ``data``."""
    kind, dtype, shape = form
    if kind == "torch":
        return _tensor(dtype, shape, data)
    if kind == "numpy":
        return data.copy().view(np.dtype(dtype)).reshape(shape)
    return data.tobytes() if kind == "bytes" else json.loads(data.tobytes())


def decode_all(form: Form, rows: int, data: Bytes) -> list[Any]:
    """Returns tensors of one form that are packed in ``data``."""
    return list(_tensor(form[1], (rows, *form[2]), data).unbind())


def _tensor(name: str, shape: tuple[int, ...], data: Bytes) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, name)
    if not data.size:
        return torch.empty(shape, dtype=dtype)
    # Values are packed: the start of one need not be a multiple of its type's size.
    aligned = data if data.ctypes.data % dtype.itemsize == 0 else data.copy()
    return torch.from_numpy(aligned).view(dtype).reshape(shape)
