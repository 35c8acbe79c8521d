"""``ReplayBuffer``: experience on a cluster."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _engram
from ._aio import twin
from ._arrays import F64, U64, Timeout, as_array, ids_and_keys, seconds
from ._columns import Data, Schema, encode, infer, to_numpy
from ._columns import decode as decode
from ._database import Database, one_of
from ._errors import NotFoundError, create, invalid
from ._results import table

#: How long single items are collected before they are sent, in seconds.
GROUPING_SECONDS = 0.005
#: Single items that are sent at once at the latest.
GROUPED = 1024
#: Items per append: more are split.
APPENDED = 4096
#: Handles per read of a saved buffer.
SAVED = 4096
#: Interval of checks whether another process has created the buffer: a cluster does not notify of new buffers.
POLL_SECONDS = 0.05
#: How long a sample waits for items by default, in seconds.
WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class Prioritized:
    """Draws in proportion to ``priority ** alpha``, with replacement; ``weight`` is the importance weight with exponent ``beta``."""

    alpha: float = 0.6
    beta: float = 0.4


@dataclass(frozen=True)
class Uniform:
    """Draws every item alike, with replacement."""


@dataclass(frozen=True)
class Fifo:
    """Returns the oldest items."""


@dataclass(frozen=True)
class Lifo:
    """Returns the newest items."""


@dataclass(frozen=True)
class Slices:
    """Draws slices of ``length`` consecutive items of one trajectory."""

    length: int


@dataclass(frozen=True)
class Groups:
    """Returns the oldest complete groups of ``n`` items with the same ``trajectory``, as the answers to one prompt."""

    n: int


Sampler: TypeAlias = "Prioritized | Uniform | Fifo | Lifo | Slices | Groups"


@dataclass(frozen=True)
class SampleToInsert:
    """Keeps ``ratio`` samples per insert: who is ahead waits. Samples wait for ``min_size`` items.

    ``error`` is how far, in samples, the ratio may be left; by default a tenth of ``min_size`` inserts, at least two inserts.
    """

    ratio: float
    min_size: int = 1
    error: float | None = None

    def parts(self) -> tuple[float, int, float, float]:
        """Returns ratio, minimum size, and the bounds of the difference."""
        if not self.ratio > 0:
            raise invalid(f"limiter.ratio is {self.ratio}; allowed: above 0")
        error = max(2.0, 0.1 * self.min_size) * max(self.ratio, 1.0) if self.error is None else self.error
        middle = self.min_size * self.ratio
        return (self.ratio, self.min_size, middle - error, middle + error)


@dataclass(frozen=True)
class MinSize:
    """Samples wait for ``min_size`` items; appends never wait."""

    min_size: int

    def parts(self) -> tuple[float, int, float, float]:
        """Returns ratio, minimum size, and the bounds of the difference."""
        return (1.0, self.min_size, -1e300, 1e300)


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


class Member(Protocol):
    """A member of a group of learners that draw from one plan."""

    @property
    def rank(self) -> int:
        """Rank, from 0."""

    @property
    def world_size(self) -> int:
        """Number of members."""


Handles: TypeAlias = "Batch | npt.ArrayLike"


class ReplayBuffer:
    """A replay buffer on a cluster: it survives this process, and a worker's end if the cluster has replicas.

    >>> import engram, numpy as np
    >>> with engram.connect() as db, engram.ReplayBuffer(db, "train", capacity=1_000, batch_size=4) as buffer:
    ...     handles = buffer.extend({"obs": np.zeros((8, 2), np.float32), "reward": np.arange(8.0)}, version=1)
    ...     batch = buffer.sample()
    ...     updated = buffer.update_priority(batch, np.ones(4))
    ...     batch["obs"].shape, len(buffer), updated.stale
    ((4, 2), 8, 0)

    The first write declares the fields; ``fields`` declares them without a write. ``max_age`` is in policy versions. With a ``limiter``
    samples and appends wait for each other; settings with which both could wait are refused. ``remover`` is what happens above the
    capacity: ``"fifo"``, ``"lifo"``, ``"lowest_priority"``, ``"highest_priority"``, or ``"refuse"``.
    """

    def __init__(
        self,
        db: Database,
        name: str,
        *,
        capacity: int = 1_000_000,
        batch_size: int = 256,
        sampler: Sampler = Prioritized(),  # noqa: B008 - frozen
        limiter: SampleToInsert | MinSize | None = None,
        max_age: int | None = None,
        max_reuse: int | None = None,
        remover: Literal["fifo", "lifo", "lowest_priority", "highest_priority", "refuse"] = "fifo",
        max_priority: float | None = None,
        initial_priority: float | None = None,
        fields: Mapping[str, tuple[npt.DTypeLike, Sequence[int | None]]] | None = None,
        seed: int = 0,
        prefetch: int = 0,
        as_: Literal["numpy", "torch", "tensordict"] = "numpy",
        pin_memory: bool = False,
        timeout: Timeout = None,
    ) -> None:
        if batch_size < 1:
            raise invalid(f"batch_size is {batch_size}; allowed: at least 1")
        if prefetch < 0:
            raise invalid(f"prefetch is {prefetch}; allowed: 0 = none, or more")
        self.db, self.name, self.batch_size, self.sampler, self.seed = db, name, batch_size, sampler, seed
        self.prefetch, self.pin_memory = prefetch, pin_memory
        self.as_ = one_of("as_", as_, ("numpy", "torch", "tensordict"))
        removers = ("fifo", "lifo", "lowest_priority", "highest_priority", "refuse")
        self._settings: dict[str, Any] = {
            "capacity": capacity,
            "remover": one_of("remover", remover, removers),
            "max_reuse": max_reuse or 0,
            "max_age": max_age,
            "max_priority": max_priority,
            "initial_priority": initial_priority,
            "limiter": None if limiter is None else limiter.parts(),
        }
        self._timeout = seconds(timeout)
        self._step = 0
        self._buffer: _engram.Buffer | None = None
        self._schema: Schema | None = None
        self._pending: _Pending | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        if fields is not None:
            self._declare([_declared(name, *declaration) for name, declaration in fields.items()], self._timeout)

    # Writes

    def extend(
        self,
        data: Data,
        priority: object = None,
        *,
        version: object = None,
        trajectory: object = None,
        tag: str | Sequence[str] | None = None,
        timeout: Timeout = None,
    ) -> U64:
        """Appends items, and returns their handles when they are stored as the cluster's durability says.

        ``data`` has an array per field with one row per item; lists of arrays of different lengths are a jagged field. Tensors and
        TensorDicts are accepted. ``version`` is the policy version, ``trajectory`` a number other than 0; each one per item or one for
        all. Waits for the limiter at most ``timeout``.
        """
        columns = to_numpy(data)
        limit = self._limit(timeout)
        native = self._open(columns, limit)
        assert self._schema is not None, "is known once the buffer is open"
        count, encoded = encode(self._schema, columns)
        options: dict[str, Any] = {
            "priorities": _per_item("priority", priority, count, np.float64),
            "versions": _per_item("version", version, count, np.uint64),
            "trajectories": _per_item("trajectory", trajectory, count, np.uint64),
            "tags": _tags(tag, count),
        }
        handles = []
        for start in range(0, count, APPENDED):
            rows = slice(start, min(start + APPENDED, count))
            part = {name: None if column is None else column[rows] for name, column in options.items()}
            parts = [column.rows(rows) for column in encoded]
            wait = WAIT_SECONDS if limit is None else limit
            handles.append(native.append(rows.stop - rows.start, parts, wait=wait, timeout=_with_wait(limit), **part)[0])
        return np.concatenate(handles) if handles else np.empty(0, np.uint64)

    def add(self, item: Data, priority: float | None = None, *, version: int = 0, trajectory: int = 0, tag: str = "") -> None:
        """Appends one item. Items are sent together after 5 ms, by :meth:`flush`, and at the end of ``with``.

        A failure of a send is raised by the next call of ``add`` or ``flush``.
        """
        row = {name: np.asarray(value)[None] for name, value in to_numpy(item).items()}
        with self._lock:
            if self._pending is None:
                self._pending = _Pending(self)
            pending = self._pending
        pending.add(row, priority, version, trajectory, tag)

    append = add

    def flush(self, *, timeout: Timeout = None) -> None:
        """Sends the items of :meth:`add` that are collected."""
        if self._pending is not None:
            self._pending.flush()

    # Reads

    def sample(
        self,
        batch_size: int | None = None,
        *,
        beta: float | None = None,
        fields: Sequence[str] | None = None,
        version: int = 0,
        step: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        timeout: Timeout = None,
    ) -> Batch:
        """Draws a batch; of :class:`Slices` and :class:`Groups` ``batch_size`` is the number of these.

        Waits at most ``timeout`` (30 s by default) for the buffer, for enough items, and for the limiter; the error says for what. A draw
        is a function of ``seed``, ``step`` and the items; ``step`` counts up by itself. ``version`` is the learner's, for ``max_age``.
        Members of a group (``rank`` of ``world_size``) get disjoint parts of one draw.
        """
        wait = self._limit(timeout) or WAIT_SECONDS
        deadline = time.monotonic() + wait
        native = self._wait_for_buffer(deadline)
        if step is None:
            step, self._step = self._step, self._step + 1
        name, options = _sampler(self.sampler, beta)
        count = self.batch_size if batch_size is None else batch_size
        if count < 1:
            raise invalid(f"batch_size is {count}; allowed: at least 1")
        left = max(deadline - time.monotonic(), 0.001)
        columns = native.sample(
            name, count, seed=self.seed, step=step, fields=_names(fields), version=version, rank=rank,
            world=world_size, wait=left, timeout=_with_wait(left), **options,
        )  # fmt: skip
        return self._batch(columns)

    def stream(
        self,
        group: Member | None = None,
        *,
        batches: int | None = None,
        fields: Sequence[str] | None = None,
        timeout: Timeout = None,
    ) -> Stream:
        """Yields batches; with ``prefetch`` the next ones are drawn by a thread meanwhile. Members of a ``group`` get disjoint draws."""

        def draw() -> Batch:
            part = {} if group is None else {"rank": group.rank, "world_size": group.world_size}
            return self.sample(fields=fields, timeout=timeout, **part)

        return Stream(draw, self.prefetch, batches)

    def __iter__(self) -> Iterator[Batch]:
        return self.stream()

    def get(self, handles: Handles, fields: Sequence[str] | None = None, *, timeout: Timeout = None) -> Batch:
        """Returns items by handle. Transfers only ``fields``; ``[]`` = none. Removed items are in ``missing``."""
        limit = self._limit(timeout)
        return self._batch(self._existing(limit).get(_handles(handles), fields=_names(fields), timeout=limit))

    def list(self, tag: str | None = None, *, limit: int = 0, timeout: Timeout = None) -> Batch:
        """Returns handles, priorities, versions and tags, without fields, oldest first; at most ``limit``, 65,536 by default."""
        wait = self._limit(timeout)
        name = None if tag is None else tag.encode()
        return self._batch(self._existing(wait).list(tag=name, limit=limit, timeout=wait))

    # Changes

    def update_priority(self, handles: Handles, priority: object, *, timeout: Timeout = None) -> Updated:
        """Sets priorities. Handles of removed items are counted as stale, and never reach another item."""
        limit, numbers = self._limit(timeout), _handles(handles)
        priorities = _per_item("priority", priority, len(numbers), np.float64)
        if priorities is None:
            raise invalid("priority is None; required: one number per handle, or one for all")
        return Updated(*self._existing(limit).update_priorities(numbers, priorities, timeout=limit))

    update_priorities = update_priority

    def delete(self, handles: Handles, *, timeout: Timeout = None) -> Updated:
        """Deletes items."""
        limit = self._limit(timeout)
        return Updated(*self._existing(limit).delete(_handles(handles), timeout=limit))

    def consume(
        self,
        consumer: str,
        batch_size: int | None = None,
        *,
        lease: float = 60.0,
        fields: Sequence[str] | None = None,
        timeout: Timeout = None,
    ) -> Batch:
        """Leases the oldest items that ``consumer`` has not had, each once. An item that is not acknowledged in time is leased again."""
        wait = self._limit(timeout) or WAIT_SECONDS
        deadline = time.monotonic() + wait
        native = self._wait_for_buffer(deadline)
        left = max(deadline - time.monotonic(), 0.001)
        count = self.batch_size if batch_size is None else batch_size
        options = {"lease": lease, "fields": _names(fields), "wait": left, "timeout": _with_wait(left)}
        return self._batch(native.consume(consumer, count, **options))

    def acknowledge(self, consumer: str, handles: Handles, *, timeout: Timeout = None) -> Updated:
        """Records that ``consumer`` is done with items."""
        limit = self._limit(timeout)
        return Updated(*self._existing(limit).acknowledge(consumer, _handles(handles), timeout=limit))

    # The buffer

    def stats(self, *, timeout: Timeout = None) -> dict[str, Any]:
        """Returns figures: ``items``, ``capacity``, ``appended``, ``sampled``, ``deleted``, ``priority_sum``, ``consumers``, and what
        appends and samples wait for now.
        """
        limit = self._limit(timeout)
        native = self._existing(limit)
        return {"capacity": native.capacity(), **native.stats(timeout=limit)}

    def __len__(self) -> int:
        """Number of items; 0 before the first write."""
        try:
            return int(self._existing(self._timeout).stats(timeout=self._timeout)["items"])
        except NotFoundError:
            return 0

    def __bool__(self) -> bool:
        return True

    @property
    def step(self) -> int:
        """Number of the next draw: part of a checkpoint of the learner."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value

    def save(self, path: str | os.PathLike[str], *, timeout: Timeout = None) -> int:
        """Writes all items to an npz file, without pickle, and returns their number. See :meth:`load`."""
        limit = self._limit(timeout)
        native = self._existing(limit)
        listed = self.list(timeout=timeout)
        numbers = _handles(listed)
        columns: dict[str, Any] = {}
        parts = [self._numpy(native.get(numbers[start : start + SAVED], timeout=limit)) for start in range(0, len(numbers), SAVED)]
        kept = np.concatenate([part["index"] for part in parts]) if parts else numbers
        for field in self._fields():
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
        columns["#tags"] = np.array(tags if tags else [""] * len(kept), np.str_)
        np.savez(path, **columns)  # type: ignore[arg-type, unused-ignore]
        return len(kept)

    def load(self, path: str | os.PathLike[str], *, timeout: Timeout = None) -> U64:
        """Appends the items of :meth:`save`; returns their new handles."""
        with np.load(path, allow_pickle=False) as file:
            data: dict[str, Any] = {}
            for name in file.files:
                field, _, kind = name.rpartition(".")
                if kind == "data":
                    data[field] = file[name]
                elif kind == "lengths":
                    data[field] = np.split(file[f"{field}.values"], np.cumsum(file[name])[:-1])
            meta = {"trajectory": file["#trajectories"].astype(np.uint64), "version": file["#versions"].astype(np.uint64)}
            if not len(file["#priorities"]):
                return np.empty(0, np.uint64)
            return self.extend(data, file["#priorities"], tag=[str(tag) for tag in file["#tags"]], timeout=timeout, **meta)

    def drop(self, *, timeout: Timeout = None) -> int:
        """Removes the buffer from the cluster, and returns the number of its items."""
        removed = _engram.drop_buffer(self.db._native, self.name, timeout=self._limit(timeout))
        self._buffer = self._schema = None
        return removed

    def dataset(self, *, fields: Sequence[str] | None = None, batches: int | None = None) -> Any:
        """Returns a ``torch.utils.data.IterableDataset`` of batches, for a ``DataLoader`` with ``batch_size=None``.

        Its worker processes get disjoint parts of each draw.
        """
        from .torch import BufferDataset

        return BufferDataset(self, fields, batches)

    @cached_property
    def aio(self) -> AsyncReplayBuffer:
        """The same calls, awaitable."""
        return AsyncReplayBuffer(self)

    def close(self) -> None:
        """Sends collected items. The buffer stays on the cluster."""
        if self._pending is not None:
            self._pending.close()
            self._pending = None

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<engram.ReplayBuffer {self.name!r} on {self.db.address}>"

    def _repr_html_(self) -> str:
        stats = self.stats()
        return table(f"replay buffer {self.name}", list(stats), [list(stats.values())], 1)

    # The native buffer

    def _limit(self, timeout: Timeout) -> float | None:
        return self._timeout if timeout is None else seconds(timeout)

    def _current(self) -> _engram.Buffer | None:
        if self._process != os.getpid():
            # A forked child: the lock may have been held, and collected items belong to the parent.
            self._process, self._lock, self._pending = os.getpid(), threading.Lock(), None
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_own else None

    def _existing(self, limit: float | None) -> _engram.Buffer:
        native = self._current()
        if native is None:
            self._use(_engram.open_buffer(self.db._native, self.name, timeout=limit))
            native = self._buffer
        assert native is not None, "was set"
        return native

    def _open(self, columns: Mapping[str, Any], limit: float | None) -> _engram.Buffer:
        native = self._current()
        if native is not None:
            return native
        if self._schema is None:
            try:
                return self._existing(limit)
            except NotFoundError:
                return self._declare(infer(columns), limit)
        return self._declare(self._schema, limit)

    def _declare(self, schema: Schema, limit: float | None) -> _engram.Buffer:
        with self._lock:
            parts = [field.parts() for field in schema]
            native = _engram.create_buffer(self.db._native, self.name, parts, timeout=limit, **self._settings)
            self._use(native)
            return native

    def _use(self, native: _engram.Buffer) -> None:
        self._schema = [_field(*parts) for parts in native.fields()]
        self._buffer = native

    def _fields(self) -> Schema:
        assert self._schema is not None, "is known once the buffer is open"
        return self._schema

    def _wait_for_buffer(self, deadline: float) -> _engram.Buffer:
        while True:
            try:
                return self._existing(max(deadline - time.monotonic(), 0.001))
            except NotFoundError as error:
                if time.monotonic() + POLL_SECONDS >= deadline:
                    text = f"no process has created the buffer {self.name!r} in time"
                    raise create("Timeout", text, "ENG-0602") from error
                time.sleep(POLL_SECONDS)

    def _numpy(self, columns: dict[str, Any]) -> Batch:
        batch = Batch(decode(columns["columns"]))
        batch["index"] = columns["handles"]
        weights = columns["weights"]
        batch["weight"] = weights if len(weights) else np.ones(len(columns["handles"]), np.float32)
        batch["version"] = columns["versions"]
        batch.priorities, batch.trajectories, batch.missing = columns["priorities"], columns["trajectories"], columns["missing"]
        batch.tags = [tag.decode(errors="replace") for tag in columns["tags"]]
        return batch

    def _batch(self, columns: dict[str, Any]) -> Batch:
        batch = self._numpy(columns)
        if self.as_ == "numpy":
            return batch
        from .torch import to_tensors

        # A TensorDict is used like the dict that a batch is.
        tensors: Batch = to_tensors(batch, self.as_, self.pin_memory)
        return tensors


