"""Files with the items of a buffer: npz, without pickle."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ._arrays import U64
from ._batch import Batch
from ._columns import Schema

#: Handles per read of a saved buffer.
SAVED = 4096


def chunks(handles: U64) -> Iterator[U64]:
    """Yields the handles of each read."""
    for start in range(0, len(handles), SAVED):
        yield handles[start : start + SAVED]


def write(path: str | os.PathLike[str], schema: Schema, parts: Sequence[Batch]) -> int:
    """Writes items, and returns their number."""
    columns: dict[str, Any] = {}
    for field in schema:
        values: list[Any] = [part[field.name] for part in parts]
        if field.jagged:
            rows = [row for value in values for row in value]
            columns[f"{field.name}.lengths"] = np.array([len(row) for row in rows], np.uint32)
            columns[f"{field.name}.values"] = np.concatenate(rows) if rows else field.empty()
        else:
            columns[f"{field.name}.data"] = np.concatenate(values) if values else field.empty()
    for name in ("priorities", "trajectories"):
        columns[f"#{name}"] = np.concatenate([getattr(part, name) for part in parts]) if parts else np.empty(0)
    columns["#versions"] = np.concatenate([part["version"] for part in parts]) if parts else np.empty(0, np.uint64)
    tags = [tag for part in parts for tag in part.tags]
    columns["#tags"] = np.array(tags if tags else [""], np.str_)
    np.savez(path, **columns)  # type: ignore[arg-type, unused-ignore]
    return sum(len(part.index) for part in parts)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Reads fields, priorities, and the options of the append."""
    with np.load(path, allow_pickle=False) as file:
        data: dict[str, Any] = {}
        for name in file.files:
            field, _, kind = name.rpartition(".")
            if kind == "data":
                data[field] = file[name]
            elif kind == "lengths":
                data[field] = np.split(file[f"{field}.values"], np.cumsum(file[name])[:-1])
        meta = {"trajectory": file["#trajectories"].astype(np.uint64), "version": file["#versions"].astype(np.uint64)}
        return data, file["#priorities"], {**meta, "tag": [str(tag) for tag in file["#tags"]]}
