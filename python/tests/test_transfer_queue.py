"""TransferQueue itself, with Ray and our backend. Its own tests run in `cargo xtask python --test --integrations`."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import engram

pytestmark = [
    pytest.mark.transferqueue,
    # Of Ray, torch and TransferQueue, in their own code.
    pytest.mark.filterwarnings("ignore"),
]
tq = pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    with engram.connect(workers=2, config={"replicationFactor": 2, "partitions": 8}) as db:
        yield db


@pytest.fixture(scope="module")
def queue(db: engram.Database) -> Iterator[Any]:
    import ray
    from omegaconf import OmegaConf

    import engram.transfer_queue  # noqa: F401 - registers the backend

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    address = "grpc://" + ",".join(worker.address for worker in db.status().workers)
    section = {"address": address, "capacity": 100_000}
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": {"storage_backend": "Engram", "Engram": section}}))
    yield tq.get_client()
    tq.close()
    ray.shutdown()


def fill(client: Any, partition: str, rows: int, seed: int = 0) -> tuple[Any, Any]:
    import torch
    from tensordict import NonTensorStack, TensorDict

    random = torch.Generator().manual_seed(seed)
    data = TensorDict(
        {
            "ids": torch.randint(0, 1000, (rows, 7), generator=random),
            "half": torch.randn((rows, 3), generator=random).to(torch.bfloat16),
            "score": torch.randn(rows, generator=random),
            "text": NonTensorStack(*[f"row {row}" for row in range(rows)]),
        },
        batch_size=[rows],
    )
    metadata = client.put(data=data, partition_id=partition)
    return metadata, data


def read(client: Any, partition: str, fields: list[str], rows: int) -> Any:
    return client.get_meta(data_fields=fields, batch_size=rows, partition_id=partition, mode="force_fetch")


def rows_of(written: Any, metadata: Any, column: Any) -> Any:
    """Returns the rows of a column in the order of other metadata: the controller need not hand out slots in order."""
    places = {index: row for row, index in enumerate(written.global_indexes)}
    return column[[places[index] for index in metadata.global_indexes]]


def same(found: Any, expected: Any) -> bool:
    import torch

    return all(torch.equal(mine, its) for mine, its in zip(found.unbind(), expected.unbind(), strict=True))


def test_values_come_back_and_fields_are_added_later(queue: Any) -> None:
    import torch
    from tensordict import TensorDict

    _, data = fill(queue, "round", 300)
    found = queue.get_data(read(queue, "round", ["ids", "half", "score", "text"], 300))
    assert all(same(found[field], data[field]) for field in ("ids", "half", "score"))
    assert list(found["text"]) == list(data["text"])
    part = read(queue, "round", ["score"], 300)
    queue.put(data=TensorDict({"reward": torch.arange(300.0)}, batch_size=[300]), metadata=part)
    assert same(queue.get_data(read(queue, "round", ["reward"], 300))["reward"], torch.arange(300.0))
    store = queue.storage_manager.storage_client.store
    assert len(store.buffer) == 600
    # Metadata of one field: the samples are cleared whole, and what it did not name is swept.
    queue.clear_samples(read(queue, "round", ["score"], 300))
    assert store.sweep() == 600 and len(store.buffer) == 0


def test_held_metadata_of_a_cleared_sample_is_refused(queue: Any) -> None:
    import torch
    from tensordict import TensorDict

    from engram.transfer_queue import StaleHandleError

    fill(queue, "stale", 4)
    held = read(queue, "stale", ["ids", "score"], 4)
    queue.clear_samples(held)
    # The controller gives free slots away in the order of their release.
    new, data = fill(queue, "stale", 400, seed=1)
    now = read(queue, "stale", ["ids", "score"], 400)
    assert set(held.global_indexes) <= set(now.global_indexes), "the controller gives the slots to new samples"
    with pytest.raises(Exception, match="get refused: .* stale") as refused:
        queue.get_data(held)
    assert isinstance(refused.value, StaleHandleError) or isinstance(refused.value.__cause__, StaleHandleError)
    with pytest.raises(Exception, match="put refused: .* stale"):
        queue.put(data=TensorDict({"late": torch.zeros(4)}, batch_size=[4]), metadata=held)
    with pytest.raises(RuntimeError, match="clear refused: .* stale"):
        queue.clear_samples(held)
    # The samples that have the slots are untouched, and readable although TransferQueue had marked them.
    again = read(queue, "stale", ["ids", "half", "score", "text"], 400)
    assert same(queue.get_data(again)["ids"], rows_of(new, again, data["ids"]))
    assert same(queue.get_data(now)["score"], rows_of(new, now, data["score"]))
    queue.clear_samples(again)


def test_samples_survive_every_decay(queue: Any, db: engram.Database) -> None:
    written, data = fill(queue, "decayed", 30)
    for _ in range(5):
        db.decay(0.5)
    store = queue.storage_manager.storage_client.store
    store.sweep()
    metadata = read(queue, "decayed", ["ids", "score"], 30)
    assert same(queue.get_data(metadata)["ids"], rows_of(written, metadata, data["ids"]))
    queue.clear_samples(metadata)


def test_overwritten_version_stays_until_the_sample_is_cleared(queue: Any) -> None:
    import torch
    from tensordict import TensorDict

    written, data = fill(queue, "versions", 8)
    old = read(queue, "versions", ["score"], 8)
    queue.put(data=TensorDict({"score": torch.full((8,), 5.0)}, batch_size=[8]), metadata=read(queue, "versions", ["score"], 8))
    new = read(queue, "versions", ["score"], 8)
    assert same(queue.get_data(old)["score"], rows_of(written, old, data["score"])) and same(queue.get_data(new)["score"], torch.full((8,), 5.0))
    queue.clear_samples(new)
    with pytest.raises(Exception, match="get refused"):
        queue.get_data(old)


def test_every_acknowledged_sample_survives_a_killed_worker_and_its_disk(queue: Any, db: engram.Database) -> None:
    import shutil

    assert db.local is not None
    written, data = fill(queue, "killed", 200)
    # Its files are gone before it can read them again.
    shutil.rmtree(db.local.folder / "workers/1")
    db.local.kill_worker(1)
    metadata = read(queue, "killed", ["ids", "score"], 200)
    found = queue.get_data(metadata)
    assert all(same(found[field], rows_of(written, metadata, data[field])) for field in ("ids", "score"))
    later, more = fill(queue, "killed-2", 50, seed=2)
    metadata = read(queue, "killed-2", ["ids"], 50)
    assert same(queue.get_data(metadata)["ids"], rows_of(later, metadata, more["ids"]))


def test_unsupported_values_are_refused_without_a_trace(queue: Any) -> None:
    from tensordict import NonTensorStack, TensorDict

    before = len(queue.storage_manager.storage_client.store.buffer)
    for value, message in ((object(), "a object, which is not supported"), ({1: 2}, "JSON changes"), (b"x" * (5 << 20), "4")):
        with pytest.raises(Exception, match=message):
            queue.put(data=TensorDict({"v": NonTensorStack(value, value)}, batch_size=[2]), partition_id="refused")
    assert len(queue.storage_manager.storage_client.store.buffer) == before


def test_checkpoint_names_the_buffer(queue: Any, tmp_path: Any) -> None:
    manager = queue.storage_manager
    asyncio.run(manager.save_checkpoint(str(tmp_path)))
    asyncio.run(manager.load_checkpoint(str(tmp_path)))
    (tmp_path / "engram.json").write_text('{"cluster": "other", "buffer": "transfer-queue"}')
    with pytest.raises(engram.ConflictError, match="the checkpoint is of"):
        asyncio.run(manager.load_checkpoint(str(tmp_path)))


def test_loaded_checkpoint_serves_the_samples_as_they_were(queue: Any, tmp_path: Any) -> None:
    import torch
    from tensordict import TensorDict

    from engram.transfer_queue import StaleHandleError

    written, data = fill(queue, "saved", 20)
    tq.save_checkpoint(tmp_path / "first")
    every = read(queue, "saved", ["score"], 20)
    queue.put(data=TensorDict({"score": torch.full((20,), -1.0)}, batch_size=[20]), metadata=every)
    queue.clear_samples(read(queue, "saved", ["ids", "score"], 12))
    # The controller gives free slots away in the order of their release.
    fill(queue, "later", 500, seed=5)
    later = read(queue, "later", ["ids"], 500)
    assert set(later.global_indexes) & set(written.global_indexes), "later samples are in slots of cleared ones"
    tq.load_checkpoint(tmp_path / "first")
    metadata = read(queue, "saved", ["ids", "half", "score", "text"], 20)
    found = queue.get_data(metadata)
    assert all(same(found[field], rows_of(written, metadata, data[field])) for field in ("ids", "half", "score"))
    # The fence holds: those that took the slots are gone.
    with pytest.raises(Exception, match="get refused: .* stale") as refused:
        queue.get_data(later)
    assert isinstance(refused.value, StaleHandleError) or isinstance(refused.value.__cause__, StaleHandleError)
    # The same again, as after a second failure.
    queue.clear_samples(metadata)
    tq.load_checkpoint(tmp_path / "first")
    metadata = read(queue, "saved", ["score"], 20)
    assert same(queue.get_data(metadata)["score"], rows_of(written, metadata, data["score"]))
    queue.clear_samples(metadata)


def test_cleared_samples_stay_for_the_last_two_checkpoints(db: engram.Database) -> None:
    from engram.transfer_queue import EngramClient, StaleHandleError

    client = EngramClient({"address": "grpc://" + db.status().workers[0].address, "buffer": "kept", "capacity": 1_000})
    checkpoints, keys = client.store.checkpoints, [f"{slot}@a" for slot in range(6)]
    handles = client.put(keys, [f"value {slot}" for slot in range(6)])

    def clear(slot: int) -> None:
        client.clear(keys[slot : slot + 1], custom_backend_meta=handles[slot : slot + 1])

    def alive() -> list[int]:
        found = []
        for slot, key in enumerate(keys):
            try:
                assert client.get([key], custom_backend_meta=[handles[slot]]) == [f"value {slot}"]
            except StaleHandleError:
                continue
            found.append(slot)
        return found

    clear(0)
    first = checkpoints.save()
    clear(1)
    second = checkpoints.save()
    clear(2)
    assert alive() == [3, 4, 5] and client.store.sweep() == 0
    assert checkpoints.restore(second) and alive() == [2, 3, 4, 5]
    # The first one again: what came later is no checkpoint any more.
    assert checkpoints.restore(first) and alive() == [1, 2, 3, 4, 5]
    assert not checkpoints.restore(second)
    for number in range(3):
        clear(3 + number)
        checkpoints.save()
    assert not checkpoints.restore(first) and alive() == [1, 2]
    # Left are two samples, and the one that was cleared between the last two checkpoints.
    assert len(client.store.buffer) == 3
    client.close()


def test_client_alone_keeps_handles_by_key(db: engram.Database) -> None:
    from engram.transfer_queue import EngramClient, StaleHandleError

    client = EngramClient({"address": "grpc://" + db.status().workers[0].address, "buffer": "alone", "capacity": 1_000})
    keys = ["0@a", "1@a", "0@b", "1@b"]
    values: list[Any] = [np.arange(3), b"bytes", {"json": [1, None]}, "text"]
    handles = client.put(keys, values)
    found = client.get(keys, custom_backend_meta=handles)
    assert np.array_equal(found[0], values[0]) and found[1:] == values[1:]
    assert client.get(["1@b", "0@b"], custom_backend_meta=[handles[3], handles[2]]) == ["text", {"json": [1, None]}]
    client.clear(["0@a"], custom_backend_meta=[handles[0]])
    for key, handle in (("0@a", handles[0]), ("0@b", handles[2])):
        with pytest.raises(StaleHandleError, match="get refused"):
            client.get([key], custom_backend_meta=[handle])
    assert client.get(["1@a"], custom_backend_meta=[handles[1]]) == [b"bytes"]
    client.close()
