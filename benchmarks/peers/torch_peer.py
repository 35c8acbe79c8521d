"""Engram's benchmarks done by PyTorch on the CPU: eager decay, indexed updates, reductions by group, sorting."""

import os

import torch

import peer


def epoch(memories):
    generator = torch.Generator().manual_seed(peer.SEED)
    initial = torch.rand(memories, generator=generator)
    weights = initial.clone()
    halves = weights[: memories // 2], weights[memories // 2 :]
    ids = torch.randint(torch.iinfo(torch.int64).max, (memories,), generator=generator).sort().values
    slots = torch.randperm(memories, generator=generator)[: peer.UPDATES]
    wanted = ids[slots]

    def turn(touched):
        weights.sub_(peer.DECAY).clamp_(min=0)
        weights[touched] = (weights[touched] + peer.DELTA).clamp_(0, 1)
        return [(half.numel(), half.sum(), *half.aminmax()) for half in halves]

    yield "epoch-by-slot", lambda: turn(slots)
    weights.copy_(initial)
    yield "epoch-by-id", lambda: turn(torch.searchsorted(ids, wanted))


def store(memories):
    return (workload for workload in epoch(memories) if workload[0] == "epoch-by-id")


def rank(memories):
    generator = torch.Generator().manual_seed(peer.SEED)
    top = min(peer.TOP, memories)
    for kind, weights in (
        ("random", torch.rand(memories, generator=generator)),
        ("tied", torch.full((memories,), 0.5)),
    ):
        yield f"rank-{kind}", lambda weights=weights: torch.argsort(weights, descending=True)
        yield f"top-{kind}", lambda weights=weights: torch.topk(weights, top)


def recall(memories):
    generator = torch.Generator().manual_seed(peer.SEED)
    features = torch.nn.functional.normalize(torch.randn(memories, peer.DIMENSION, generator=generator))
    query = torch.nn.functional.normalize(torch.randn(peer.DIMENSION, generator=generator), dim=0)
    weights = torch.rand(memories, generator=generator)
    first = min(peer.ALIKE, memories)
    yield "recall", lambda: torch.topk(torch.mv(features, query) * weights, first)


if __name__ == "__main__":
    torch.set_num_threads(os.cpu_count() or 1)
    with torch.inference_mode():
        peer.main(
            "torch",
            torch.__version__,
            torch.get_num_threads(),
            lambda suite, memories: {"epoch": epoch, "store": store, "rank": rank, "recall": recall}[suite](memories),
        )
