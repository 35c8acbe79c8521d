"""Results of calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from ._arrays import F32, F64, U8, U64

#: Units of the weight 1: weights are integers, so that every sum is exact.
ONE = 1 << 30
#: Rows of a table in a notebook.
SHOWN = 10


def table(title: str, names: Sequence[str], rows: Sequence[Sequence[object]], total: int) -> str:
    """Returns a small HTML table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    more = f"<tr><td colspan='{len(names)}'>... {total - len(rows):,} more</td></tr>" if total > len(rows) else ""
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}{more}</tbody></table>"


@dataclass(frozen=True, eq=False)
class Memories:
    """Memories as columns, in the order of the call."""

    #: Ids.
    ids: U64
    #: Weights in [0, 1], exact: a weight is a multiple of 2^-30.
    weights: F64
    #: Groups.
    groups: U8
    #: Keys; ``None`` for a memory without one.
    keys: list[str | None]
    #: Requested ids that do not exist.
    missing: U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    #: Feature vectors, one row per memory, if they were requested; a memory without features is a row of NaN.
    features: F32 | None = None
    #: Payloads, if they were requested.
    payloads: list[bytes] | None = None
    #: Cosine of features and query times weight, of a recall.
    scores: F32 | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Pairs of id and weight."""
        return iter(zip(self.ids.tolist(), self.weights.tolist(), strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns the columns: id, weight, group, key, and score of a recall."""
        columns = {"id": self.ids, "weight": self.weights, "group": self.groups, "key": self.keys}
        return columns if self.scores is None else {**columns, "score": self.scores}

    def to_arrow(self) -> Any:
        """Returns a ``pyarrow.Table`` with the columns of :meth:`to_dict`. Needs the extra ``engram[arrow]``."""
        from ._arrow import table_of_columns

        return table_of_columns(self.to_dict())

    def to_pandas(self) -> Any:
        """Returns a ``pandas.DataFrame`` with the columns of :meth:`to_dict`. Needs pandas."""
        import pandas

        return pandas.DataFrame(self.to_dict())

    def to_numpy(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Returns a structured array with the fields ``id``, ``weight`` and ``group``."""
        rows = np.empty(len(self), [("id", np.uint64), ("weight", np.float64), ("group", np.uint8)])
        rows["id"], rows["weight"], rows["group"] = self.ids, self.weights, self.groups
        return rows

    def __repr__(self) -> str:
        shown = ", ".join(f"{id}: {weight:.4f}" for id, weight in zip(self.ids[:SHOWN], self.weights, strict=False))
        more = ", ..." if len(self) > SHOWN else ""
        return f"Memories({len(self)}: {{{shown}{more}}})"

    def _repr_html_(self) -> str:
        columns = self.to_dict()
        rows = [[column[row] for column in columns.values()] for row in range(min(len(self), SHOWN))]
        return table(f"{len(self):,} memories", list(columns), rows, len(self))


@dataclass(frozen=True)
class WriteResult:
    """Counts of a write."""

    #: Rows or updates applied.
    applied: int
    #: Memories created.
    created: int
    #: Memories evicted or removed.
    evicted: int
    #: Rows or updates that were not applied.
    rejected: int
    #: The first rejected ids with their reasons: ``unknown``, ``key collision``, ``key mismatch``.
    rejections: tuple[tuple[int, str], ...] = ()

    @classmethod
    def of(cls, counts: tuple[int, int, int, int, list[tuple[int, str]]]) -> WriteResult:
        """Converts the counts of the native module."""
        applied, created, evicted, rejected, rejections = counts
        return cls(applied, created, evicted, rejected, tuple(rejections))


@dataclass(frozen=True)
class GroupQuality:
    """Weights of a group; of all memories where ``group`` is ``None``."""

    group: int | None
    count: int
    #: Sum of the weights in units of 2^-30.
    units: int
    minimum: float
    maximum: float

    @property
    def mean(self) -> float:
        """Mean weight in [0, 1]; NaN without memories."""
        return self.units / (self.count * ONE) if self.count else float("nan")


@dataclass(frozen=True)
class Quality(Mapping[int, GroupQuality]):
    """Weights per group: a mapping from group to :class:`GroupQuality`."""

    groups: tuple[GroupQuality, ...]

    @classmethod
    def of(cls, figures: list[tuple[int, int, int, int, int]]) -> Quality:
        """Converts the figures of the native module."""
        return cls(tuple(GroupQuality(g, count, units, low / ONE, high / ONE) for g, count, units, low, high in figures))

    def __getitem__(self, group: int) -> GroupQuality:
        for quality in self.groups:
            if quality.group == group:
                return quality
        raise KeyError(group)

    def __iter__(self) -> Iterator[int]:
        return (quality.group for quality in self.groups if quality.group is not None)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def total(self) -> GroupQuality:
        """Weights of all memories."""
        count, units = sum(q.count for q in self.groups), sum(q.units for q in self.groups)
        low = min((q.minimum for q in self.groups), default=float("nan"))
        high = max((q.maximum for q in self.groups), default=float("nan"))
        return GroupQuality(None, count, units, low, high)

    def _repr_html_(self) -> str:
        rows = [(q.group, f"{q.count:,}", f"{q.mean:.6f}", f"{q.minimum:.6f}", f"{q.maximum:.6f}") for q in self.groups]
        return table("quality", ["group", "memories", "mean", "minimum", "maximum"], rows, len(rows))


@dataclass(frozen=True)
class Digest:
    """Digest of all memories: equal on any number of workers, partitions and devices."""

    #: 32 hex digits.
    digest: str
    #: Number of memories.
    memories: int


@dataclass(frozen=True)
class Worker:
    """A worker of the cluster."""

    ordinal: int
    address: str
    alive: bool
    #: Number of partitions that it is primary of.
    primaries: int


@dataclass(frozen=True)
class ClusterStatus:
    """Workers and partitions of a cluster."""

    cluster: str
    name: str
    partitions: int
    workers: tuple[Worker, ...]
    #: Elements of a feature vector; 0 = the cluster has no features.
    dimension: int

    def _repr_html_(self) -> str:
        rows = [(w.ordinal, w.address, "alive" if w.alive else "dead", w.primaries) for w in self.workers]
        return table(f"cluster {self.name}", ["worker", "address", "state", "primaries"], rows, len(rows))
