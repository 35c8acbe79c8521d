"""Items as Arrow tables. Needs the extra ``engram[arrow]``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ._batch import Batch
from ._columns import Field, Schema
from ._errors import invalid

#: Types that Arrow has; bool is packed there, and copied.
TYPES = {
    "bool": pa.bool_(), "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64(),
}  # fmt: skip


def table_of_columns(columns: Mapping[str, Any]) -> Any:
    """Returns the table of arrays and of lists of texts."""
    return pa.table({name: pa.array(column, pa.string() if isinstance(column, list) else None) for name, column in columns.items()})


def table_of(schema: Schema, parts: Sequence[Batch]) -> Any:
    """Returns the table of items: a chunk per part."""
    refused = [field.name for field in schema if field.dtype not in TYPES]
    if refused:
        raise invalid(f"the fields {refused} have types that Arrow lacks; allowed: {', '.join(TYPES)}, or fields= without them")
    columns: dict[str, Any] = {}
    for field in schema:
        columns[field.name] = pa.chunked_array([_column(field, part[field.name]) for part in parts], type=_type(field))
    others: dict[str, Any] = {
        "_handle": ([part.index for part in parts], pa.uint64()),
        "_priority": ([part.priorities for part in parts], pa.float64()),
        "_version": ([part["version"] for part in parts], pa.uint64()),
        "_trajectory": ([part.trajectories for part in parts], pa.uint64()),
        "_tag": ([part.tags for part in parts], pa.string()),
    }
    for name, (values, kind) in others.items():
        columns[name] = pa.chunked_array([pa.array(value, kind) for value in values], type=kind)
    return pa.table(columns)


def _type(field: Field) -> Any:
    row = TYPES[field.dtype] if not field.shape else pa.list_(TYPES[field.dtype], math.prod(field.shape))
    return pa.list_(row) if field.jagged else row


def _column(field: Field, values: Any) -> Any:
    if not field.jagged:
        return _rows(field, values)
    lengths = np.array([len(row) for row in values], np.int32)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), _rows(field, np.concatenate(values) if values else field.empty()))


def _rows(field: Field, values: Any) -> Any:
    """Returns rows of fixed dimensions, without a copy unless they are bool."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), TYPES[field.dtype])
    return flat if not field.shape else pa.FixedSizeListArray.from_arrays(flat, math.prod(field.shape))