class AsyncReplayBuffer:
    """Awaitable calls of a :class:`ReplayBuffer`."""

    def __init__(self, sync: ReplayBuffer) -> None:
        self.sync = sync

    extend = twin(ReplayBuffer.extend)
    flush = twin(ReplayBuffer.flush)
    sample = twin(ReplayBuffer.sample)
    get = twin(ReplayBuffer.get)
    list = twin(ReplayBuffer.list)
    update_priority = twin(ReplayBuffer.update_priority)
    update_priorities = twin(ReplayBuffer.update_priorities)
    delete = twin(ReplayBuffer.delete)
    consume = twin(ReplayBuffer.consume)
    acknowledge = twin(ReplayBuffer.acknowledge)
    stats = twin(ReplayBuffer.stats)
    save = twin(ReplayBuffer.save)
    load = twin(ReplayBuffer.load)


class _Pending:
    """Single items that are collected, and the thread that sends them."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._rows: list[tuple[dict[str, Any], float | None, int, int, str]] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        # One send at a time keeps the order of the items.
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engram-add", daemon=True)
        self._thread.start()

    def add(self, row: dict[str, Any], priority: float | None, version: int, trajectory: int, tag: str) -> None:
        """Collects an item."""
        with self._changed:
            self._raise()
            self._rows.append((row, priority, version, trajectory, tag))
            self._changed.notify()
            is_full = len(self._rows) >= GROUPED
        if is_full:
            self.flush()

    def flush(self) -> None:
        """Sends what is collected."""
        self._send()
        with self._changed:
            self._raise()

    def close(self) -> None:
        """Sends what is collected and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.flush()

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._rows or self._closed)
                if self._closed:
                    return
            time.sleep(GROUPING_SECONDS)
            self._send()

    def _send(self) -> None:
        with self._sending:
            with self._changed:
                rows, self._rows = self._rows, []
            if not rows:
                return
            try:
                columns = {name: [row[0][name][0] for row in rows] for name in rows[0][0]}
                priorities = None if all(row[1] is None for row in rows) else [1.0 if row[1] is None else row[1] for row in rows]
                meta: dict[str, Any] = {"version": [row[2] for row in rows], "trajectory": [row[3] for row in rows]}
                tags = [row[4] for row in rows]
                self._buffer.extend(columns, priorities, tag=tags if any(tags) else None, **meta)
            except BaseException as failure:
                with self._changed:
                    self._failure = failure


