"""Deadlines of calls that take several requests."""

from __future__ import annotations

import time

from ._errors import create

#: How long a call that waits on the cluster may take beyond its timeout: the cluster's own error, which says for what it waits, comes first.
GRACE_SECONDS = 1.0


class Deadline:
    """Time at which a call ends, shared by its requests. Without a limit there is none: each request has the connection's."""

    def __init__(self, limit: float | None) -> None:
        self.limit = limit
        self._end = None if limit is None else time.monotonic() + limit

    def left(self, undone: str) -> float | None:
        """Returns the deadline of the next request, in seconds. At the end it raises an error with what is not done."""
        return None if self._end is None else self.remaining(undone)

    def remaining(self, undone: str, least: float = 0.0) -> float:
        """Returns the seconds to the end, more than ``least``; or raises an error with what is not done."""
        left = (self._end or 0.0) - time.monotonic()
        if left <= least:
            raise create("Timeout", f"deadline passed after timeout={self.limit} s: {undone}", "ENG-0602")
        return left


class Waiting(Deadline):
    """Deadline of a call that waits for items or for a limiter."""

    def __init__(self, limit: float) -> None:
        super().__init__(limit)

    def left(self, undone: str) -> float:
        """Returns the deadline of the next request, in seconds."""
        return self.remaining(undone) + GRACE_SECONDS

    def options(self, undone: str) -> dict[str, float]:
        """Returns how long the cluster waits, and the deadline of the request."""
        wait = self.remaining(undone)
        return {"wait": wait, "timeout": wait + GRACE_SECONDS}
