"""The suites reduce and train done by PyTorch on the CPU: all-reduce of gloo between two processes, over one connection and over four, a step with
fused AdamW."""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

BATCH = 512
# Repeats of each size: about as many as the measuring program needs for a second.
REPEATS = {4 << 10: 2_000, 1 << 20: 500, 16 << 20: 60, 64 << 20: 20}


# Smaller messages are not split.
SPLIT = 64 << 10
WORKLOADS = {1: "all-reduce", 4: "all-reduce-4"}


def join(rank, port):
    """Returns a process group by number of connections, each with its own threads."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=datetime.timedelta(seconds=60))
    groups = {}
    for connections in WORKLOADS:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1") for _ in range(connections)]
        options._threads = 2 * connections
        options._timeout = datetime.timedelta(seconds=60)
        groups[connections] = dist.ProcessGroupGloo(dist.PrefixStore(f"{connections}", store), rank, 2, options)
    return groups


def all_reduces(rank, groups):
    """Yields (workload, bytes, milliseconds of each repeat); a tenth of the repeats warms up."""
    for size, repeats in REPEATS.items():
        for connections, group in groups.items():
            tensor, took_ms = torch.empty(size // 4), []
            parts = tensor.chunk(connections) if size > SPLIT else [tensor]
            for repeat in range(repeats + repeats // 10):
                tensor.fill_(rank + 1.0)
                before = time.perf_counter()
                for work in [group.allreduce([part]) for part in parts]:
                    work.wait()
                took_ms.append((time.perf_counter() - before) * 1e3)
                assert tensor[size // 12] == 3.0
            yield WORKLOADS[connections], size, took_ms[repeats // 10 :]


def reduce():
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, __file__, "--rank-1", str(port)], stdout=subprocess.DEVNULL)
    rows = list(all_reduces(0, join(0, port)))
    child.wait()
    return "gloo", 1, rows


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))

    def forward(self, x):
        return x + self.inner(x)


def train():
    torch.manual_seed(42)
    layers = [nn.Linear(500, 256), nn.ReLU(), Residual(), Residual(), nn.Linear(256, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
    assert sum(it.numel() for it in model.parameters()) == 432_641
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=1e-5, fused=True)
    inputs, targets = (torch.rand(BATCH, 500) < 0.11).float(), torch.rand(BATCH, 1)
    took_ms, first, loss = [], None, None
    started = time.perf_counter()
    while len(took_ms) < 5 or time.perf_counter() - started < 2.0:
        before = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        took_ms.append((time.perf_counter() - before) * 1e3)
        first = first if first is not None else loss.item()
    assert loss.item() < first
    return "torch", torch.get_num_threads(), [("train-step", BATCH, took_ms[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", choices=["reduce", "train"])
    parser.add_argument("--memories", nargs="*", help="ignored: the sizes are fixed")
    parser.add_argument("--rank-1", type=int, metavar="PORT")
    arguments = parser.parse_args()
    if arguments.rank_1:
        torch.set_num_threads(1)
        list(all_reduces(1, join(1, arguments.rank_1)))
        return
    torch.set_num_threads(1 if arguments.suite == "reduce" else os.cpu_count() or 1)
    peer, threads, measured = reduce() if arguments.suite == "reduce" else train()
    rows = [
        {
            "workload": workload,
            "memories": size,
            "best": min(took_ms),
            "median": statistics.median(took_ms),
            "repeats": len(took_ms),
        }
        for workload, size, took_ms in measured
    ]
    json.dump({"peer": peer, "version": torch.__version__, "threads": threads, "rows": rows}, sys.stdout)


main()
