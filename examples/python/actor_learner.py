"""An actor and a learner in two processes that share a replay buffer on a local cluster.

The actor appends experience of the policy version that it last read; the learner samples what is at most two versions old. A limiter
keeps four samples per insert: who is ahead waits.
"""

import multiprocessing
import sys

import numpy as np

import engram

BATCHES, BATCH, FIRST = 50, 64, 500


def settings() -> dict:
    limiter = engram.SampleToInsert(4.0, min_size=FIRST)
    return {"capacity": 20_000, "batch_size": BATCH, "sampler": engram.Uniform(), "limiter": limiter, "max_age": 2}


def actor(address: str, version) -> None:
    with engram.connect(address) as db, engram.ReplayBuffer(db, "experience", **settings()) as buffer:
        random = np.random.default_rng(0)
        while version.value < BATCHES:
            observations = random.standard_normal((25, 4), np.float32)
            try:
                buffer.extend({"obs": observations, "reward": observations.sum(1)}, version=version.value // 10, timeout=2)
            except engram.TimeoutError as waited:
                print(f"actor: {waited}", flush=True)


def learner(address: str, version) -> None:
    weights = np.zeros(4, np.float32)
    with engram.connect(address) as db:
        buffer = engram.ReplayBuffer(db, "experience", **settings())
        for step in range(BATCHES):
            policy = step // 10
            batch = buffer.sample(version=policy, timeout=60)
            error = batch["obs"] @ weights - batch["reward"]
            weights -= 0.1 * (batch["obs"] * error[:, None]).mean(0)
            version.value = step + 1
            if step % 10 == 9:
                age = policy - batch["version"].min()
                print(f"learner: batch {step + 1}, error {np.abs(error).mean():.4f}, oldest item {age} versions", flush=True)
        stats = buffer.stats()
        ratio = stats["sampled"] / (stats["appended"] - FIRST)
        print(f"learner: {ratio:.2f} samples per insert after the first {FIRST}, weights {weights.round(2)}")


if __name__ == "__main__":
    with engram.connect(workers=2) as db:
        address = "grpc://" + ",".join(worker.address for worker in db.status().workers)
        context = multiprocessing.get_context("spawn")
        version = context.Value("i", 0)
        processes = [context.Process(target=role, args=(address, version)) for role in (actor, learner)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        for process in processes:
            process.kill()
        sys.exit(any(process.exitcode for process in processes))