class Stream(Iterator[Batch]):
    """Batches of :meth:`ReplayBuffer.stream`; :meth:`close` ends the thread that draws ahead."""

    def __init__(self, draw: Any, depth: int, batches: int | None) -> None:
        self._draw, self._left = draw, batches
        self._queue: queue.Queue[Batch | BaseException] | None = queue.Queue(depth) if depth else None
        self._stopped = threading.Event()
        if self._queue is not None:
            threading.Thread(target=self._run, args=(self._queue, batches), name="engram-prefetch", daemon=True).start()

    def _run(self, ready: queue.Queue[Batch | BaseException], batches: int | None) -> None:
        while not self._stopped.is_set() and batches != 0:
            try:
                item: Batch | BaseException = self._draw()
            except BaseException as failure:
                item = failure
            batches = None if batches is None else batches - 1
            while not self._stopped.is_set():
                with suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    break
            if isinstance(item, BaseException):
                return

    def __next__(self) -> Batch:
        if self._left == 0 or self._stopped.is_set():
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        if self._queue is None:
            batch: Batch = self._draw()
            return batch
        while True:
            # In slices: a signal handler runs between them.
            with suppress(queue.Empty):
                item = self._queue.get(timeout=0.1)
                break
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def __del__(self) -> None:
        self.close()


