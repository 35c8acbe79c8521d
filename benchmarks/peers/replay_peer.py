"""The work of Engram's suite replay, done by other replay buffers: cpprb and TorchRL in process, Reverb over gRPC on loopback, TransferQueue
through its own processes. Usage: replay_peer.py PEER replay --memories N..."""

import importlib.metadata
import os
import sys

import numpy as np

import peer

# 256 bytes per item.
OBSERVATION = (2, 31)
BATCH = 512
INSERT = 4_096
ALPHA = 0.6
BETA = 0.4
# Of peers that are filled over gRPC or ZeroMQ: larger ones take longer to fill than the rest of the suite.
MOST_LOOPBACK = 100_000


def items(count, rng):
    return {
        "obs": rng.random((count, *OBSERVATION), dtype=np.float32),
        "act": rng.integers(0, 4, (count, 1)).astype(np.int32),
        "rew": rng.random((count, 1), dtype=np.float32),
    }


def priorities(count, rng):
    return rng.random(count, dtype=np.float32) + np.float32(0.01)


def cpprb(memories):
    from cpprb import PrioritizedReplayBuffer

    rng = np.random.default_rng(peer.SEED)
    fields = {
        "obs": {"shape": OBSERVATION, "dtype": np.float32},
        "act": {"shape": 1, "dtype": np.int32},
        "rew": {"shape": 1, "dtype": np.float32},
    }
    buffer = PrioritizedReplayBuffer(memories, fields, alpha=ALPHA)
    for start in range(0, memories, 1 << 16):
        count = min(1 << 16, memories - start)
        buffer.add(**items(count, rng), priorities=priorities(count, rng))
    more, weights = items(INSERT, rng), priorities(INSERT, rng)
    drawn = buffer.sample(BATCH, BETA)["indexes"]
    errors = priorities(BATCH, rng)
    yield "replay-sample", lambda: buffer.sample(BATCH, BETA)
    yield "replay-update", lambda: buffer.update_priorities(drawn, errors)
    yield "replay-insert", lambda: buffer.add(**more, priorities=weights)


def torchrl(memories):
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import PrioritizedSampler

    rng = np.random.default_rng(peer.SEED)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(memories),
        sampler=PrioritizedSampler(memories, alpha=ALPHA, beta=BETA),
        batch_size=BATCH,
    )

    def batch(count):
        return TensorDict({name: torch.from_numpy(data) for name, data in items(count, rng).items()}, batch_size=count)

    for start in range(0, memories, 1 << 16):
        buffer.extend(batch(min(1 << 16, memories - start)))
    more, drawn = batch(INSERT), buffer.sample()["index"]
    errors = torch.from_numpy(priorities(BATCH, rng))
    yield "replay-sample", buffer.sample
    yield "replay-update", lambda: buffer.update_priority(drawn, errors)
    yield "replay-insert", lambda: buffer.extend(more)


def reverb(memories):
    import reverb as library

    if memories > MOST_LOOPBACK:
        return
    rng = np.random.default_rng(peer.SEED)
    table = library.Table(
        "train",
        sampler=library.selectors.Prioritized(ALPHA),
        remover=library.selectors.Fifo(),
        max_size=memories,
        rate_limiter=library.rate_limiters.MinSize(1),
    )
    server = library.Server([table], port=None)
    client = library.Client(f"localhost:{server.port}")

    def insert(count):
        # One item per step, one chunk per 64 steps.
        with client.trajectory_writer(num_keep_alive_refs=64) as writer:
            data = items(count, rng)
            for row in range(count):
                writer.append({name: column[row] for name, column in data.items()})
                steps = {name: column[-1:] for name, column in writer.history.items()}
                writer.create_item("train", priority=1.0, trajectory=steps)
            writer.flush()

    # One flush per piece: what waits to be sent is in memory.
    for start in range(0, memories, INSERT):
        insert(min(INSERT, memories - start))
    keys = [sample[0].info.key for sample in client.sample("train", BATCH)]
    errors = dict(zip(keys, priorities(BATCH, rng).tolist()))
    yield "replay-loopback-sample", lambda: list(client.sample("train", BATCH))
    yield "replay-loopback-update", lambda: client.mutate_priorities("train", updates=errors)
    yield "replay-loopback-insert", lambda: insert(INSERT)
    server.stop()


def transferqueue(memories):
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    if memories > MOST_LOOPBACK:
        return
    rng = np.random.default_rng(peer.SEED)
    # Its actors reserve more cores than this machine may have; without them it waits.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init()

    def batch(count):
        return TensorDict({name: torch.from_numpy(data) for name, data in items(count, rng).items()}, batch_size=count)

    number = 0

    def put(count):
        nonlocal number
        keys = [f"{number + row}" for row in range(count)]
        number += count
        tq.kv_batch_put(keys=keys, partition_id="train", fields=batch(count), tags=[{} for _ in keys])

    for start in range(0, memories, INSERT):
        put(min(INSERT, memories - start))

    def get():
        keys = [f"{row}" for row in rng.integers(0, memories, BATCH)]
        tq.kv_batch_get(keys=list(dict.fromkeys(keys)), partition_id="train")

    # It has no priorities: keys are drawn alike.
    yield "replay-loopback-sample", get
    yield "replay-loopback-insert", lambda: put(INSERT)
    tq.close()
    ray.shutdown()


PEERS = {
    "cpprb": (cpprb, "cpprb"),
    "torchrl": (torchrl, "torchrl"),
    "reverb": (reverb, "dm-reverb"),
    "transferqueue": (transferqueue, "TransferQueue"),
}

if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    name = sys.argv.pop(1)
    workloads, package = PEERS[name]
    version = importlib.metadata.version(package)
    peer.main(name, version, 1, lambda suite, memories: workloads(memories))
