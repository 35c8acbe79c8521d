"""Batches of items, and the columns of calls about items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ._arrays import F64, U64, as_array, ids_and_keys
from ._errors import invalid
from ._results import table


@dataclass(frozen=True)
class Updated:
    """Counts of a change by handle."""

    #: Items that were changed.
    updated: int
    #: Handles whose item was removed meanwhile; nothing was changed for them.
    stale: int


class Batch(dict[str, Any]):
    """Items as a dict: the fields, and ``index`` (handles), ``weight`` and ``version``."""

    #: Priorities of the items, before the exponent.
    priorities: F64
    #: Trajectories; 0 = none.
    trajectories: U64
    #: Tags.
    tags: list[str]
    #: Requested handles whose item was removed.
    missing: U64
    #: Of a sample with ``local=True``: factor of the member's sum of weighted gradients; otherwise ``None``.
    scale: float | None

    @property
    def index(self) -> Any:
        """Handles of the items. A handle is never reused: a stale one reaches no other item."""
        return self["index"]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}: {value.dtype}{list(value.shape)}" for name, value in self.items() if hasattr(value, "dtype"))
        return f"Batch({len(self['index'])} items, {fields})"

    def _repr_html_(self) -> str:
        rows = [(name, getattr(value, "dtype", ""), tuple(getattr(value, "shape", ()))) for name, value in self.items()]
        return table(f"batch of {len(self['index'])} items", ["field", "dtype", "shape"], rows, len(rows))


Handles: TypeAlias = "Batch | npt.ArrayLike"


def names_of(fields: Sequence[str] | None) -> list[str] | None:
    """Checks a selection of fields."""
    if isinstance(fields, str):
        raise invalid(f"fields is {fields!r}; required: a list of names")
    return None if fields is None else [str(field) for field in fields]


def handles_of(handles: Handles) -> U64:
    """Returns the handles of a batch, or of an array."""
    value = handles["index"] if isinstance(handles, Mapping) else handles
    return ids_and_keys("handles", value)[0]


def per_item(name: str, value: object, count: int, dtype: type[np.generic]) -> Any:
    """Returns a column with a number per item; ``None`` without a value."""
    if value is None:
        return None
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array = as_array(name, value)
    allowed = "fiu" if dtype is np.float64 else "ui"
    if array.dtype.kind not in allowed:
        raise invalid(f"{name} has dtype {array.dtype}; allowed: {'real numbers' if dtype is np.float64 else 'integers'}")
    array = np.broadcast_to(array, (count,)) if array.ndim == 0 else array
    if array.shape != (count,):
        raise invalid(f"{name} has shape {array.shape}; required: ({count},), one per item")
    valid = np.isfinite(array) & (array >= 0)
    if not valid.all():
        index = int(np.argmin(valid))
        raise invalid(f"{name}[{index}] is {array[index]}; allowed: finite, at least 0")
    return np.ascontiguousarray(array, dtype=dtype)


def tags_of(tag: str | Sequence[str] | None, count: int) -> list[bytes] | None:
    """Returns a tag per item; ``None`` without any."""
    if tag is None:
        return None
    tags = [tag] * count if isinstance(tag, str) else list(tag)
    if len(tags) != count:
        raise invalid(f"tag has {len(tags)} entries; required: {count}, one per item")
    return [text.encode() for text in tags]
