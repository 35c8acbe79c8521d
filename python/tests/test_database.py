import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import engram

ONE = 1 << 30


def test_weights_come_back_exactly_and_in_order(db: engram.Database) -> None:
    ids = np.arange(1_000, 6_000)[::-2]  # not contiguous, signed
    weights = np.linspace(0, 1, len(ids))
    written = db.insert(ids, weights, groups=7)
    assert (written.applied, written.created, written.rejected) == (len(ids), len(ids), 0)
    found = db.get(np.concatenate([ids, [999_999]]))
    assert found.ids.tolist() == ids.tolist()
    assert found.missing.tolist() == [999_999]
    assert np.array_equal(found.weights * ONE, np.floor(weights.astype(np.float32).astype(float) * ONE))
    assert set(found.groups.tolist()) == {7}
    assert db.quality()[7].count == len(ids)
    top = db.rank(3, group=7)
    assert top.weights.tolist() == sorted(found.weights, reverse=True)[:3]
    assert db.remove(ids).evicted == len(ids)
    assert 7 not in db.quality()


def test_keys_name_memories(db: engram.Database) -> None:
    db.insert(["tea", "coffee", "größe"], [0.5, 0.25, 0.125], groups=8)
    assert db.reinforce(["coffee"], deltas=[0.5]).applied == 1
    assert db.reinforce(["milk"], [0.9]).rejections[0][1] == "unknown"
    assert db.reinforce(["milk"], [0.9], on_missing="create").created == 1
    ranked = db.rank(group=8)
    assert ranked.keys == ["coffee", "tea", "größe"]
    assert ranked.weights.tolist() == [0.75, 0.5, 0.125]
    assert db.get("tea").weights.tolist() == [0.5]
    assert "coffee" in ranked._repr_html_() and "worker" in db._repr_html_()
    db.remove(["tea", "coffee", "größe", "milk"])


@pytest.mark.arrow
def test_ranked_memories_are_tables(db: engram.Database) -> None:
    db.insert(["tea", "coffee"], [0.5, 0.25], groups=9)
    ranked = db.rank(group=9)
    expected = {"id": ranked.ids.tolist(), "weight": [0.5, 0.25], "group": [9, 9], "key": ["tea", "coffee"]}
    pytest.importorskip("pyarrow")
    assert ranked.to_arrow().to_pydict() == expected
    db.remove(["tea", "coffee"])
    pytest.importorskip("pandas")
    assert ranked.to_pandas().to_dict("list") == expected


def test_recall_finds_the_nearest_and_payloads_come_back(db: engram.Database) -> None:
    features = np.eye(4, dtype=np.float64)
    db.insert([50, 51, 52, 53], 1.0, features=features, payloads=[b"a", b"", b"\0c", b"d"], groups=9)
    found = db.recall([0, 0.1, 1, 0], limit=2, group=9)
    assert found.ids.tolist() == [52, 51]
    assert found.scores is not None and found.scores[0] == pytest.approx(1 / np.sqrt(1.01), abs=1e-3)
    read = db.get([51, 53], features=True, payloads=True)
    assert read.features is not None and np.array_equal(read.features, features[[1, 3]])
    assert read.payloads == [b"", b"d"]


def test_decay_lowers_every_weight() -> None:
    with engram.connect() as db:
        db.insert(range(100), 0.5)
        before = db.digest()
        assert before.memories == len(db) == 100
        db.decay(0.125)
        assert set(db.get(range(100)).weights.tolist()) == {0.375}
        assert db.digest().digest != before.digest


BAD: list[tuple[str, Callable[[engram.Database], object], str]] = [
    ("weight above 1", lambda db: db.insert([1, 2], [0.5, 2.0]), r"weights\[1\] is 2.0; allowed: 0 to 1"),
    ("NaN", lambda db: db.insert([1], [float("nan")]), r"weights\[0\] is nan"),
    ("fewer weights than ids", lambda db: db.insert([1, 2], [0.5]), r"weights has shape \(1,\); required: \(2,\)"),
    ("ids of floats", lambda db: db.insert([1.5]), "ids has dtype float64; allowed: integers"),
    ("a matrix of ids", lambda db: db.get([[1]]), r"ids has shape \(1, 1\)"),
    ("a negative id", lambda db: db.get([3, -1]), r"ids\[1\] is -1"),
    ("text as weights", lambda db: db.insert([1], ["x"]), "weights has dtype <U1"),
    ("both signals", lambda db: db.reinforce([1], [0.5], deltas=[0.5]), "exactly one of qualities and deltas"),
    ("no signal", lambda db: db.reinforce([1]), "exactly one of qualities and deltas"),
    ("quality below 0", lambda db: db.reinforce([1], [-0.5]), r"qualities\[0\] is -0.5"),
    ("decay above 1", lambda db: db.decay(1.5), "amount is 1.5; allowed: 0 to 1"),
    ("group above 255", lambda db: db.insert([1], groups=[256]), r"groups\[0\] is 256"),
    ("features of another dimension", lambda db: db.insert([1], features=[[1.0, 2.0]]), "2 values for 1 ids at dimension 4"),
    ("infinite features", lambda db: db.insert([1], features=[[1, 2, 3, np.inf]]), r"features\[0, 3\] is inf"),
    ("rows of features", lambda db: db.insert([1, 2], features=np.eye(4)), "features has 4 rows; required: 2"),
    ("a long key", lambda db: db.insert(["x" * 2000]), "1,?024"),
    ("a timeout of 0", lambda db: db.rank(timeout=0), "timeout is 0"),
    ("recall of none", lambda db: db.recall([1, 0, 0, 0], limit=0), "limit is 0; allowed: 1 to 4096"),
]


