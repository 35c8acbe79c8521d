"""The interface of Reverb over replay buffers of a cluster: replace ``import reverb`` by ``from engram import reverb``.

>>> from engram import reverb
>>> table = reverb.Table("train", reverb.selectors.Prioritized(0.8), reverb.selectors.Fifo(), 1_000, reverb.rate_limiters.MinSize(1))
>>> with reverb.Server([table]) as server:
...     client = server.localhost_client()
...     client.insert([0, 1.5], priorities={"train": 1.0})
...     ((sample,),) = client.sample("train", num_samples=1)
...     client.mutate_priorities("train", updates={sample.info.key: 2.0})
...     [value.item() for value in sample.data]
[0, 1.5]

A :class:`Server` starts a local cluster, or uses the one of ``db``; a :class:`Client` in another process connects to ``server.address``. Items
survive the end of a worker; keys are handles, which are never reused. TensorFlow data sets, priority tables, extensions, chunk settings and
selectors by heap are not supported: that is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Literal, cast

import numpy as np

from . import _samplers
from ._database import Database, connect
from ._errors import create, invalid
from ._replay import ReplayBuffer

#: Separates the levels of nested data in the names of fields.
SEPARATOR = "/"


@dataclass(frozen=True)
class _Remover:
    name: Literal["lowest_priority", "highest_priority"]


def _ratio(samples_per_insert: float, min_size_to_sample: int, error_buffer: float) -> _samplers.SampleToInsert:
    return _samplers.SampleToInsert(samples_per_insert, min_size_to_sample, float(error_buffer))


#: Samplers and removers.
selectors = SimpleNamespace(
    Prioritized=lambda priority_exponent: _samplers.Prioritized(alpha=priority_exponent),
    Uniform=_samplers.Uniform,
    Fifo=_samplers.Fifo,
    Lifo=_samplers.Lifo,
    MinHeap=lambda: _Remover("lowest_priority"),
    MaxHeap=lambda: _Remover("highest_priority"),
)
def _queue(size: int) -> _samplers.Bounds:
    if size < 2:
        raise invalid(f"size of a queue or stack is {size}; allowed: at least 2")
    return _samplers.Bounds(1.0, 1, 0.0, float(size))


#: Rate limiters. ``Queue`` and ``Stack`` keep at most ``size`` items that were not sampled: inserts wait for samples.
rate_limiters = SimpleNamespace(
    MinSize=lambda min_size_to_sample: _samplers.MinSize(min_size_to_sample), SampleToInsertRatio=_ratio, Queue=_queue, Stack=_queue
)


@dataclass(frozen=True)
class Table:
    """Settings of a table, which becomes a replay buffer."""

    name: str
    sampler: Any
    remover: Any
    max_size: int
    rate_limiter: Any
    max_times_sampled: int = 0
    signature: object = None

    @classmethod
    def queue(cls, name: str, max_size: int, signature: object = None) -> Table:
        """Returns a table whose items are sampled once, the oldest first; inserts wait for room."""
        return cls(name, selectors.Fifo(), selectors.Fifo(), max_size, rate_limiters.Queue(max_size), 1, signature)

    @classmethod
    def stack(cls, name: str, max_size: int, signature: object = None) -> Table:
        """Returns a table whose items are sampled once, the newest first; inserts wait for room."""
        return cls(name, selectors.Lifo(), selectors.Lifo(), max_size, rate_limiters.Stack(max_size), 1, signature)

    def settings(self) -> dict[str, Any]:
        """Returns the settings of the buffer."""
        removers = {_samplers.Fifo(): "fifo", _samplers.Lifo(): "lifo", selectors.MinHeap(): "lowest_priority", selectors.MaxHeap(): "highest_priority"}
        if self.remover not in removers:
            raise invalid(f"remover of table {self.name} is {self.remover!r}; allowed: Fifo, Lifo, MinHeap, MaxHeap")
        if isinstance(self.sampler, _Remover):
            raise invalid(f"sampler of table {self.name} is a heap; allowed: Prioritized, Uniform, Fifo, Lifo")
        remover, reuse = removers[self.remover], max(self.max_times_sampled, 0)
        return {"capacity": self.max_size, "sampler": self.sampler, "remover": remover, "max_reuse": reuse, "limiter": self.rate_limiter}


class Server:
    """Tables on a cluster: a local one that it starts, or that of ``db``. ``port`` is accepted and not used: see :attr:`address`."""

    def __init__(self, tables: Sequence[Table], port: int | None = None, *, db: Database | None = None) -> None:
        for table in tables:
            table.settings()
        self._owned = db is None
        self.db, self.tables = connect() if db is None else db, {table.name: table for table in tables}

    @property
    def address(self) -> str:
        """Address for a :class:`Client` in another process."""
        return "grpc://" + ",".join(worker.address for worker in self.db.status().workers)

    def localhost_client(self) -> Client:
        """Returns a client."""
        return Client(self)

    def stop(self) -> None:
        """Stops the cluster if this object started it."""
        if self._owned:
            self.db.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


@dataclass(frozen=True)
class SampleInfo:
    """What is known of a sampled item."""

    key: int
    priority: float
    table_size: int
    #: Importance weight with the exponent that :class:`Client` was made with.
    weight: float


@dataclass(frozen=True)
class ReplaySample:
    """An item, or one step of it."""

    info: SampleInfo
    data: Any


class Client:
    """Writes to tables, and samples them. A client by address needs the ``tables`` that it writes to and samples from."""

    def __init__(self, server_address: str | Server, *, tables: Sequence[Table] = (), beta: float = 1.0) -> None:
        if isinstance(server_address, Server):
            self.db, self._tables = server_address.db, server_address.tables
        else:
            address = server_address if "://" in server_address else f"grpc://{server_address}"
            self.db, self._tables = connect(address), {table.name: table for table in tables}
        self._beta = beta
        self._buffers: dict[str, ReplayBuffer] = {}

    def insert(self, data: Any, priorities: Mapping[str, float]) -> None:
        """Appends one item of one step to tables, each with its priority."""
        columns = {name: np.asarray(value)[None] for name, value in _flatten(data)}
        for table, priority in priorities.items():
            self._buffer(table, {name: (value.dtype, value.shape[1:]) for name, value in columns.items()}).extend(columns, [priority])

    def trajectory_writer(self, num_keep_alive_refs: int) -> TrajectoryWriter:
        """Returns a writer of items of several steps."""
        return TrajectoryWriter(self, num_keep_alive_refs)

    def sample(self, table: str, num_samples: int = 1, *, emit_timesteps: bool = True, timeout: float | None = None) -> Iterator[Any]:
        """Yields items: each as list of its steps, or with ``emit_timesteps=False`` as one sample."""
        buffer = self._buffer(table)
        batch = buffer.sample(num_samples, beta=self._beta, timeout=timeout)
        size, names = len(buffer), [name for name in batch if name not in ("index", "weight", "version")]
        for row in range(len(batch.index)):
            info = SampleInfo(int(batch.index[row]), float(batch.priorities[row]), size, float(batch["weight"][row]))
            item = {name: batch[name][row] for name in names}
            if not emit_timesteps:
                yield ReplaySample(info, _unflatten(item))
            elif isinstance(batch[names[0]], list):
                steps = len(item[names[0]])
                yield [ReplaySample(info, _unflatten({name: item[name][step] for name in names})) for step in range(steps)]
            else:
                yield [ReplaySample(info, _unflatten(item))]

    def mutate_priorities(self, table: str, updates: Mapping[int, float] | None = None, deletes: Sequence[int] | None = None) -> None:
        """Sets priorities and deletes items by key; keys of items that are gone are left out."""
        buffer = self._buffer(table)
        if updates:
            buffer.update_priority(np.array(list(updates), np.uint64), list(updates.values()))
        if deletes:
            buffer.delete(np.array(deletes, np.uint64))

    def reset(self, table: str) -> None:
        """Deletes all items of a table."""
        self._buffer(table).drop()
        del self._buffers[table]

    def server_info(self) -> dict[str, dict[str, Any]]:
        """Returns the figures of every table that has been written to."""
        names = [name for name in self._tables if len(self._buffer(name))]
        return {name: self._buffer(name).stats() for name in names}

    def _buffer(self, name: str, fields: Mapping[str, Any] | None = None) -> ReplayBuffer:
        if name not in self._tables:
            raise create("NotFound", f"no table {name!r}; allowed: {', '.join(self._tables) or 'none: give tables= to Client'}", "ENG-0508")
        buffer = self._buffers.get(name)
        if buffer is None or (fields is not None and buffer not in self._declared):
            buffer = ReplayBuffer(self.db, name, fields=fields, **self._tables[name].settings())
            self._buffers[name] = buffer
            if fields is not None:
                self._declared.append(buffer)
        return buffer

    @property
    def _declared(self) -> list[ReplayBuffer]:
        return cast("list[ReplayBuffer]", self.__dict__.setdefault("_with_fields", []))


class TrajectoryWriter:
    """Writes items of several steps: ``append`` each step, then ``create_item`` of slices of ``history``."""

    def __init__(self, client: Client, num_keep_alive_refs: int) -> None:
        if num_keep_alive_refs < 1:
            raise invalid(f"num_keep_alive_refs is {num_keep_alive_refs}; allowed: at least 1")
        self._client, self._kept = client, num_keep_alive_refs
        #: The last steps, by field.
        self.history: dict[str, list[Any]] = {}

    def append(self, data: Mapping[str, Any]) -> None:
        """Appends a step."""
        for name, value in _flatten(data):
            column = self.history.setdefault(name, [])
            column.append(np.asarray(value))
            del column[: -self._kept]

    def create_item(self, table: str, priority: float, trajectory: Mapping[str, Sequence[Any]]) -> None:
        """Stores an item: for each field the steps that it has."""
        rows = {name: np.stack(list(steps)) for name, steps in trajectory.items()}
        fields = {name: (steps.dtype, (None, *steps.shape[1:])) for name, steps in rows.items()}
        self._client._buffer(table, fields).extend({name: [steps] for name, steps in rows.items()}, [priority])

    def end_episode(self) -> None:
        """Forgets the history."""
        self.history.clear()

    def flush(self) -> None:
        """Does nothing: an item is stored when :meth:`create_item` returns."""

    def __enter__(self) -> TrajectoryWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.end_episode()


def _flatten(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested data with their names; positions of lists are numbers."""
    if isinstance(data, Mapping):
        pairs: Any = data.items()
    elif isinstance(data, (list, tuple)):
        pairs = enumerate(data)
    else:
        yield prefix or "data", data
        return
    for name, value in pairs:
        yield from _flatten(value, f"{prefix}{SEPARATOR}{name}" if prefix else str(name))


def _unflatten(leaves: Mapping[str, Any]) -> Any:
    """Returns nested data: names that are numbers become lists."""
    if set(leaves) == {"data"}:
        return leaves["data"]
    groups: dict[str, dict[str, Any]] = {}
    for name, value in leaves.items():
        head, _, rest = name.partition(SEPARATOR)
        groups.setdefault(head, {})[rest] = value
    nested = {head: rest[""] if set(rest) == {""} else _unflatten(rest) for head, rest in groups.items()}
    if all(head.isdigit() for head in nested):
        return [nested[head] for head in sorted(nested, key=int)]
    return nested
