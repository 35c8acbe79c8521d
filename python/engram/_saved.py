"""Files with the items of a buffer: npz, without pickle, as ``engram buffer export`` and ``engram buffer import`` have them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._arrays import U64
from ._batch import Batch
from ._columns import OPAQUE, Schema, split_rows
from ._errors import invalid

#: Handles per read of a saved buffer.
SAVED = 4096
#: Rows per item of a jagged field are in an array with this suffix.
ROWS = ".rows"
#: Arrays that are no fields.
HANDLE, PRIORITY, VERSION, TRAJECTORY, TAG, WEIGHT = "_handle", "_priority", "_version", "_trajectory", "_tag", "_weight"
#: Type of bfloat16 elements in the header of an array.
BFLOAT16 = "<V2"


def chunks(handles: U64) -> Iterator[U64]:
    """Yields the handles of each read."""
    for start in range(0, len(handles), SAVED):
        yield handles[start : start + SAVED]


def write(path: str | os.PathLike[str], schema: Schema, parts: Sequence[Batch]) -> int:
    """Writes items, and returns their number."""
    columns: dict[str, npt.NDArray[Any]] = {}
    for field in schema:
        values: list[Any] = [part[field.name] for part in parts]
        if field.jagged:
            rows = [row for value in values for row in value]
            columns[field.name] = np.concatenate(rows) if rows else field.empty()
            columns[field.name + ROWS] = np.array([len(row) for row in rows], np.uint32)
        else:
            columns[field.name] = np.concatenate(values) if values else field.empty()
        if field.dtype == "bfloat16":
            columns[field.name] = columns[field.name].view(OPAQUE)
    tags = [tag.encode() for part in parts for tag in part.tags]
    others: dict[str, npt.NDArray[Any]] = {
        HANDLE: np.concatenate([np.empty(0, np.uint64), *(part.index for part in parts)]),
        PRIORITY: np.concatenate([np.empty(0), *(part.priorities for part in parts)]),
        VERSION: np.concatenate([np.empty(0, np.uint64), *(part["version"] for part in parts)]),
        TRAJECTORY: np.concatenate([np.empty(0, np.uint64), *(part.trajectories for part in parts)]),
        TAG: np.frombuffer(b"".join(tags), np.uint8),
        TAG + ROWS: np.array([len(tag) for tag in tags], np.uint32),
    }
    taken = sorted(set(columns) & {*others, WEIGHT})
    if taken:
        raise invalid(f"the fields {taken} have names of other arrays of the file; allowed: other names")
    _write_arrays(path, {**columns, **others})
    return sum(len(part.index) for part in parts)


def _write_arrays(path: str | os.PathLike[str], arrays: dict[str, npt.NDArray[Any]]) -> None:
    name = os.fspath(path)
    with zipfile.ZipFile(name if name.endswith(".npz") else f"{name}.npz", "w") as archive:
        for array_name, array in arrays.items():
            with archive.open(f"{array_name}.npy", "w", force_zip64=True) as file:
                kind = BFLOAT16 if array.dtype == OPAQUE else array.dtype.str
                head = {"descr": kind, "fortran_order": False, "shape": array.shape}
                np.lib.format.write_array_header_1_0(file, head)  # type: ignore[no-untyped-call, unused-ignore]
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Reads fields, priorities, and the options of the append."""
    with np.load(path, allow_pickle=False) as file:
        if not hasattr(file, "files"):
            raise invalid(f"{os.fspath(path)} is a single array; allowed: an npz file of ReplayBuffer.save or engram buffer export")
        arrays = {name: file[name] for name in file.files}
    arrays.pop(HANDLE, None)
    arrays.pop(WEIGHT, None)
    meta = {"version": arrays.pop(VERSION, None), "trajectory": arrays.pop(TRAJECTORY, None)}
    priorities, tags, lengths = arrays.pop(PRIORITY, None), arrays.pop(TAG, None), arrays.pop(TAG + ROWS, None)
    if tags is not None and lengths is not None:
        meta["tag"] = [row.tobytes().decode(errors="replace") for row in _rows(TAG, lengths, tags)]
    fields = [name for name in arrays if not (name.endswith(ROWS) and name.removesuffix(ROWS) in arrays)]
    if not fields or any(name.startswith("#") or name.endswith(ROWS) for name in fields):
        found = ", ".join(arrays) or "no arrays"
        required = f"an array per field, rows per item of a jagged one in FIELD{ROWS}, and {PRIORITY}, {VERSION}, {TRAJECTORY}, {TAG}, {TAG}{ROWS}"
        raise invalid(f"{os.fspath(path)} has {found}; allowed: {required}")
    data = {name: _rows(name, arrays[name + ROWS], arrays[name]) if name + ROWS in arrays else arrays[name] for name in fields}
    return data, priorities, meta


def _rows(name: str, lengths: Any, values: Any) -> list[Any]:
    """Returns an array per item of a jagged field."""
    if lengths.ndim != 1 or lengths.dtype.kind not in "ui" or int(lengths.sum()) != len(values):
        raise invalid(f"array {name} has {len(values)} rows; allowed: the sum of {name}{ROWS}")
    return split_rows(lengths, values)
