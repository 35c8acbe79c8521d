"""asyncio: the calls of this package, awaitable.

>>> import asyncio, engram.aio
>>> async def main() -> float:
...     async with await engram.aio.connect() as db:
...         await db.insert(["tea"], weights=[0.5])
...         return (await db.get(["tea"])).weights[0]
>>> float(asyncio.run(main()))
0.5

The native runtime completes a future of the event loop when a response is there; no thread waits for it. Cancelling a task cancels its
request: a write that was sent may have been applied.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ._database import AsyncDatabase as AsyncDatabase
from ._database import connect as _connect
from ._learner import AsyncDistributedLearner as AsyncDistributedLearner
from ._replay_aio import AsyncReplayBuffer as AsyncReplayBuffer
from ._replay import ReplayBuffer as _ReplayBuffer
from ._stream import AsyncStream as AsyncStream


async def connect(*arguments: Any, **options: Any) -> AsyncDatabase:
    """Connects as :func:`engram.connect`, with the same arguments. Starting a local cluster runs in a thread."""
    return (await asyncio.to_thread(_connect, *arguments, **options)).aio


def ReplayBuffer(db: AsyncDatabase, name: str, **options: Any) -> AsyncReplayBuffer:  # noqa: N802 - as the class it creates
    """Creates a replay buffer as :class:`engram.ReplayBuffer`, with the same arguments.

    >>> import asyncio, numpy as np
    >>> async def main() -> int:
    ...     async with await connect() as db, ReplayBuffer(db, "train", capacity=1_000, batch_size=4, prefetch=2) as buffer:
    ...         await buffer.extend({"obs": np.zeros((8, 2), np.float32)})
    ...         return sum([len(batch.index) async for batch in buffer.stream(batches=3)])
    >>> asyncio.run(main())
    12
    """
    return _ReplayBuffer(db.sync, name, **options).aio
