"""The workloads of engram-gpu-check in CuPy or PyTorch on the same GPU: timed by events, after warm-up, median of many runs.

gpu_peer.py cupy|torch --device N --repeats N WORKLOAD:MEMORIES ...     prints milliseconds as JSON
Weights are f32, groups u8, vectors f16; ties keep the input order, as the stable sorts of both do.
"""

import argparse
import importlib
import json
import statistics
import sys
import time

WARM_UP = 3
ENOUGH = 20
LONG_ENOUGH_S = 1.0
UPDATES = 10_000
MANY = 1_000_000
DRAWS = 100_000
TOP = 1_000
DIMENSION = 384
ALIKE = 10
DECAY = 0.01
DELTA = 0.04


class Cupy:
    def __init__(self, cupy, device):
        cupy.cuda.Device(device).use()
        cupy.cuda.runtime.getDeviceCount()
        self.xp, self.version = cupy, cupy.__version__
        self.random = cupy.random.default_rng(7)

    def event(self):
        event = self.xp.cuda.Event()
        event.record()
        return event

    def elapsed_ms(self, begin, end):
        end.synchronize()
        return self.xp.cuda.get_elapsed_time(begin, end)

    def works(self, memories):
        xp = self.xp
        weights = self.random.random(memories, dtype=xp.float32)
        groups = (xp.arange(memories) & 1).astype(xp.uint8)
        slots = self.random.integers(0, memories, UPDATES)

        def quality():
            second = xp.where(groups == 1, weights, 0)
            return weights.sum(), second.sum(), weights.min(), weights.max(), groups.sum()

        def epoch():
            xp.maximum(weights - DECAY, 0, out=weights)
            weights[slots] = xp.clip(weights[slots] + DELTA, 0, 1)
            return quality()

        def copy():
            source, target = xp.zeros(memories * 2, xp.uint32), xp.empty(memories * 2, xp.uint32)
            return lambda: xp.copyto(target, source)

        def gather():
            places = self.random.integers(0, memories, min(MANY, memories))
            return lambda: (weights[places], groups[places])

        def draws():
            sums = xp.cumsum(weights, dtype=xp.float64)
            wanted = self.random.random(DRAWS) * sums[-1]
            return lambda: xp.searchsorted(sums, wanted)

        def top():
            count = min(TOP, memories)

            def work():
                first = xp.argpartition(-weights, count - 1)[:count]
                return first[xp.argsort(-weights[first])]

            return work

        def recall():
            features = self.random.standard_normal((memories, DIMENSION), dtype=xp.float32).astype(xp.float16)
            query = self.random.standard_normal(DIMENSION, dtype=xp.float32).astype(xp.float16)

            def work():
                scores = (features @ query).astype(xp.float32) * weights
                first = xp.argpartition(-scores, ALIKE)[:ALIKE]
                return first[xp.argsort(-scores[first])]

            return work

        return {
            "copy": copy,
            "quality": lambda: quality,
            "epoch-by-slot": lambda: epoch,
            "gather": gather,
            "prefix-sums": lambda: lambda: xp.cumsum(weights, dtype=xp.float64),
            "draws": draws,
            "rank": lambda: lambda: xp.argsort(-weights),
            "top": top,
            "recall": recall,
        }


class Torch:
    def __init__(self, torch, device):
        if not torch.cuda.is_available():
            raise ImportError("this PyTorch finds no GPU")
        torch.cuda.set_device(device)
        torch.set_grad_enabled(False)
        self.xp, self.version = torch, torch.__version__

    def event(self):
        event = self.xp.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, begin, end):
        end.synchronize()
        return begin.elapsed_time(end)

    def works(self, memories):
        xp = self.xp
        weights = xp.rand(memories, device="cuda")
        groups = (xp.arange(memories, device="cuda") & 1).to(xp.uint8)
        slots = xp.randint(memories, (UPDATES,), device="cuda")

        def quality():
            second = xp.where(groups == 1, weights, 0)
            return weights.sum(), second.sum(), weights.aminmax(), groups.sum()

        def epoch():
            weights.sub_(DECAY).clamp_(min=0)
            weights[slots] = (weights[slots] + DELTA).clamp_(0, 1)
            return quality()

        def copy():
            source = xp.zeros(memories * 2, dtype=xp.int32, device="cuda")
            target = xp.empty_like(source)
            return lambda: target.copy_(source)

        def gather():
            places = xp.randint(memories, (min(MANY, memories),), device="cuda")
            return lambda: (weights[places], groups[places])

        def draws():
            sums = xp.cumsum(weights, 0, dtype=xp.float64)
            wanted = xp.rand(DRAWS, device="cuda", dtype=xp.float64) * sums[-1]
            return lambda: xp.searchsorted(sums, wanted)

        def recall():
            features = xp.randn(memories, DIMENSION, device="cuda", dtype=xp.float16)
            query = xp.randn(DIMENSION, device="cuda", dtype=xp.float16)
            return lambda: xp.topk((features @ query).float() * weights, min(ALIKE, memories))

        return {
            "copy": copy,
            "quality": lambda: quality,
            "epoch-by-slot": lambda: epoch,
            "gather": gather,
            "prefix-sums": lambda: lambda: xp.cumsum(weights, 0, dtype=xp.float64),
            "draws": draws,
            "rank": lambda: lambda: xp.sort(weights, descending=True, stable=True),
            "top": lambda: lambda: xp.topk(weights, min(TOP, memories)),
            "recall": recall,
        }


def measure(peer, repeats, work):
    for _ in range(WARM_UP):
        work()
    took_ms, started = [], time.perf_counter()
    while len(took_ms) < max(repeats, 1):
        begin = peer.event()
        work()
        took_ms.append(peer.elapsed_ms(begin, peer.event()))
        if len(took_ms) >= ENOUGH and time.perf_counter() - started >= LONG_ENOUGH_S:
            break
    return {"best": min(took_ms), "median": statistics.median(took_ms), "repeats": len(took_ms)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=["cupy", "torch"])
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("wanted", nargs="*")
    arguments = parser.parse_intermixed_args()
    try:
        module = importlib.import_module(arguments.peer)
        peer = {"cupy": Cupy, "torch": Torch}[arguments.peer](module, arguments.device)
    except ImportError as why:
        json.dump({"skipped": str(why)}, sys.stdout)
        return
    rows = []
    for wanted in arguments.wanted:
        workload, memories = wanted.split(":")
        make = peer.works(int(memories)).get(workload)
        if make is None:
            continue
        figure = measure(peer, arguments.repeats, make())
        rows.append({"workload": workload, "memories": int(memories), **figure})
        print(f"{arguments.peer}: {wanted}: {figure['median']:.4f} ms", file=sys.stderr)
    json.dump({"version": peer.version, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
