import asyncio
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engram
from engram import ReplayBuffer


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    with engram.connect(workers=3, config={"replicationFactor": 2, "partitions": 8}) as db:
        yield db


def items(count: int, start: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rows = np.arange(start, start + count)
    return {
        "obs": np.repeat(rows[:, None], 3, axis=1).astype(np.float32),
        "action": (rows % 5).astype(np.int8),
        "reward": rows.astype(np.float64),
        "done": rows % 2 == 0,
    }


def test_items_come_back_bit_for_bit_with_their_handles(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "roundtrip", capacity=10_000)
    data = items(5_000)
    handles = buffer.extend(data, np.linspace(0.5, 2, 5_000), version=3, trajectory=np.arange(5_000) // 100 + 1, tag="new")
    assert len(handles) == len(set(handles.tolist())) == len(buffer) == 5_000
    order = np.random.default_rng(1).permutation(5_000)
    batch = buffer.get(handles[order])
    assert np.array_equal(batch.index, handles[order])
    for name, column in data.items():
        assert batch[name].dtype == column.dtype and np.array_equal(batch[name], column[order])
    assert set(batch["version"].tolist()) == {3} and set(batch.tags) == {"new"}
    assert batch.priorities == pytest.approx(np.linspace(0.5, 2, 5_000)[order], rel=1e-5)
    assert "obs: float32[5000, 3]" in repr(batch)
    part = buffer.get(handles[:2], fields=["reward"])
    assert set(part) == {"reward", "index", "weight", "version"}
    listed = buffer.list(tag="new")
    assert len(listed.index) == 5_000 and "obs" not in listed
    assert len(buffer.list(tag="old").index) == 0


def test_draws_follow_the_priorities(db: engram.Database) -> None:
    sampler = engram.Prioritized(alpha=1.0, beta=1.0)
    buffer = ReplayBuffer(db, "priorities", capacity=100, batch_size=1_000, sampler=sampler, seed=7)
    handles = buffer.extend(items(4), [1.0, 2.0, 3.0, 4.0])
    batch = buffer.sample()
    share = np.bincount(batch["reward"].astype(int), minlength=4) / 1_000
    assert share == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.06)
    # The weight of an item is proportional to one over its probability.
    weights = {int(reward): weight for reward, weight in zip(batch["reward"], batch["weight"], strict=True)}
    assert weights[1] / weights[3] == pytest.approx(2.0, rel=1e-3)
    changed = buffer.update_priority(handles, [0.0, 0.0, 1.0, 0.0])
    assert (changed.updated, changed.stale) == (4, 0)
    assert set(buffer.sample()["reward"].tolist()) == {2.0}
    again = ReplayBuffer(db, "priorities", batch_size=1_000, sampler=sampler, seed=7)
    again.step = 1
    assert np.array_equal(again.sample()["reward"], again.sample(step=1)["reward"]), "a draw depends on its step only"


def test_stale_handles_reach_no_other_item(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "stale", capacity=100, sampler=engram.Uniform())
    handles = buffer.extend(items(10))
    assert buffer.delete(handles[:4]).updated == 4
    buffer.extend(items(4, start=50))
    changed = buffer.update_priorities(handles, 0.0)
    assert (changed.updated, changed.stale) == (6, 4)
    assert buffer.get(handles).missing.tolist() == handles[:4].tolist()


def test_consumers_get_each_item_once(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "consumed", capacity=1_000)
    buffer.extend(items(30))
    seen: list[float] = []
    for _ in range(3):
        batch = buffer.consume("trainer", 10, fields=["reward"])
        seen += batch["reward"].tolist()
        assert buffer.acknowledge("trainer", batch).updated == 10
    assert sorted(seen) == list(range(30))
    with pytest.raises(engram.TimeoutError):
        buffer.consume("trainer", 10, timeout=0.2)
    assert len(buffer.consume("evaluator", 30).index) == 30, "another consumer has its own cursor"


def test_single_items_are_sent_together(db: engram.Database) -> None:
    with ReplayBuffer(db, "single", capacity=1_000, sampler=engram.Fifo()) as buffer:
        for row in range(100):
            buffer.add({"x": np.float32(row)}, version=row)
        buffer.flush()
        assert sorted(buffer.sample(100)["x"].tolist()) == list(range(100))
        buffer.append({"x": np.float32(100)})
    assert len(buffer) == 101, "the end of with sends the rest"


def test_jagged_fields_and_half_precision(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "jagged", capacity=100)
    tokens = [np.arange(length, dtype=np.int32) for length in (3, 0, 5, 1)]
    handles = buffer.extend({"tokens": tokens, "logits": np.ones((4, 2), np.float16)})
    read = buffer.get(handles[::-1])
    assert [row.tolist() for row in read["tokens"]] == [row.tolist() for row in tokens[::-1]]
    assert read["logits"].dtype == np.float16


def test_saved_items_are_loaded_again(db: engram.Database, tmp_path: Path) -> None:
    buffer = ReplayBuffer(db, "saved", capacity=1_000)
    buffer.extend(items(50) | {"text": [np.arange(row % 3, dtype=np.uint8) for row in range(50)]}, 2.0, version=9, tag="t")
    path = tmp_path / "buffer.npz"
    assert buffer.save(path) == 50
    copy = ReplayBuffer(db, "copy", capacity=1_000)
    read = copy.get(copy.load(path))
    assert sorted(read["reward"].tolist()) == list(range(50))
    assert all(len(text) == reward % 3 for text, reward in zip(read["text"], read["reward"], strict=True))
    assert set(read["version"].tolist()) == {9} and set(read.tags) == {"t"}
    assert read.priorities == pytest.approx(np.full(50, 2.0), rel=1e-5)


def test_reader_waits_for_the_writer(db: engram.Database) -> None:
    reader = ReplayBuffer(db, "late", batch_size=5, sampler=engram.Uniform())
    with pytest.raises(engram.TimeoutError, match="no process has created the buffer 'late'"):
        reader.sample(timeout=0.1)
    assert len(reader) == 0
    writer = threading.Timer(0.2, lambda: ReplayBuffer(db, "late", capacity=100).extend(items(5)))
    writer.start()
    assert len(reader.sample(timeout=60).index) == 5
    writer.join()


def test_stream_draws_ahead_and_members_get_disjoint_parts(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "stream", capacity=1_000, batch_size=8, prefetch=2)
    buffer.extend(items(100))
    assert [len(batch.index) for batch in buffer.stream(batches=5)] == [8] * 5

    async def both() -> list[engram.Batch]:
        sample = buffer.aio.sample
        return list(await asyncio.gather(*(sample(8, step=3, rank=rank, world_size=2) for rank in (0, 1))))

    first, second = asyncio.run(both())
    assert not np.array_equal(first.index, second.index)


def test_forked_child_samples(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "forked", capacity=100, batch_size=4)
    buffer.extend(items(10))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if len(buffer.sample(timeout=20).index) == 4 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_items_survive_a_killed_worker(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "survives", capacity=10_000)
    stored: list[int] = []
    assert db.local is not None
    for part in range(10):
        if part == 3:
            db.local.kill_worker(1)
        stored += buffer.extend(items(50, start=50 * part)).tolist()
    read = buffer.get(np.array(stored, np.uint64))
    assert len(read.missing) == 0
    assert np.array_equal(read["reward"], np.arange(500.0))


def test_calls_after_the_cluster_is_gone_say_what_happened() -> None:
    owner = engram.connect()
    address = "grpc://" + ",".join(worker.address for worker in owner.status().workers)
    with engram.connect(address, timeout=20) as db:
        buffer = ReplayBuffer(db, "gone", capacity=1_000, batch_size=4, timeout=20)
        handles = buffer.extend(items(100))
        ahead, alone = ReplayBuffer(db, "gone", capacity=1_000, batch_size=4, prefetch=2, timeout=0.5).stream(), buffer.stream(timeout=0.5)
        assert len(next(ahead).index) == len(next(alone).index) == 4
        owner.close()

        def drained() -> None:
            # Two batches were drawn ahead, and a third may have been.
            for _ in range(4):
                next(ahead)

        calls: list[tuple[str, Callable[[], object]]] = [
            ("sample", lambda: buffer.sample(timeout=0.5)),
            ("stream", lambda: next(alone)),
            ("prefetched stream", drained),
            ("get", lambda: buffer.get(handles, timeout=0.5)),
            ("list", lambda: buffer.list(timeout=0.5)),
            ("consume", lambda: buffer.consume("learner", timeout=0.5)),
            ("extend", lambda: buffer.extend(items(10), timeout=0.5)),
            ("update_priority", lambda: buffer.update_priority(handles, 2.0, timeout=0.5)),
            ("delete", lambda: buffer.delete(handles, timeout=0.5)),
            ("stats", lambda: buffer.stats(timeout=0.5)),
        ]
        # At the same time: some wait for the cluster beyond their own wait.
        with ThreadPoolExecutor(len(calls)) as threads:
            started = {name: threads.submit(call) for name, call in calls}
        for name, call in started.items():
            failure = call.exception()
            assert isinstance(failure, (engram.UnavailableError, engram.TimeoutError)), (name, failure)
            assert failure.code in ("ENG-0601", "ENG-0602") and "no result within" not in str(failure), (name, failure)


BAD: list[tuple[str, Callable[[ReplayBuffer], object], str]] = [
    ("dtype", lambda b: b.extend(items(2) | {"reward": np.zeros(2, np.float32)}), r"field reward has float32\[\] .*float64\[\]"),
    ("shape", lambda b: b.extend(items(2) | {"obs": np.zeros((2, 4), np.float32)}), r"field obs has float32\[4\] .*float32\[3\]"),
    ("unknown field", lambda b: b.extend(items(2) | {"rew": np.zeros(2)}), r"unknown fields \['rew'\]; required: .*obs"),
    ("absent field", lambda b: b.extend({"obs": np.zeros((2, 3), np.float32)}), "no fields"),
    ("numbers of items", lambda b: b.extend(items(2) | {"reward": np.zeros(3)}), "different numbers of items"),
    ("NaN priority", lambda b: b.extend(items(2), [1.0, float("nan")]), r"priority\[1\] is nan"),
    ("negative priority", lambda b: b.update_priority([1], -1.0), r"priority\[0\] is -1.0"),
    ("priorities per item", lambda b: b.extend(items(2), [1.0]), r"priority has shape \(1,\); required: \(2,\)"),
    ("selected field", lambda b: b.sample(fields=["rew"]), "rew"),
    ("name for a list", lambda b: b.sample(fields="obs"), "required: a list"),
    ("batch of none", lambda b: b.sample(0), "batch_size is 0"),
    ("tags per item", lambda b: b.extend(items(2), tag=["a"]), "tag has 1 entries; required: 2"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_batch_names_what_is_wrong_and_changes_nothing(
    db: engram.Database, call: Callable[[ReplayBuffer], object], message: str
) -> None:
    buffer = ReplayBuffer(db, "checked", capacity=100)
    if len(buffer) == 0:
        buffer.extend(items(10))
    before = db.digest()
    with pytest.raises(engram.InvalidValueError, match=message):
        call(buffer)
    assert db.digest() == before


def test_other_settings_and_limiters_that_deadlock_are_refused(db: engram.Database) -> None:
    ReplayBuffer(db, "settings", capacity=100).extend(items(1))
    fields = {"obs": (np.float32, (3,)), "action": (np.int8, ()), "reward": (np.float64, ()), "done": (np.bool_, ())}
    with pytest.raises(engram.InvalidValueError, match="capacity: the buffer has 100"):
        ReplayBuffer(db, "settings", capacity=200, fields=fields)
    with pytest.raises(engram.InvalidValueError, match="block each other"):
        ReplayBuffer(db, "deadlock", fields=fields, limiter=engram.SampleToInsert(4.0, min_size=10, error=1.0))
    full = ReplayBuffer(db, "full", capacity=8, remover="refuse")
    full.extend(items(8))
    with pytest.raises(engram.CapacityError):
        full.extend(items(1))
    limited = ReplayBuffer(db, "limited", batch_size=2, limiter=engram.MinSize(20))
    limited.extend(items(10))
    with pytest.raises(engram.TimeoutError, match="20"):
        limited.sample(timeout=0.2)
    assert full.drop() == 8 and len(full) == 0


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_workers_of_a_data_loader_draw_tensors(db: engram.Database) -> None:
    import torch

    from engram.torch import ReplayBuffer as TensorBuffer

    buffer = TensorBuffer(db, "loader", capacity=1_000, batch_size=8)
    buffer.extend({"x": np.arange(100.0)})
    # Other packages, TorchRL among them, change the start method of this process.
    loader = torch.utils.data.DataLoader(buffer.dataset(batches=2), batch_size=None, num_workers=2, multiprocessing_context="fork")
    batches = list(loader)
    assert [type(batch["x"]) for batch in batches] == [torch.Tensor] * 4
    assert all(batch["x"].shape == (8,) for batch in batches)
