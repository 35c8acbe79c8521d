from collections.abc import Iterator
from typing import Any

import pytest

import engram

pytestmark = [pytest.mark.torchrl, pytest.mark.filterwarnings("ignore")]
torchrl = pytest.importorskip("torchrl", reason="torchrl is not installed")


@pytest.fixture(scope="module")
def db() -> Iterator[engram.Database]:
    with engram.connect(workers=2, config={"replicationFactor": 2, "partitions": 4}) as db:
        yield db


def steps(count: int, start: int = 0) -> Any:
    import torch
    from tensordict import TensorDict

    rows = torch.arange(start, start + count)
    nested = {"obs": rows[:, None].expand(count, 3).float() + 1, "reward": rows[:, None].double()}
    return TensorDict({"obs": rows[:, None].expand(count, 3).float(), "action": rows % 4, "next": TensorDict(nested, [count])}, [count])


def test_replay_buffer_of_torchrl_writes_around_and_samples(db: engram.Database) -> None:
    import torch
    from torchrl.data import ReplayBuffer

    from engram.torchrl import EngramStorage, collate

    storage = EngramStorage(db, "round", max_size=100)
    buffer = ReplayBuffer(storage=storage, collate_fn=collate, batch_size=32)
    buffer.extend(steps(80))
    buffer.add(steps(1, start=80)[0])
    assert len(buffer) == 81 and len(storage.buffer) == 81
    assert torch.equal(buffer[:10]["next", "reward"], steps(10)["next", "reward"])
    for start in range(81, 251, 10):
        buffer.extend(steps(10, start))
    assert len(buffer) == 100 and len(storage.buffer) == 100, "overwritten items are deleted"
    batch = buffer.sample()
    assert batch["obs"].shape == (32, 3) and batch["obs"].dtype == torch.float32
    assert (batch["next", "obs"] == batch["obs"] + 1).all() and batch["next", "reward"].min() >= 151
    buffer.empty()
    assert len(buffer) == 0 and len(storage.buffer) == 0


def test_prioritized_sampler_follows_updates(db: engram.Database) -> None:
    import torch
    from torchrl.data import PrioritizedSampler, TensorDictReplayBuffer

    from engram.torchrl import EngramStorage, collate

    sampler = PrioritizedSampler(max_capacity=50, alpha=1.0, beta=1.0)
    storage = EngramStorage(db, "priorities", max_size=50)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, collate_fn=collate, batch_size=64)
    buffer.extend(steps(50))
    buffer.update_priority(torch.arange(50), torch.where(torch.arange(50) == 7, 1.0, 1e-9))
    assert (buffer.sample()["next", "reward"] == 7).float().mean() > 0.9


def test_items_are_found_again_and_state_is_checked(db: engram.Database) -> None:
    import torch

    from engram.torchrl import EngramStorage

    first = EngramStorage(db, "again", max_size=20)
    first.set(range(15), steps(15))
    first.set(torch.tensor([3, 3]), steps(2, start=100))
    assert db.local is not None
    db.local.kill_worker(1)
    second = EngramStorage(db, "again", max_size=20)
    assert len(second) == 15 and second.contains(3) and not second.contains(15)
    assert second.get(3)["next", "reward"].item() == 101
    assert torch.equal(second.get(torch.tensor([9, 4]))["action"], torch.tensor([1, 0]))
    state = second.state_dict()
    second.set(19, steps(1)[0])
    second.load_state_dict(state)
    assert len(second) == 15
    with pytest.raises(IndexError, match="slot 19 is empty"):
        second.get(19)
    second.set(3, steps(1)[0])
    with pytest.raises(engram.NotFoundError, match="1 of 15 items of the state were overwritten"):
        second.load_state_dict(state)
    with pytest.raises(engram.ConflictError, match="no slots of a storage of 10"):
        EngramStorage(db, "again", max_size=10)
    single = EngramStorage(db, "single", max_size=4)
    single.set(0, torch.arange(3))
    assert torch.equal(single.get(0), torch.arange(3))
    with pytest.raises(engram.InvalidValueError, match="data is a str"):
        single.set(1, "text")


def test_buffer_takes_and_returns_tensordicts(db: engram.Database) -> None:
    import torch
    from tensordict import TensorDict

    from engram.torch import ReplayBuffer

    flat = steps(40).flatten_keys(".")
    buffer = ReplayBuffer(db, "tensordicts", capacity=100, batch_size=8, as_="tensordict")
    handles = buffer.extend(flat, priority=torch.ones(40))
    read = buffer.get(handles)
    assert isinstance(read, TensorDict) and read.batch_size == torch.Size([40])
    assert all(torch.equal(read[name], flat[name]) and read[name].dtype == flat[name].dtype for name in flat.keys())
    batch = buffer.sample()
    assert batch.unflatten_keys(".")["next", "obs"].shape == (8, 3)
    assert buffer.update_priority(batch, torch.full((8,), 2.0)).stale == 0
    buffer.add(flat[0])
    buffer.flush()
    assert len(buffer) == 41
    with pytest.raises(engram.InvalidValueError, match="field next is nested"):
        buffer.extend(steps(2))
    jagged = ReplayBuffer(db, "jagged-tensordicts", capacity=100, as_="tensordict")
    rows = [torch.arange(length) for length in (2, 0, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for data in ({"tokens": rows}, TensorDict({"tokens": nested}, [3])):
        assert [row.tolist() for row in jagged.get(jagged.extend(data))["tokens"]] == [[0, 1], [], [0, 1, 2]]
