import asyncio
import gc
import os
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engram
from engram import ReplayBuffer, reverb
from engram._local import program


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
    assert "obs: float32[5000, 3]" in repr(batch) and "obs" in batch._repr_html_()
    assert "roundtrip" in buffer._repr_html_() and "capacity" in buffer._repr_html_()
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


def test_add_refuses_an_item_with_other_fields_and_stores_the_rest(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "fields-of-add", capacity=1_000)
    bad: list[dict[str, Any]] = [{"x": np.float32(0), "y": 1}, {}, {"x": np.zeros(2, np.float32)}, {"x": np.complex64(1)}]
    for _ in range(2):
        for row in range(10):
            buffer.add({"x": np.float32(row)})
        for item in bad:
            with pytest.raises(engram.InvalidValueError, match="field"):
                buffer.add(item)
        with pytest.raises(engram.InvalidValueError, match="bytes are not allowed"):
            buffer.add({"x": np.float32(0)}, tag="t" * 300)
        buffer.flush()
    assert len(buffer) == 20


def test_absent_priorities_are_the_initial_one(db: engram.Database) -> None:
    with ReplayBuffer(db, "initial", capacity=100, initial_priority=3.0) as buffer:
        buffer.add({"x": 0.0})
        buffer.add({"x": 1.0}, 5.0)
        buffer.flush()
        handles = buffer.extend({"x": np.zeros(2)}, [None, 2.0])
        assert sorted(buffer.list().priorities.tolist()) == pytest.approx([2.0, 3.0, 3.0, 5.0], rel=1e-5)
        assert buffer.get(handles).priorities == pytest.approx([3.0, 2.0], rel=1e-5)


def test_jagged_fields_and_half_precision(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "jagged", capacity=100)
    tokens = [np.arange(length, dtype=np.int32) for length in (3, 0, 5, 1)]
    handles = buffer.extend({"tokens": tokens, "logits": np.ones((4, 2), np.float16)})
    read = buffer.get(handles[::-1])
    assert [row.tolist() for row in read["tokens"]] == [row.tolist() for row in tokens[::-1]]
    assert read["logits"].dtype == np.float16
    empty = buffer.get(np.empty(0, np.uint64))
    assert empty["tokens"] == [] and empty["logits"].shape == (0, 2)
    # Rows of a read batch stay jagged where their lengths are equal.
    copy = ReplayBuffer(db, "jagged-copy", capacity=100)
    copy.extend({"tokens": buffer.get(handles[:1])["tokens"]})
    copy.extend({"tokens": tokens})


@pytest.mark.torch
def test_bfloat16_tensors_come_back(db: engram.Database, tmp_path: Path) -> None:
    import torch

    from engram.torch import ReplayBuffer as TensorBuffer

    values = torch.randn((6, 3)).to(torch.bfloat16)
    buffer, path = TensorBuffer(db, "bfloat16", capacity=100), tmp_path / "bfloat16.npz"
    handles = buffer.extend({"x": values, "rows": [values[0, :length] for length in (1, 2, 3, 0, 1, 2)]})
    buffer.save(path)
    copy = TensorBuffer(db, "bfloat16-copy", capacity=100)
    for read in (buffer.get(handles), copy.get(copy.load(path))):
        order = read["x"][:, 0].argsort()
        assert read["x"].dtype == torch.bfloat16 and torch.equal(read["x"][order], values[values[:, 0].argsort()])
        assert {row.dtype for row in read["rows"]} == {torch.bfloat16}
        assert sorted(len(row) for row in read["rows"]) == [0, 1, 1, 2, 2, 3]
    with TensorBuffer(db, "bfloat16-add", capacity=100) as single:
        single.add({"x": values[0]})
        single.flush()
        assert torch.equal(single.get(single.list())["x"], values[:1])