def _with_wait(wait: float | None) -> float | None:
    """Returns the deadline of a call that waits on the cluster: its own error, which says for what it waits, comes first."""
    return None if wait is None else wait + 10.0


def _names(fields: Sequence[str] | None) -> list[str] | None:
    if isinstance(fields, str):
        raise invalid(f"fields is {fields!r}; required: a list of names")
    return None if fields is None else [str(field) for field in fields]


def _handles(handles: Handles) -> U64:
    value = handles["index"] if isinstance(handles, Mapping) else handles
    return ids_and_keys("handles", value)[0]


def _per_item(name: str, value: object, count: int, dtype: type[np.generic]) -> Any:
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


def _tags(tag: str | Sequence[str] | None, count: int) -> list[bytes] | None:
    if tag is None:
        return None
    tags = [tag] * count if isinstance(tag, str) else list(tag)
    if len(tags) != count:
        raise invalid(f"tag has {len(tags)} entries; required: {count}, one per item")
    return [text.encode() for text in tags]


def _sampler(sampler: Sampler, beta: float | None) -> tuple[str, dict[str, Any]]:
    match sampler:
        case Prioritized(alpha, own):
            return "prioritized", {"alpha": alpha, "beta": own if beta is None else beta}
        case Uniform():
            return "uniform", {}
        case Fifo():
            return "fifo", {}
        case Lifo():
            return "lifo", {}
        case Slices(length):
            return "slices", {"length": length}
        case Groups(n):
            return "groups", {"length": n}
    raise invalid(f"sampler is {sampler!r}; allowed: Prioritized, Uniform, Fifo, Lifo, Slices, Groups")


def _declared(name: str, dtype: npt.DTypeLike, shape: Sequence[int | None]) -> Any:
    """Returns a field; ``None`` as first dimension makes it jagged."""
    jagged = bool(shape) and shape[0] is None
    fixed = [int(size) for size in (shape[1:] if jagged else shape) if size is not None]
    return _field(name, np.dtype(dtype).name, fixed, jagged)


def _field(name: str, dtype: str, shape: Sequence[int], jagged: bool) -> Any:
    from ._columns import Field

    return Field(name, dtype, tuple(shape), jagged)
