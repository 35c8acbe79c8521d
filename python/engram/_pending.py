"""Single items that are sent together."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

#: How long single items are collected before they are sent, in seconds.
GROUPING_SECONDS = 0.005
#: Single items that are sent at once at the latest.
GROUPED = 1024


class Appender(Protocol):
    """What appends items: a replay buffer."""

    def extend(self, data: Any, priority: Any = None, /, *, version: Any, trajectory: Any, tag: Any) -> Any:
        """Appends items."""


class Pending:
    """Single items that are collected, and the thread that sends them."""

    def __init__(self, buffer: Appender) -> None:
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
