"""Engram's benchmarks done by NumPy: eager decay, indexed updates, reductions by group, sorting."""

import os
import sys

import numpy as np

import peer


def epoch(memories):
    rng = np.random.default_rng(peer.SEED)
    initial = rng.random(memories, dtype=np.float32)
    weights = initial.copy()
    halves = weights[: memories // 2], weights[memories // 2 :]
    ids = np.sort(rng.choice(np.iinfo(np.int64).max, memories, replace=True).astype(np.uint64))
    slots = rng.choice(memories, min(peer.UPDATES, memories), replace=False)
    wanted = ids[slots]
    decay, delta = np.float32(peer.DECAY), np.float32(peer.DELTA)

    def turn(touched):
        np.subtract(weights, decay, out=weights)
        np.maximum(weights, np.float32(0), out=weights)
        weights[touched] = np.clip(weights[touched] + delta, 0, 1)
        return [(half.size, half.sum(), half.min(), half.max()) for half in halves]

    yield "epoch-by-slot", lambda: turn(slots)
    weights[:] = initial
    yield "epoch-by-id", lambda: turn(np.searchsorted(ids, wanted))


def store(memories):
    return (workload for workload in epoch(memories) if workload[0] == "epoch-by-id")


def rank(memories):
    rng = np.random.default_rng(peer.SEED)
    top = min(peer.TOP, memories)
    ids = rng.integers(np.iinfo(np.int64).max, size=memories, dtype=np.uint64)
    # The faster algorithm for each: the vectorised quicksort does not order ties, the stable sort finds its input sorted.
    for kind, algorithm, weights in (
        ("random", "quicksort", rng.random(memories, dtype=np.float32)),
        ("tied", "stable", np.full(memories, 0.5, dtype=np.float32)),
    ):
        descending = -weights
        yield f"rank-{kind}", lambda d=descending, a=algorithm: np.argsort(d, kind=a)
        yield f"rank-{kind}-by-id", lambda d=descending: np.lexsort((ids, d))

        def best(d=descending):
            chosen = np.argpartition(d, top - 1)[:top]
            return chosen[np.argsort(d[chosen])]

        yield f"top-{kind}", best

        def best_by_id(d=descending):
            last = np.partition(d, top - 1)[top - 1]
            before, ties = np.flatnonzero(d < last), np.flatnonzero(d == last)
            wanted = top - before.size
            if ties.size > wanted:
                ties = ties[np.argpartition(ids[ties], wanted - 1)[:wanted]]
            chosen = np.concatenate((before, ties))
            return chosen[np.lexsort((ids[chosen], d[chosen]))]

        yield f"top-{kind}-by-id", best_by_id


def recall(memories):
    rng = np.random.default_rng(peer.SEED)
    needed = memories * peer.DIMENSION * 4
    if needed > 0.8 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        print(f"numpy: recall {memories}: not measured, it needs {needed / 1e9:.1f} GB", file=sys.stderr)
        return
    # In place and in parts: a second copy of the largest size would not fit.
    features = np.empty((memories, peer.DIMENSION), dtype=np.float32)
    for part in np.array_split(features, max(1, memories // 100_000)):
        rng.standard_normal(dtype=np.float32, out=part)
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    query = rng.standard_normal(peer.DIMENSION, dtype=np.float32)
    query /= np.linalg.norm(query)
    weights = rng.random(memories, dtype=np.float32)
    first = min(peer.ALIKE, memories)

    def best():
        scores = (features @ query) * -weights
        chosen = np.argpartition(scores, first - 1)[:first]
        return chosen[np.argsort(scores[chosen])]

    yield "recall", best


def algebra(size):
    rng = np.random.default_rng(peer.SEED)
    if size == peer.FISHER_SAMPLES:
        scores = rng.standard_normal((size, peer.FISHER_PARAMETERS))
        yield "fisher", lambda: scores.T @ scores / size
        return
    left, right = (rng.random((size, size), dtype=np.float32) for _ in range(2))
    result = np.empty_like(left)
    # Blocks of rows that stay in the cache, with one buffer for all sums.
    sums = np.empty((128, size), dtype=np.float32)

    def product():
        for first in range(0, size, len(sums)):
            block = result[first : first + len(sums)]
            block.fill(-np.inf)
            for step in range(size):
                np.add(left[first : first + len(sums), step, None], right[step], out=sums)
                np.maximum(block, sums, out=block)

    yield "max-plus", product


SUITES = {"epoch": epoch, "store": store, "rank": rank, "recall": recall, "algebra": algebra}

if __name__ == "__main__":
    peer.main("numpy", np.__version__, 1, lambda suite, memories: SUITES[suite](memories))
