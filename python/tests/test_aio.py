import asyncio
import threading
from collections.abc import Iterator

import numpy as np
import pytest

import engram
import engram.aio


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    with engram.connect(workers=2, config={"partitions": 8}) as db:
        yield db


def test_awaitable_calls_use_no_threads(db: engram.Database) -> None:
    async def main() -> None:
        buffer = engram.aio.ReplayBuffer(db.aio, "threads", capacity=10_000, batch_size=8)
        await buffer.extend({"x": np.arange(100.0)}, priority=2.0)
        before = threading.active_count()
        batches = await asyncio.gather(*(buffer.sample(step=step) for step in range(50)))
        assert [len(batch.index) for batch in batches] == [8] * 50
        assert threading.active_count() == before
        assert (await buffer.stats())["items"] == 100
        with pytest.raises(engram.InvalidValueError, match="priority"):
            await buffer.update_priority(batches[0], -1.0)
        await db.aio.insert([1, 2], weights=[0.5, 0.25])
        assert (await db.aio.get([1])).weights.tolist() == [0.5]

    asyncio.run(main())


def test_single_items_are_added_on_the_event_loop(db: engram.Database) -> None:
    async def main() -> None:
        async with engram.aio.ReplayBuffer(db.aio, "single", capacity=1_000) as buffer:
            for row in range(20):
                await buffer.add({"x": float(row)})
            await buffer.append({"x": 20.0})
            await buffer.flush()
            assert sorted((await buffer.get(await buffer.list()))["x"].tolist()) == list(range(21))

    asyncio.run(main())


def test_cancelled_task_cancels_its_request(db: engram.Database) -> None:
    async def main() -> None:
        buffer = engram.aio.ReplayBuffer(db.aio, "cancelled", limiter=engram.MinSize(10), batch_size=4)
        await buffer.extend({"x": np.arange(4.0)})
        waiting = asyncio.create_task(buffer.sample(timeout=300))
        for _ in range(10):
            # Responses from the same worker: the request has arrived there.
            await buffer.stats()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await buffer.extend({"x": np.arange(20.0)})
        assert len((await buffer.sample()).index) == 4
        assert (await buffer.stats())["sampled"] == 4, "the cancelled request drew nothing"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_stream_requests_ahead_in_order(db: engram.Database) -> None:
    async def main() -> None:
        buffer = engram.ReplayBuffer(db, "ahead", capacity=1_000, batch_size=4, prefetch=3, sampler=engram.Uniform(), seed=5)
        await buffer.aio.extend({"x": np.arange(100.0)})
        ahead = [batch["x"].tolist() async for batch in buffer.aio.stream(batches=6)]
        assert ahead == [(await buffer.aio.sample(step=step))["x"].tolist() for step in range(6)]
        async with buffer.aio.stream() as batches:
            assert len((await anext(batches)).index) == 4
        assert len(asyncio.all_tasks()) == 1, "the end of the stream cancels what is in flight"

    asyncio.run(main())


def test_deadline_and_loop_that_ends_first(db: engram.Database) -> None:
    buffer = engram.ReplayBuffer(db, "absent")
    with pytest.raises(engram.TimeoutError, match="no process has created"):
        asyncio.run(buffer.aio.sample(timeout=0.2))

    async def leave() -> None:
        waiting = engram.ReplayBuffer(db, "left", limiter=engram.MinSize(10))
        await waiting.aio.extend({"x": np.arange(1.0)})
        # Its future is pending when the loop closes.
        asyncio.ensure_future(waiting.aio.sample(timeout=60))
        await asyncio.sleep(0.05)

    asyncio.run(leave())
    assert len(db.status().workers) == 2


def test_learner_runs_epochs_on_the_event_loop() -> None:
    async def main() -> None:
        async with engram.DistributedLearner(memory_capacity=1_000).aio as learner:
            history = await learner.run(3)
            assert [report.epoch for report in history] == [1, 2, 3]
            assert round(history[-1].convergence, 6) == 3.0
            assert [report.epoch async for report in learner.stream(2)] == [4, 5]

    asyncio.run(main())


def test_page_locked_memory_needs_cuda(db: engram.Database) -> None:
    with pytest.raises(engram.InvalidValueError, match="pin_memory is True with as_='numpy'"):
        engram.ReplayBuffer(db, "pinned", pin_memory=True)
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(engram.GpuError, match="no CUDA device"):
        engram.ReplayBuffer(db, "pinned", as_="torch", pin_memory=True)
