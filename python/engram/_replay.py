"""``ReplayBuffer``: experience on a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from . import _engram
from ._aio import Steps, calls, run
from ._arrays import U64, Timeout
from ._batch import Batch, Handles, Updated, handles_of, names_of, per_item, tags_of, with_wait
from ._columns import Data, encode, to_numpy
from ._database import Database, one_of
from ._errors import NotFoundError, invalid
from ._opened import OpenedBuffer, declared
from ._pending import Pending
from ._progress import Progress, progress_bar
from ._results import table
from ._samplers import MinSize, Prioritized, Sampler, SampleToInsert, options_of
from ._saved import chunks, read, write
from ._stream import Member, Stream, part_of

if TYPE_CHECKING:
    from ._replay_aio import AsyncReplayBuffer

#: Items per append: more are split.
APPENDED = 4096
#: How long a sample waits for items by default, in seconds.
WAIT_SECONDS = 30.0


class ReplayBuffer(OpenedBuffer):
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
        one_of("as_", as_, ("numpy", "torch", "tensordict"))
        removers = ("fifo", "lifo", "lowest_priority", "highest_priority", "refuse")
        settings: dict[str, Any] = {
            "capacity": capacity,
            "remover": one_of("remover", remover, removers),
            "max_reuse": max_reuse or 0,
            "max_age": max_age,
            "max_priority": max_priority,
            "initial_priority": initial_priority,
            "limiter": None if limiter is None else limiter.parts(),
        }
        super().__init__(db, name, settings, as_, pin_memory, timeout)
        self.batch_size, self.sampler, self.seed, self.prefetch = batch_size, sampler, seed, prefetch
        self._step = 0
        self._pending: Pending | None = None
        if fields is not None:
            run(self._declare([declared(name, *declaration) for name, declaration in fields.items()], self._timeout))

    # Writes

    @calls
    def extend(
        self,
        data: Data,
        priority: object = None,
        *,
        version: object = None,
        trajectory: object = None,
        tag: str | Sequence[str] | None = None,
        timeout: Timeout = None,
    ) -> Steps[U64]:
        """Appends items, and returns their handles when they are stored as the cluster's durability says.

        ``data`` has an array per field with one row per item; lists of arrays of different lengths are a jagged field. Tensors and
        TensorDicts are accepted. ``version`` is the policy version, ``trajectory`` a number other than 0; each one per item or one for
        all. Waits for the limiter at most ``timeout``.
        """
        columns = to_numpy(data)
        limit = self._limit(timeout)
        native = yield from self._open(columns, limit)
        assert self._schema is not None, "is known once the buffer is open"
        count, encoded = encode(self._schema, columns)
        options: dict[str, Any] = {
            "priorities": per_item("priority", priority, count, np.float64),
            "versions": per_item("version", version, count, np.uint64),
            "trajectories": per_item("trajectory", trajectory, count, np.uint64),
            "tags": tags_of(tag, count),
        }
        handles = []
        for start in range(0, count, APPENDED):
            rows = slice(start, min(start + APPENDED, count))
            part = {name: None if column is None else column[rows] for name, column in options.items()}
            parts = [column.rows(rows) for column in encoded]
            wait = WAIT_SECONDS if limit is None else limit
            appended = yield native.append(rows.stop - rows.start, parts, wait=wait, timeout=with_wait(limit), **part)
            handles.append(appended[0])
        return np.concatenate(handles) if handles else np.empty(0, np.uint64)

    def add(self, item: Data, priority: float | None = None, *, version: int = 0, trajectory: int = 0, tag: str = "") -> None:
        """Appends one item. Items are sent together after 5 ms, by :meth:`flush`, and at the end of ``with``.

        A failure of a send is raised by the next call of ``add`` or ``flush``.
        """
        row = {name: np.asarray(value)[None] for name, value in to_numpy(item).items()}
        with self._lock:
            if self._pending is None:
                self._pending = Pending(self)
            pending = self._pending
        pending.add(row, priority, version, trajectory, tag)

    append = add

    def flush(self, *, timeout: Timeout = None) -> None:
        """Sends the items of :meth:`add` that are collected."""
        if self._pending is not None:
            self._pending.flush()

    # Reads

    @calls
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
    ) -> Steps[Batch]:
        """Draws a batch; of :class:`Slices` and :class:`Groups` ``batch_size`` is the number of these.

        Waits at most ``timeout`` (30 s by default) for the buffer, for enough items, and for the limiter; the error says for what. A draw
        is a function of ``seed``, ``step`` and the items; ``step`` counts up by itself. ``version`` is the learner's, for ``max_age``.
        Members of a group (``rank`` of ``world_size``) get disjoint parts of one draw.
        """
        wait = self._limit(timeout) or WAIT_SECONDS
        deadline = time.monotonic() + wait
        native = yield from self._wait_for_buffer(deadline)
        if step is None:
            step, self._step = self._step, self._step + 1
        name, options = options_of(self.sampler, beta)
        count = self.batch_size if batch_size is None else batch_size
        if count < 1:
            raise invalid(f"batch_size is {count}; allowed: at least 1")
        left = max(deadline - time.monotonic(), 0.001)
        columns = yield native.sample(
            name, count, seed=self.seed, step=step, fields=names_of(fields), version=version, rank=rank,
            world=world_size, wait=left, timeout=with_wait(left), **options,
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
            return self.sample(fields=fields, timeout=timeout, **part_of(group))

        return Stream(draw, self.prefetch, batches)

    def __iter__(self) -> Iterator[Batch]:
        return self.stream()

    @calls
    def get(self, handles: Handles, fields: Sequence[str] | None = None, *, timeout: Timeout = None) -> Steps[Batch]:
        """Returns items by handle. Transfers only ``fields``; ``[]`` = none. Removed items are in ``missing``."""
        limit = self._limit(timeout)
        native = yield from self._existing(limit)
        return self._batch((yield native.get(handles_of(handles), fields=names_of(fields), timeout=limit)))

    @calls
    def list(self, tag: str | None = None, *, limit: int = 0, timeout: Timeout = None) -> Steps[Batch]:
        """Returns handles, priorities, versions and tags, without fields, oldest first; at most ``limit``, 65,536 by default."""
        wait = self._limit(timeout)
        name = None if tag is None else tag.encode()
        native = yield from self._existing(wait)
        return self._batch((yield native.list(tag=name, limit=limit, timeout=wait)))

    # Changes

    @calls
    def update_priority(self, handles: Handles, priority: object, *, timeout: Timeout = None) -> Steps[Updated]:
        """Sets priorities. Handles of removed items are counted as stale, and never reach another item."""
        limit, numbers = self._limit(timeout), handles_of(handles)
        priorities = per_item("priority", priority, len(numbers), np.float64)
        if priorities is None:
            raise invalid("priority is None; required: one number per handle, or one for all")
        native = yield from self._existing(limit)
        return Updated(*(yield native.update_priorities(numbers, priorities, timeout=limit)))

    update_priorities = update_priority

    @calls
    def delete(self, handles: Handles, *, timeout: Timeout = None) -> Steps[Updated]:
        """Deletes items."""
        limit = self._limit(timeout)
        native = yield from self._existing(limit)
        return Updated(*(yield native.delete(handles_of(handles), timeout=limit)))

    @calls
    def consume(
        self,
        consumer: str,
        batch_size: int | None = None,
        *,
        lease: float = 60.0,
        fields: Sequence[str] | None = None,
        timeout: Timeout = None,
    ) -> Steps[Batch]:
        """Leases the oldest items that ``consumer`` has not had, each once. An item that is not acknowledged in time is leased again."""
        wait = self._limit(timeout) or WAIT_SECONDS
        deadline = time.monotonic() + wait
        native = yield from self._wait_for_buffer(deadline)
        left = max(deadline - time.monotonic(), 0.001)
        count = self.batch_size if batch_size is None else batch_size
        options = {"lease": lease, "fields": names_of(fields), "wait": left, "timeout": with_wait(left)}
        return self._batch((yield native.consume(consumer, count, **options)))

    @calls
    def acknowledge(self, consumer: str, handles: Handles, *, timeout: Timeout = None) -> Steps[Updated]:
        """Records that ``consumer`` is done with items."""
        limit = self._limit(timeout)
        native = yield from self._existing(limit)
        return Updated(*(yield native.acknowledge(consumer, handles_of(handles), timeout=limit)))

    # The buffer

    @calls
    def stats(self, *, timeout: Timeout = None) -> Steps[dict[str, Any]]:
        """Returns figures: ``items``, ``capacity``, ``appended``, ``sampled``, ``deleted``, ``priority_sum``, ``consumers``, and what
        appends and samples wait for now.
        """
        limit = self._limit(timeout)
        native = yield from self._existing(limit)
        return {"capacity": native.capacity(), **(yield native.stats(timeout=limit))}

    def __len__(self) -> int:
        """Number of items; 0 before the first write."""
        try:
            return int(self.stats()["items"])
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

    def save(self, path: str | os.PathLike[str], *, progress: Progress = "auto", timeout: Timeout = None) -> int:
        """Writes all items to an npz file, without pickle, and returns their number. See :meth:`load`.

        ``progress`` shows a bar if tqdm is installed; ``"auto"`` only on a terminal.
        """
        limit = self._limit(timeout)
        native = run(self._existing(limit))
        handles = handles_of(self.list(timeout=timeout))
        parts = []
        with progress_bar(len(handles), "item", progress) as advance:
            for chunk in chunks(handles):
                parts.append(self._numpy(native.get(chunk, timeout=limit).wait()))
                advance(len(chunk))
        return write(path, self._fields(), parts)

    def load(self, path: str | os.PathLike[str], *, timeout: Timeout = None) -> U64:
        """Appends the items of :meth:`save`; returns their new handles."""
        data, priorities, options = read(path)
        return self.extend(data, priorities, timeout=timeout, **options) if len(priorities) else np.empty(0, np.uint64)

    @calls
    def drop(self, *, timeout: Timeout = None) -> Steps[int]:
        """Removes the buffer from the cluster, and returns the number of its items."""
        removed: int = yield _engram.drop_buffer(self.db._native, self.name, timeout=self._limit(timeout))
        self._buffer = self._schema = None
        return removed

    def dataset(self, *, fields: Sequence[str] | None = None, batches: int | None = None) -> Any:
        """Returns a ``torch.utils.data.IterableDataset`` of batches, for a ``DataLoader`` with ``batch_size=None``.

        Its worker processes get disjoint parts of each draw. They are forked: where another start method is the default, as after an import
        of TorchRL, pass ``multiprocessing_context="fork"``.
        """
        from .torch import BufferDataset

        return BufferDataset(self, fields, batches)

    @cached_property
    def aio(self) -> AsyncReplayBuffer:
        """The same calls, awaitable."""
        from ._replay_aio import AsyncReplayBuffer

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

    def _forked(self) -> None:
        super()._forked()
        # Collected items belong to the parent.
        self._pending = None
