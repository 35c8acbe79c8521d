"""Streams of batches that are drawn ahead."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypedDict

from ._batch import Batch
from ._errors import invalid


def _draw_ahead(
    draw: Callable[[], Batch], ready: queue.Queue[Batch | BaseException], stopped: threading.Event, batches: int | None
) -> None:
    """Draws batches until all are drawn, a draw fails, or the stream is closed."""
    while not stopped.is_set() and batches != 0:
        try:
            item: Batch | BaseException = draw()
        except BaseException as failure:
            item = failure
        batches = None if batches is None else batches - 1
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put(item, timeout=0.1)
                break
        if isinstance(item, BaseException):
            return


class Stream(Iterator[Batch]):
    """Batches of :meth:`ReplayBuffer.stream`. :meth:`close`, and the end of the last reference, end the thread that draws ahead."""

    def __init__(self, draw: Callable[[], Batch], depth: int, batches: int | None) -> None:
        self._stopped = threading.Event()
        self._draw, self._left = draw, batches
        self._queue: queue.Queue[Batch | BaseException] | None = queue.Queue(depth) if depth else None
        if self._queue is not None:
            # Without a reference to this object: the end of its last one ends the thread.
            arguments = (draw, self._queue, self._stopped, batches)
            threading.Thread(target=_draw_ahead, args=arguments, name="engram-prefetch", daemon=True).start()

    def __next__(self) -> Batch:
        if self._left == 0 or self._stopped.is_set():
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        if self._queue is None:
            return self._draw()
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


class AsyncStream(AsyncIterator[Batch]):
    """Batches of ``buffer.aio.stream``: ``depth`` requests are in flight, and are answered in order."""

    def __init__(self, draw: Callable[[], Coroutine[Any, Any, Batch]], depth: int, batches: int | None) -> None:
        self._draw, self._depth, self._left = draw, max(depth, 1), batches
        self._tasks: deque[asyncio.Task[Batch]] = deque()

    async def __anext__(self) -> Batch:
        while len(self._tasks) < self._depth and self._left != 0:
            self._tasks.append(asyncio.create_task(self._draw()))
            self._left = None if self._left is None else self._left - 1
        if not self._tasks:
            raise StopAsyncIteration
        try:
            return await self._tasks.popleft()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Cancels the requests that are in flight."""
        self._left, tasks = 0, list(self._tasks)
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


class Member(Protocol):
    """A member of a group of learners that draw from one plan, such as :class:`engram.torch.Group`."""

    @property
    def rank(self) -> int:
        """Rank, from 0."""

    @property
    def size(self) -> int:
        """Number of members."""


class Part(TypedDict, total=False):
    """The part of a draw that is a member's."""

    rank: int
    world_size: int


def part_of(group: Member | None) -> Part:
    """Returns the part of a draw that is a member's."""
    if group is None:
        return {}
    rank, size = group.rank, group.size
    while (rank, size) != (group.rank, group.size):
        # The membership changes meanwhile.
        rank, size = group.rank, group.size
    if not 0 <= rank < size:
        raise invalid(f"group has rank {rank} of {size} members; allowed: a process that has joined its group")
    return {"rank": rank, "world_size": size}
