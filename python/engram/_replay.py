"""``ReplayBuffer``: experience on a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from . import _engram
from ._aio import Steps, calls, run
from ._arrays import U64, Timeout
from ._batch import Batch, Handles, Updated, handles_of, names_of, per_item, tags_of
from ._columns import Data, check_sizes, encode, to_numpy
from ._database import Database, one_of
from ._deadline import Deadline, Waiting
from ._errors import EngramError, NotFoundError, create, invalid
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


class ReplayBuffer(OpenedBuffer):
    """A replay buffer on a cluster: it survives this process, and a worker's end if the cluster has replicas.

    >>> import engram, numpy as np
    >>> with engram.connect() as db, engram.ReplayBuffer(db, "train", capacity=1_000, batch_size=4) as buffer:
    ...     handles = buffer.extend({"obs": np.zeros((8, 2), np.float32), "reward": np.arange(8.0)}, version=1)
    ...     batch = buffer.sample()
    ...     updated = buffer.update_priority(batch, np.ones(4))
    ...     batch["obs"].shape, len(buffer), updated.stale
    ((4, 2), 8, 0)

    The first write declares the fields; ``fields`` declares them without a write. With ``sampler=None`` the sampler of the manifest
    (``spec.buffers``) draws. ``max_age`` is in policy versions. With a ``limiter``
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
        sampler: Sampler | None = Prioritized(),  # noqa: B008 - frozen
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
            schema = [declared(name, *declaration) for name, declaration in fields.items()]
            run(self._declare(schema, Deadline(self._timeout)))

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
        all; a priority of ``None``, also in a list, is the buffer's initial one. ``timeout``, for all items together, includes the wait
        for the limiter; without one the connection's is that of every 4,096 items.

        All items are checked before the first is sent, and with ``remover="refuse"`` whether there is room for all. Items are sent 4,096 at
        a time: of an error after the first of these, ``handles`` are those of the items that are stored.
        """
        columns = to_numpy(data)
        deadline = self._deadline(timeout)
        native = yield from self._open(columns, deadline)
        count, encoded = encode(self._fields(), columns)
        tags = tags_of(tag, count)
        check_sizes(encoded, count, tags)
        options: dict[str, Any] = {
            "priorities": per_item("priority", _filled(priority, native), count, np.float64),
            "versions": per_item("version", version, count, np.uint64),
            "trajectories": per_item("trajectory", trajectory, count, np.uint64),
            "tags": tags,
        }
        if count > APPENDED and native.refuses():
            yield from self._check_room(native, count, deadline)
        handles: list[U64] = []
        try:
            for start in range(0, count, APPENDED):
                rows = slice(start, min(start + APPENDED, count))
                part = {name: None if column is None else column[rows] for name, column in options.items()}
                parts = [column.rows(rows) for column in encoded]
                waiting = self._waiting(deadline.left("items are not appended")).options("items are not appended")
                appended = yield native.append(rows.stop - rows.start, parts, **waiting, **part)
                handles.append(appended[0])
        except EngramError as failure:
            if handles:
                failure.handles = np.concatenate(handles)
                stored = f"the first {len(failure.handles)} of {count} items are appended: the error has their handles"
                failure.args = (f"{failure.args[0]}; {stored}",)
            raise
        return np.concatenate(handles) if handles else np.empty(0, np.uint64)

    def _check_room(self, native: _engram.Buffer, count: int, deadline: Deadline) -> Steps[None]:
        """Refuses items for which a full buffer has no room, as the cluster does for the items of one request."""
        items = (yield native.stats(timeout=deadline.left("items are not appended")))["items"]
        room = max(native.capacity() - items, 0)
        if count > room:
            found = f"buffer {self.name} is full: {items} items of capacity {native.capacity()}"
            raise create("Capacity", f"{found}, {count} more are not allowed; allowed: {room} (remover: Refuse)", "ENG-0504")

    def add(self, item: Data, priority: float | None = None, *, version: int = 0, trajectory: int = 0, tag: str = "") -> None:
        """Appends one item. Items are sent together after 5 ms, by :meth:`flush`, and at the end of ``with``.

        An item whose fields are not those of the buffer, or of the first item, is refused here. A failure of a send is raised by the next
        call of ``add``, which does not take its item then, or of ``flush``. Items stay collected until a send succeeds, and are sent again by
        the next call; after a timeout some may be stored twice. Only items that the cluster refuses as invalid are dropped: the error says
        how many.
        """
        row = {name: np.asarray(value) for name, value in to_numpy(item).items()}
        if self._current() is None and self._pending is None:
            # Another process may have declared the fields.
            with suppress(NotFoundError):
                run(self._existing(self._deadline(None)))
        with self._lock:
            if self._pending is None:
                self._pending = Pending(self)
            pending = self._pending
        pending.add(row, priority, version, trajectory, tag, self._schema)

    append = add

    def flush(self, *, timeout: Timeout = None) -> None:
        """Sends the items of :meth:`add` that are collected, and waits for those that are being sent. Those that are not sent in time stay."""
        self._current()
        if self._pending is not None:
            self._pending.flush(self._deadline(timeout))

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
        local: bool = False,
        timeout: Timeout = None,
    ) -> Steps[Batch]:
        """Draws a batch; of :class:`Slices` and :class:`Groups` ``batch_size`` is the number of these.

        Waits at most ``timeout`` (by default the connection's) for the buffer, for enough items, and for the limiter; the error says for
        what. A draw is a function of ``seed``, ``step`` and the items; ``step`` counts up by itself. ``version`` is the learner's, for
        ``max_age``.
        Members of a group (``rank`` of ``world_size``) get disjoint parts of one draw. With ``local`` each draws a ``batch_size`` of its own, by
        priority, from its own partitions, every ``world_size``-th of the buffer's; multiply the member's sum of weighted gradients by the batch's
        ``scale``, add those of all members, and divide by nothing.
        """
        deadline = self._waiting(self._limit(timeout))
        native = yield from self._wait_for_buffer(deadline)
        if step is None:
            step, self._step = self._step, self._step + 1
        name, options = options_of(self.sampler, beta)
        count = self.batch_size if batch_size is None else batch_size
        if count < 1:
            raise invalid(f"batch_size is {count}; allowed: at least 1")
        if local and self.as_ == "tensordict":
            raise invalid("local is True with as_='tensordict', which has no scale; allowed: with 'numpy' and 'torch'")
        columns = yield native.sample(
            name, count, seed=self.seed, step=step, fields=names_of(fields), version=version, rank=rank,
            world=world_size, local=local, **deadline.options("no sample is drawn"), **options,
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
        """Yields batches; with ``prefetch`` the next ones are drawn by a thread meanwhile.

        The members of a ``group``, for example an :class:`engram.torch.Group`, get disjoint parts of one draw, a ``batch_size`` each.
        """

        def draw() -> Batch:
            return self.sample(fields=fields, timeout=timeout, **part_of(group))

        return Stream(draw, self.prefetch, batches)

    def __iter__(self) -> Iterator[Batch]:
        return self.stream()

    @calls
    def get(self, handles: Handles, fields: Sequence[str] | None = None, *, timeout: Timeout = None) -> Steps[Batch]:
        """Returns items by handle. Transfers only ``fields``; ``[]`` = none. Removed items are in ``missing``."""
        deadline = self._deadline(timeout)
        native = yield from self._existing(deadline)
        left = deadline.left("items are not read")
        return self._batch((yield native.get(handles_of(handles), fields=names_of(fields), timeout=left)))

    @calls
    def list(self, tag: str | None = None, *, limit: int | None = None, timeout: Timeout = None) -> Steps[Batch]:
        """Returns handles, priorities, versions and tags, without fields, oldest first; at most ``limit``, by default all."""
        if limit is not None and limit < 1:
            raise invalid(f"limit is {limit}; allowed: at least 1, or None = all")
        deadline = self._deadline(timeout)
        name = None if tag is None else tag.encode()
        native = yield from self._existing(deadline)
        return self._batch((yield native.list(tag=name, limit=limit or 0, timeout=deadline.left("items are not listed"))))

    def to_arrow(self, handles: Handles | None = None, fields: Sequence[str] | None = None, *, timeout: Timeout = None) -> Any:
        """Returns items by handle, by default all, as a ``pyarrow.Table``. Needs the extra ``engram[arrow]``.

        The columns are the fields, in the memory in which they were received, then ``_handle``, ``_priority``, ``_version``, ``_trajectory``
        and ``_tag``. A field with fixed dimensions is a list of fixed size, a jagged one a list.
        """
        from ._arrow import table_of

        deadline = self._deadline(timeout)
        native = run(self._existing(deadline))
        found = handles_of(self.list(timeout=deadline.left("items are not listed")) if handles is None else handles)
        parts = [*self._read(native, found, fields, deadline, False)]
        names = names_of(fields)
        return table_of([field for field in self._fields() if names is None or field.name in names], parts)

    def _read(
        self, native: _engram.Buffer, handles: U64, fields: Sequence[str] | None, deadline: Deadline, progress: Progress
    ) -> Iterator[Batch]:
        """Reads items in parts. Those that were removed meanwhile are left out."""
        with progress_bar(len(handles), "item", progress) as advance:
            done = 0
            for chunk in chunks(handles):
                left = deadline.left(f"{done} of {len(handles)} items are read")
                part = self._numpy(native.get(chunk, fields=names_of(fields), timeout=left).wait())
                done += len(chunk)
                yield part
                advance(len(chunk))

    # Changes

    @calls
    def update_priority(self, handles: Handles, priority: object, *, timeout: Timeout = None) -> Steps[Updated]:
        """Sets priorities. Handles of removed items are counted as stale, and never reach another item."""
        deadline, numbers = self._deadline(timeout), handles_of(handles)
        priorities = per_item("priority", priority, len(numbers), np.float64)
        if priorities is None:
            raise invalid("priority is None; required: one number per handle, or one for all")
        native = yield from self._existing(deadline)
        left = deadline.left("priorities are not updated")
        return Updated(*(yield native.update_priorities(numbers, priorities, timeout=left)))

    update_priorities = update_priority

    @calls
    def delete(self, handles: Handles, *, timeout: Timeout = None) -> Steps[Updated]:
        """Deletes items."""
        deadline = self._deadline(timeout)
        native = yield from self._existing(deadline)
        return Updated(*(yield native.delete(handles_of(handles), timeout=deadline.left("items are not deleted"))))

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
        deadline = self._waiting(self._limit(timeout))
        native = yield from self._wait_for_buffer(deadline)
        count = self.batch_size if batch_size is None else batch_size
        options = {"lease": lease, "fields": names_of(fields), **deadline.options("no items are leased")}
        return self._batch((yield native.consume(consumer, count, **options)))

    @calls
    def acknowledge(self, consumer: str, handles: Handles, *, timeout: Timeout = None) -> Steps[Updated]:
        """Records that ``consumer`` is done with items."""
        deadline = self._deadline(timeout)
        native = yield from self._existing(deadline)
        left = deadline.left("items are not acknowledged")
        return Updated(*(yield native.acknowledge(consumer, handles_of(handles), timeout=left)))

    # The buffer

    @calls
    def stats(self, *, timeout: Timeout = None) -> Steps[dict[str, Any]]:
        """Returns figures: ``items``, ``capacity``, ``appended``, ``sampled``, ``deleted``, ``priority_sum``, ``consumers``, and what
        appends and samples wait for now. ``sampled`` is counted with a limiter or ``max_reuse`` only.
        """
        deadline = self._deadline(timeout)
        native = yield from self._existing(deadline)
        return {"capacity": native.capacity(), **(yield native.stats(timeout=deadline.left("statistics are not read")))}

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
        deadline = self._deadline(timeout)
        native = run(self._existing(deadline))
        handles = handles_of(self.list(timeout=deadline.left("items are not listed")))
        parts = [*self._read(native, handles, None, deadline, progress)]
        return write(path, self._fields(), parts)

    def load(self, path: str | os.PathLike[str], *, timeout: Timeout = None) -> U64:
        """Appends the items of a file of :meth:`save`, or of ``engram buffer export``; returns their new handles.

        Other npz files are read, too: an array per field, with the items in the first dimension.
        """
        data, priorities, options = read(path)
        return self.extend(data, priorities, timeout=timeout, **options) if len(next(iter(data.values()))) else np.empty(0, np.uint64)

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
        """Sends collected items. The buffer stays on the cluster. After an error the items are still collected: the next call sends them again."""
        self._current()
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


def _filled(priority: object, native: _engram.Buffer) -> object:
    """Returns priorities, with the initial one in place of those of a list that are ``None``."""
    if not isinstance(priority, (list, tuple)) or all(value is not None for value in priority):
        return priority
    return [native.initial_priority() if value is None else value for value in priority]