@pytest.mark.parametrize(("call", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_argument_names_what_is_allowed(
    db: engram.Database, call: Callable[[engram.Database], object], message: str
) -> None:
    before = db.digest()
    with pytest.raises(engram.InvalidValueError, match=message) as raised:
        call(db)
    assert raised.value.code == "ENG-0507" and isinstance(raised.value, ValueError)
    assert db.digest() == before


def test_empty_batches_are_accepted(db: engram.Database) -> None:
    assert db.insert([], []).applied == 0
    assert len(db.get(np.empty(0))) == 0


def test_deadline_is_an_error_with_its_code(db: engram.Database, stop_process: Callable[[int], None]) -> None:
    assert db.local is not None
    workers = [worker["process"]["pid"] for worker in db.local.endpoints()["workers"]]
    try:
        for worker in workers:
            stop_process(worker)
        with pytest.raises(engram.TimeoutError) as raised:
            db.get([1], timeout=0.25)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)
    assert raised.value.code == "ENG-0602" and isinstance(raised.value, TimeoutError)


def test_awaitable_calls_run_at_once(db: engram.Database) -> None:
    async def read() -> list[engram.Memories]:
        await db.aio.insert([70, 71], [0.25, 0.75])
        return list(await asyncio.gather(*(db.aio.get([id]) for id in (70, 71))))

    assert [float(found.weights[0]) for found in asyncio.run(read())] == [0.25, 0.75]


def test_forked_child_connects_again(db: engram.Database) -> None:
    db.insert([80], [0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if db.get([80], timeout=20).weights.tolist() == [0.5] else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert db.get([80]).weights.tolist() == [0.5], "the cluster of the parent is still running"


def test_folder_keeps_data_and_a_second_cluster_on_it_is_refused(tmp_path: Path) -> None:
    address = f"file:{tmp_path / 'data'}"
    with engram.connect(address) as db:
        db.insert(range(10), 0.5)
        digest = db.digest()
        with pytest.raises(engram.ConflictError, match="ENG-0401"):
            engram.connect(address)
    with engram.connect(address) as db:
        assert db.digest() == digest
    with pytest.raises(engram.UnavailableError, match="closed"):
        db.digest()


def test_manifest_and_address_reach_the_running_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    manifest = tmp_path / "cluster.yaml"
    manifest.write_text(
        "apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata: { name: tea }\nspec: { workers: 2 }\n"
    )
    with engram.connect(manifest) as first:
        first.insert([1], [0.5])
        second = engram.connect(str(manifest))
        assert second.local is None and second.get([1]).weights.tolist() == [0.5]
        workers = second.status().workers
        assert len(workers) == 2
        with engram.connect("grpc://" + ",".join(worker.address for worker in workers)) as third:
            assert third.digest() == first.digest()
        second.close()
        assert len(first) == 1, "the connection that did not start the cluster does not stop it"
    manifest.write_text(manifest.read_text().replace("workers", "wrokers"))
    with pytest.raises(engram.ConfigError, match="wrokers"):
        engram.connect(manifest)


@pytest.mark.parametrize("address", ["grpc://nowhere", "http://x:1", "kube://a/b", "missing.yaml"])
def test_bad_address_is_a_configuration_error(address: str) -> None:
    with pytest.raises(engram.ConfigError):
        engram.connect(address)


def test_interrupt_ends_a_waiting_call() -> None:
    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        started = time.monotonic()
        try:
            with pytest.raises(KeyboardInterrupt):
                engram.connect(f"grpc://127.0.0.1:{silent.getsockname()[1]}", timeout=60)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert time.monotonic() - started < 30, "not at the end of the deadline"


def test_cluster_ends_with_a_killed_process() -> None:
    program = "import engram, time; db = engram.connect(); print(db.local.endpoints()['pid'], flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        supervisor = int(child.stdout.readline())
        child.kill()
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{supervisor}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{supervisor}")
