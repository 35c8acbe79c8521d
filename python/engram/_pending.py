"""Single items that are sent together."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ._batch import per_item, tags_of
from ._columns import Schema, check_sizes, encode, infer
from ._deadline import Deadline
from ._errors import InvalidValueError, create, invalid

#: How long single items are collected before they are sent, in seconds.
GROUPING_SECONDS = 0.005
#: Single items that are sent at once at the latest.
GROUPED = 1024

#: Fields, priority, version, trajectory and tag of an item.
Row = tuple[dict[str, npt.NDArray[Any]], "float | None", int, int, str]


class Appender(Protocol):
    """What appends items: a replay buffer."""

    def extend(self, data: Any, priority: Any = None, /, *, version: Any, trajectory: Any, tag: Any, timeout: float | None) -> Any:
        """Appends items."""


class Pending:
    """Single items that are collected, and the thread that sends them. Items stay collected until a send of them succeeds."""

    def __init__(self, buffer: Appender) -> None:
        self._buffer = buffer
        self._rows: list[Row] = []
        #: Error of the last send of the thread, until a caller gets it: the thread sends nothing before.
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        # One send at a time keeps the order of the items.
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engram-add", daemon=True)
        self._thread.start()

    def add(
        self, fields: dict[str, npt.NDArray[Any]], priority: float | None, version: int, trajectory: int, tag: str, schema: Schema | None
    ) -> None:
        """Collects an item; refuses one that does not match ``schema``, or the first item while that is unknown."""
        with self._changed:
            failure, self._failure = self._failure, None
            self._changed.notify()
            is_full = len(self._rows) >= GROUPED
        if failure is not None:
            raise failure
        if is_full:
            self.flush(Deadline(None))
        for name, value, dtype in (("priority", priority, np.float64), ("version", version, np.uint64), ("trajectory", trajectory, np.uint64)):
            if value:
                per_item(name, value, 1, dtype)
        single = {name: value[None] for name, value in fields.items()}
        own = infer(single) if schema is None else schema
        # As lists: the numbers of Python have no type of their own.
        _, encoded = encode(own, single if schema is None else {name: [value] for name, value in fields.items()})
        check_sizes(encoded, 1, tags_of(tag, 1))
        with self._changed:
            if schema is None and self._rows:
                fields = _like(self._rows[0][0], fields)
            self._rows.append((fields, priority, version, trajectory, tag))
            self._changed.notify()

    def flush(self, deadline: Deadline) -> None:
        """Sends what is collected. Items that are not sent when the deadline passes stay collected."""
        undone = "items of earlier calls of add are still being sent"
        limit = deadline.left(undone)
        if not self._sending.acquire(timeout=-1 if limit is None else limit):
            deadline.left(undone)
        try:
            with self._changed:
                failure, self._failure = self._failure, None
            # Of another failure the items are still collected, and are sent again.
            if isinstance(failure, InvalidValueError):
                raise failure
            self._send(deadline)
        finally:
            self._sending.release()
            with self._changed:
                self._changed.notify()

    def close(self) -> None:
        """Sends what is collected and ends the thread."""
        self.flush(Deadline(None))
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: (self._rows and self._failure is None) or self._closed)
                if self._closed:
                    return
            time.sleep(GROUPING_SECONDS)
            with self._sending:
                try:
                    self._send(Deadline(None))
                except BaseException as failure:
                    with self._changed:
                        self._failure = failure

    def _send(self, deadline: Deadline) -> None:
        """Sends what is collected. Only items that the cluster refuses as invalid are dropped: it would refuse them again."""
        with self._changed:
            rows = list(self._rows)
        if not rows:
            return
        try:
            self._extend(rows, deadline)
        except InvalidValueError as failure:
            reason, dropped = failure, 0
        else:
            self._remove(len(rows))
            return
        for row in rows:
            try:
                self._extend([row], deadline)
            except InvalidValueError as failure:
                reason, dropped = failure, dropped + 1
            self._remove(1)
        if dropped:
            text = f"{dropped} items of add are refused and dropped: {reason.args[0]}"
            raise create("InvalidValue", text, reason.code, reason.help) from reason

    def _extend(self, rows: list[Row], deadline: Deadline) -> None:
        columns = {name: [row[0][name] for row in rows] for name in rows[0][0]}
        priorities = None if all(row[1] is None for row in rows) else [row[1] for row in rows]
        meta: dict[str, Any] = {"version": [row[2] for row in rows], "trajectory": [row[3] for row in rows]}
        tags = [row[4] for row in rows]
        limit = deadline.left(f"{len(rows)} items of add are not sent")
        self._buffer.extend(columns, priorities, tag=tags if any(tags) else None, timeout=limit, **meta)

    def _remove(self, count: int) -> None:
        with self._changed:
            del self._rows[:count]


def _like(first: dict[str, npt.NDArray[Any]], fields: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Returns an item with the types of the first one; the first dimension of a field may differ, which makes it jagged."""
    if set(first) != set(fields):
        raise invalid(f"the item has the fields {sorted(fields)}; required: {', '.join(first)}, as the first item")
    for name, value in fields.items():
        of_first = first[name]
        same_shape = value.ndim == of_first.ndim and value.shape[1:] == of_first.shape[1:]
        if not same_shape or not np.can_cast(value.dtype, of_first.dtype, "same_kind"):
            found, required = (f"{array.dtype}{list(array.shape)}" for array in (value, of_first))
            raise invalid(f"field {name} has {found}; the first item has {required}")
    return {name: fields[name].astype(value.dtype, copy=False) for name, value in first.items()}
