"""``AsyncReplayBuffer``: the awaitable calls of a replay buffer."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

from ._aio import in_thread, twin
from ._arrays import Timeout
from ._batch import Batch
from ._replay import ReplayBuffer
from ._stream import AsyncStream, Member, part_of


class AsyncReplayBuffer:
    """Awaitable calls of a :class:`ReplayBuffer`. Cancelling the task cancels the request.

    ``add``, ``flush``, ``save``, ``load``, ``to_arrow`` and ``close`` run in a thread of the event loop's pool: a cancelled one goes on.
    ``dataset``, which is for processes of a ``DataLoader``, is the buffer's own: ``buffer.dataset()``.
    """

    def __init__(self, sync: ReplayBuffer) -> None:
        self.sync = sync

    extend = twin(ReplayBuffer.extend)
    add = in_thread(ReplayBuffer.add)
    append = add
    flush = in_thread(ReplayBuffer.flush)
    sample = twin(ReplayBuffer.sample)
    get = twin(ReplayBuffer.get)
    list = twin(ReplayBuffer.list)
    update_priority = twin(ReplayBuffer.update_priority)
    update_priorities = twin(ReplayBuffer.update_priorities)
    delete = twin(ReplayBuffer.delete)
    consume = twin(ReplayBuffer.consume)
    acknowledge = twin(ReplayBuffer.acknowledge)
    stats = twin(ReplayBuffer.stats)
    save = in_thread(ReplayBuffer.save)
    load = in_thread(ReplayBuffer.load)
    to_arrow = in_thread(ReplayBuffer.to_arrow)
    close = in_thread(ReplayBuffer.close)
    drop = twin(ReplayBuffer.drop)

    def stream(
        self,
        group: Member | None = None,
        *,
        batches: int | None = None,
        fields: Sequence[str] | None = None,
        timeout: Timeout = None,
    ) -> AsyncStream:
        """Yields batches: ``async for batch in buffer.aio.stream()``; ``prefetch`` of them are requested ahead."""

        def draw() -> Coroutine[Any, Any, Batch]:
            return self.sample(fields=fields, timeout=timeout, **part_of(group))

        return AsyncStream(draw, self.sync.prefetch, batches)

    def __aiter__(self) -> AsyncStream:
        return self.stream()

    async def __aenter__(self) -> AsyncReplayBuffer:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