def test_bfloat16_arrays_come_back(db: engram.Database, tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.arange(6, dtype=np.float32).reshape(3, 2).astype(ml_dtypes.bfloat16)
    buffer, path = ReplayBuffer(db, "ml-dtypes", capacity=100), tmp_path / "buffer.npz"
    handles = buffer.extend({"x": values})
    buffer.save(path)
    copy = ReplayBuffer(db, "ml-dtypes-copy", capacity=100)
    for read in (buffer.get(handles)["x"], copy.get(copy.load(path))["x"]):
        assert read.dtype == values.dtype and np.array_equal(read, values)


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


def test_files_are_those_of_the_command_line(db: engram.Database, tmp_path: Path) -> None:
    def command(*arguments: str) -> None:
        assert db.local is not None
        subprocess.run([program(), "buffer", *arguments, "--state-dir", str(db.local.folder)], check=True, capture_output=True)

    # Elements of two bytes are bfloat16, as ml_dtypes stores them.
    half = np.arange(8, dtype=np.uint16).view("V2").reshape(4, 2)
    data = items(4) | {"half": half, "tokens": [np.full(2, row, np.int32) for row in range(4)]}
    fields: dict[str, Any] = {"obs": (np.float32, (3,)), "action": (np.int8, ()), "reward": (np.float64, ()), "done": (np.bool_, ())}
    fields |= {"half": ("bfloat16", (2,)), "tokens": (np.int32, (None,))}
    saved, exported = tmp_path / "saved.npz", tmp_path / "exported.npz"
    first = ReplayBuffer(db, "saved-by-python", capacity=100, fields=fields)
    first.extend(data, [1.0, 2.0, 3.0, 4.0], version=7, trajectory=3, tag=["a", "", "bc", "d"])
    assert first.save(saved) == 4
    command("import", "imported", str(saved), "--capacity", "100")
    command("export", "imported", str(exported))
    last = ReplayBuffer(db, "loaded", capacity=100)
    read = last.get(last.load(exported))
    order = np.argsort(read["reward"])
    for name, column in data.items():
        assert [np.asarray(read[name][row]).tobytes() for row in order] == [np.asarray(row).tobytes() for row in column], name
    assert [read.tags[row] for row in order] == ["a", "", "bc", "d"] and set(read["version"].tolist()) == {7}
    assert read.priorities[order] == pytest.approx([1.0, 2.0, 3.0, 4.0], rel=1e-5) and set(read.trajectories.tolist()) == {3}
    last.extend({name: column[:1] for name, column in data.items()} | {"tokens": [np.zeros(5, np.int32)]})
    np.savez(tmp_path / "other.npz", **{"tokens.rows": np.ones(2, np.uint32)})
    with pytest.raises(engram.InvalidValueError, match="other.npz has tokens.rows; allowed: an array per field"):
        last.load(tmp_path / "other.npz")


@pytest.mark.arrow
def test_items_are_an_arrow_table(db: engram.Database) -> None:
    pa = pytest.importorskip("pyarrow")
    buffer = ReplayBuffer(db, "arrow", capacity=10_000)
    tokens = [np.arange(row % 3, dtype=np.int32) for row in range(5_000)]
    handles = buffer.extend(items(5_000) | {"tokens": tokens}, 2.0, version=4, tag="t")
    table = buffer.to_arrow(handles)
    assert table.num_rows == 5_000 and table["_handle"].to_pylist() == handles.tolist()
    assert table["reward"].to_pylist() == list(range(5_000)) and table["tokens"].to_pylist() == [row.tolist() for row in tokens]
    assert table.schema.field("obs").type == pa.list_(pa.float32(), 3) and table["obs"][7].as_py() == [7.0, 7.0, 7.0]
    assert table["done"].to_pylist()[:2] == [True, False] and set(table["_tag"].to_pylist()) == {"t"}
    assert buffer.to_arrow(fields=["reward"]).column_names == ["reward", "_handle", "_priority", "_version", "_trajectory", "_tag"]
    assert buffer.to_arrow(handles[:0]).num_rows == 0


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


class Place:
    """What a buffer reads of a group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def test_streams_of_a_group_are_the_parts_of_one_draw(db: engram.Database) -> None:
    ReplayBuffer(db, "parts", capacity=1_000).extend(items(100))

    def handle(batch_size: int = 8) -> ReplayBuffer:
        return ReplayBuffer(db, "parts", capacity=1_000, batch_size=batch_size)

    whole = [batch.index.tolist() for batch in handle(16).stream(batches=3)]
    members = [handle().stream(Place(rank, 2), batches=3) for rank in (0, 1)]
    for expected, parts in zip(whole, zip(*members, strict=True), strict=True):
        assert [len(part.index) for part in parts] == [8, 8]
        assert sorted(np.concatenate([part.index for part in parts]).tolist()) == sorted(expected)
    # The membership may change between two batches.
    place, second = Place(0, 1), handle(16).sample(step=1).index.tolist()
    stream = handle().stream(place)
    next(stream)
    place.rank, place.size = 1, 2
    assert set(next(stream).index.tolist()) <= set(second)
    with pytest.raises(ValueError, match="rank 0 of 0 members"):
        next(handle().stream(Place(0, 0)))


def test_local_sample_has_the_factor_of_its_gradients(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "local", capacity=100, sampler=engram.Prioritized(alpha=1.0))
    buffer.extend(items(10))
    batch = buffer.sample(8, local=True)
    assert batch.scale == pytest.approx(1 / 8)
    assert buffer.sample(8).scale is None
    with pytest.raises(engram.InvalidValueError, match="world: 2 is not allowed with local; allowed: at most 1"):
        buffer.sample(8, rank=1, world_size=2, local=True)


def test_abandoned_stream_ends_its_thread(db: engram.Database) -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "engram-prefetch"}

    buffer = ReplayBuffer(db, "abandoned", capacity=100, batch_size=4, prefetch=2)
    buffer.extend(items(10))
    before = threads()
    for _ in buffer:
        assert threads() - before
        break
    gc.collect()
    deadline = time.monotonic() + 30
    while threads() - before:
        assert time.monotonic() < deadline, "the thread still draws batches"
        time.sleep(0.01)


def test_sampler_of_the_manifest_draws() -> None:
    declared = {"name": "declared", "capacity": 100, "fields": [{"name": "x", "dtype": "float64"}], "sampler": {"kind": "Fifo"}}
    with engram.connect(config={"buffers": [declared]}) as db:
        buffer = ReplayBuffer(db, "declared", sampler=None, batch_size=3)
        deadline = time.monotonic() + 60
        while "declared" not in {name for name, _, _ in engram._engram.list_buffers(db._native).wait()}:
            assert time.monotonic() < deadline, "the workers have not created the buffer"
            time.sleep(0.05)
        buffer.extend({"x": np.arange(10.0)})
        assert buffer.sample(timeout=60)["x"].tolist() == [0.0, 1.0, 2.0]
        with pytest.raises(engram.InvalidValueError, match="beta is 0.5 with sampler=None"):
            buffer.sample(beta=0.5)
        other = ReplayBuffer(db, "other", sampler=None, batch_size=3)
        other.extend({"x": np.arange(10.0)})
        with pytest.raises(engram.InvalidValueError, match="sampler: absent is not allowed"):
            other.sample()


def test_queue_of_reverb_hands_out_each_item_once_and_waits_for_room(db: engram.Database) -> None:
    server = reverb.Server([reverb.Table.queue("queue", 4)], db=db)
    client = server.localhost_client()
    for step in range(4):
        client.insert([step], priorities={"queue": 1.0})
    taken = [sample[0].data[0].item() for sample in client.sample("queue", num_samples=2, timeout=30)]
    assert taken == [0, 1]
    for step in (4, 5):
        client.insert([step], priorities={"queue": 1.0})
    taken = [sample[0].data[0].item() for sample in client.sample("queue", num_samples=4, timeout=30)]
    assert taken == [2, 3, 4, 5]
    with pytest.raises(engram.InvalidValueError, match="allowed: at least 2"):
        reverb.rate_limiters.Stack(1)


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


def test_calls_to_a_stopped_worker_end_at_their_timeout_and_name_it(stop_process: Callable[[int], None]) -> None:
    with engram.connect() as db:
        assert db.local is not None
        buffer = ReplayBuffer(db, "stopped", capacity=100_000, batch_size=4)
        handles = buffer.extend(items(100))
        other = ReplayBuffer(db, "stopped", capacity=100_000)
        other.add({name: column[0] for name, column in items(1).items()})
        other.flush()
        worker = db.local.endpoints()["workers"][0]["process"]["pid"]
        stop_process(worker)
        try:
            # Its send has the timeout of the connection.
            other.add({name: column[0] for name, column in items(1).items()})
            calls: dict[str, Callable[[], object]] = {
                "sample": lambda: buffer.sample(timeout=0.5),
                "stream": lambda: next(buffer.stream(timeout=0.5)),
                "get": lambda: buffer.get(handles, timeout=0.5),
                "list": lambda: buffer.list(timeout=0.5),
                "consume": lambda: buffer.consume("learner", timeout=0.5),
                "extend": lambda: buffer.extend(items(10_000), timeout=0.5),
                "update_priority": lambda: buffer.update_priority(handles, 2.0, timeout=0.5),
                "delete": lambda: buffer.delete(handles, timeout=0.5),
                "stats": lambda: buffer.stats(timeout=0.5),
                "flush": lambda: other.flush(timeout=0.5),
                "open": lambda: ReplayBuffer(db, "stopped", timeout=0.5).stats(),
                "get of memories": lambda: db.get([1], timeout=0.5),
                "insert": lambda: db.insert([1], timeout=0.5),
            }
            with ThreadPoolExecutor(len(calls)) as threads:
                started = {name: threads.submit(timed, call) for name, call in calls.items()}
            for name, call in started.items():
                seconds, failure = call.result()
                assert isinstance(failure, engram.TimeoutError) and failure.code == "ENG-0602", (name, failure)
                assert "worker 0" in str(failure) or (name, "are still being sent" in str(failure)) == ("flush", True), (name, failure)
                # Far more than the grace, for a machine with other work, and less than the ten seconds of an attempt.
                assert seconds < 7, (name, seconds)
        finally:
            os.kill(worker, signal.SIGCONT)
        other.flush(timeout=60)


def timed(call: Callable[[], object]) -> tuple[float, BaseException | None]:
    """Returns the seconds that a call took, and its exception."""
    start = time.monotonic()
    try:
        call()
    except BaseException as failure:
        return time.monotonic() - start, failure
    return time.monotonic() - start, None


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
    ("list of none", lambda b: b.list(limit=0), "limit is 0"),
    ("long tag", lambda b: b.extend(items(2), tag=["a", "b" * 256]), r"tag\[1\]: 256 bytes are not allowed; allowed: at most 255"),
    ("late priority", lambda b: b.extend(items(90), [1.0] * 89 + [-1.0]), r"priority\[89\] is -1.0"),
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
    limited = ReplayBuffer(db, "limited", batch_size=2, limiter=engram.MinSize(20))
    limited.extend(items(10))
    with pytest.raises(engram.TimeoutError, match="20"):
        limited.sample(timeout=0.2)


def test_item_that_is_too_large_and_another_schema_are_refused(db: engram.Database) -> None:
    buffer = ReplayBuffer(db, "large", capacity=100, fields={"tokens": (np.uint8, (None,))})
    buffer.extend({"tokens": [np.zeros(3, np.uint8)]})
    before = db.digest()
    with pytest.raises(engram.InvalidValueError, match=r"\d+ bytes are not allowed; allowed: at most 4194304"):
        buffer.extend({"tokens": [np.zeros(1, np.uint8), np.zeros(5 << 20, np.uint8)]})
    with pytest.raises(engram.InvalidValueError, match=r"field tokens: the buffer has tokens uint8\[\*\], the request .*float32"):
        ReplayBuffer(db, "large", capacity=100, fields={"tokens": (np.float32, (None,))})
    assert db.digest() == before and len(buffer) == 1


def test_full_buffer_refuses_whole_batches_and_says_what_is_allowed(db: engram.Database) -> None:
    full = ReplayBuffer(db, "full", capacity=8, remover="refuse")
    full.extend(items(6))
    before = db.digest()
    message = r"buffer full is full: 6 items of capacity 8, 3 more are not allowed; allowed: 2 \(remover: Refuse\)"
    with pytest.raises(engram.CapacityError, match=message) as refused:
        full.extend(items(3))
    assert refused.value.code == "ENG-0504" and db.digest() == before
    full.extend(items(2, start=6))
    assert sorted(full.get(full.list().index)["reward"].tolist()) == list(range(8))
    assert full.drop() == 8 and len(full) == 0


def test_extend_of_several_requests_is_checked_before_the_first(db: engram.Database) -> None:
    full = ReplayBuffer(db, "room", capacity=5_000, remover="refuse")
    full.extend(items(1))
    before = db.digest()
    with pytest.raises(engram.CapacityError, match=r"buffer room is full: 1 items of capacity 5000, 10000 more .*; allowed: 4999") as refused:
        full.extend(items(10_000))
    assert refused.value.handles is None
    with pytest.raises(engram.InvalidValueError, match=r"tag\[4500\]: 300 bytes"):
        full.extend(items(4_999), tag=["t" * (300 if row == 4_500 else 1) for row in range(4_999)])
    assert db.digest() == before
    large = ReplayBuffer(db, "late-large", capacity=10_000, fields={"tokens": (np.uint8, (None,))})
    before = db.digest()
    with pytest.raises(engram.InvalidValueError, match=r"item 5000: 5242901 bytes are not allowed"):
        large.extend({"tokens": [np.zeros(5 << 20 if row == 5_000 else 1, np.uint8) for row in range(5_001)]})
    assert db.digest() == before


def test_error_of_a_later_request_has_the_handles_of_the_stored_items(db: engram.Database) -> None:
    limiter = engram.SampleToInsert(1.0, min_size=10, error=100)
    limited = ReplayBuffer(db, "stored-part", capacity=100_000, limiter=limiter)
    with pytest.raises(engram.TimeoutError, match="the first 4096 of 5000 items are appended") as failed:
        limited.extend(items(5_000), timeout=1.0)
    assert failed.value.handles is not None and len(limited) == 4_096
    assert np.array_equal(limited.get(failed.value.handles)["reward"], np.arange(4_096.0))


def test_batches_that_race_for_the_last_room_are_stored_whole_or_not_at_all(db: engram.Database) -> None:
    size, threads = 40, 8
    full = ReplayBuffer(db, "race", capacity=1_000, remover="refuse")

    def fill(writer: int) -> list[int]:
        stored = list[int]()
        buffer = ReplayBuffer(db, "race", capacity=1_000, remover="refuse")
        for number in range(100):
            start = (writer * 100 + number) * size
            try:
                buffer.extend(items(size, start=start))
            except engram.CapacityError as failure:
                assert "buffer race is full" in str(failure)
                break
            stored.append(start)
        return stored

    full.extend(items(size, start=10**6))
    with ThreadPoolExecutor(threads) as pool:
        stored = [10**6, *(start for part in pool.map(fill, range(threads)) for start in part)]
    found = full.get(full.list().index)["reward"].astype(int).tolist()
    assert sorted(found) == sorted(row for start in stored for row in range(start, start + size))


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
