"""Recovery of torchft: two replicas train on the CPU over gloo, one is killed; the figure is the time between the last step that both committed and the next
step that the survivor commits. The heartbeat timeout of the lighthouse is 1 s instead of 5 s, in favour of the peer."""

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time

HEARTBEAT_TIMEOUT_MS = 1_000
ROUNDS = 3
# Steps of both replicas before one is killed.
STEPS = 30
BATCH = 512
LIMIT = 60


def replica(name, lighthouse):
    """Trains until it is killed; prints participants and time of every committed step."""
    import torch
    import torch.distributed as dist
    import torchft
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(42)
    model = nn.Sequential(nn.Linear(500, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = datetime.timedelta(seconds=30)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        replica_id=name,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timeout,
        quorum_timeout=timeout,
    )
    wrapped = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters(), 1e-4))
    inputs, targets = torch.rand(BATCH, 500), torch.rand(BATCH, 1)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        participants = manager.num_participants()
        optimizer.step()
        if manager.current_step() > before:
            print(participants, time.monotonic(), flush=True)


def commits(process):
    """Yields participants and time of the steps of a replica."""
    for line in process.stdout:
        words = line.split()
        if len(words) == 2:
            yield int(words[0]), float(words[1])
    raise SystemExit("a replica has ended")


def recovery_ms():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("127.0.0.1:0", 1, 100, 50, HEARTBEAT_TIMEOUT_MS)
    port = lighthouse.address().rsplit(":", 1)[1]
    address = f"http://127.0.0.1:{port}"
    start = [sys.executable, __file__, "--lighthouse", address, "--replica"]
    quiet = {**os.environ, "GLOG_minloglevel": "3", "RUST_LOG": "error"}
    replicas = [
        subprocess.Popen([*start, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=quiet, text=True)
        for name in ("survivor", "victim")
    ]
    signal.alarm(LIMIT)
    try:
        steps, last = 0, None
        for participants, at in commits(replicas[0]):
            if participants == 2:
                steps, last = steps + 1, at
                if steps == STEPS:
                    replicas[1].kill()
            elif steps >= STEPS:
                return (at - last) * 1e3
    finally:
        signal.alarm(0)
        for process in replicas:
            process.kill()
            process.wait()
        lighthouse.shutdown()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", choices=["train"])
    parser.add_argument("--memories", nargs="*", help="ignored: the sizes are fixed")
    parser.add_argument("--replica")
    parser.add_argument("--lighthouse")
    arguments = parser.parse_args()
    if arguments.replica:
        replica(arguments.replica, arguments.lighthouse)
        return
    import importlib.metadata

    took_ms = [recovery_ms() for _ in range(ROUNDS)]
    row = {"workload": "recovery", "memories": 2, "best": min(took_ms), "median": statistics.median(took_ms)}
    version = importlib.metadata.version("torchft-nightly")
    print(json.dumps({"peer": "torchft", "version": version, "threads": 1, "rows": [{**row, "repeats": ROUNDS}]}))


main()
