"""Data-parallel PyTorch training that survives `kill -9` of a process without losing a step, and takes a new process in.

    pip install engram torch
    python ddp_elastic.py                           # three processes and a local cluster of three workers
    python ddp_elastic.py --ddp                     # through DistributedDataParallel and its communication hook
    python ddp_elastic.py --fsdp                    # a model of FSDP2 in each process
    python ddp_elastic.py --address grpc://worker-0:7443
    engram up examples/job.yaml --exit-when-done    # as a run of kind Job: each of its processes is one of the group

One process is killed in the middle, and another one joins. At the end all processes print the digest of parameters and optimizer state, which must
be the same, and every step must have been taken exactly once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time

import torch
from torch import nn

import engram
from engram.torch import Group

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--address", help="an existing cluster: grpc://host:port, or a manifest")
parser.add_argument("--group", default="ddp-elastic", help="name of the group")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--processes", type=int, default=3)
kinds = parser.add_mutually_exclusive_group()
kinds.add_argument("--ddp", action="store_true", help="use DistributedDataParallel")
kinds.add_argument("--fsdp", action="store_true", help="use fully_shard (FSDP2) over a mesh of one process")
parser.add_argument("--no-kill", action="store_true")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of other work per step")
parser.add_argument("--timeout", type=float, default=1.0, help="detection time of the group in seconds")
parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
arguments = parser.parse_args()

BATCH = 96


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this process's part of the batch of a step; together the members have the same samples at any size."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 32, generator=generator)
    targets = torch.sin(inputs[:, :4].sum(1, keepdim=True)) + 0.1 * torch.randn(BATCH, 1, generator=generator)
    return inputs[rank::size], targets[rank::size]


def shard(model: nn.Module) -> None:
    """Makes the model one of FSDP2 whose mesh is this process alone: the group does what is between processes."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def member() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(time.time_ns() % 2**31)  # on purpose: the group makes the states equal
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    if arguments.fsdp:
        shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"timeout": arguments.timeout, "min_members": 2}
    with Group(arguments.address, arguments.group, **options) as group:
        model = group.wrap(model, optimizer, ddp=arguments.ddp)
        print(json.dumps({"joined": group.steps, "rank": group.rank}), flush=True)
        taken = []
        while group.steps < arguments.steps:
            inputs, targets = batch(group.steps, group.rank, group.size)
            loss = (model(inputs) - targets).square().sum()
            group.samples = len(inputs)
            loss.backward()
            if group.step():
                taken.append(group.steps)
                print(json.dumps({"loss": loss.item() / len(inputs)} | group.last_step), flush=True)
            time.sleep(arguments.pause)
            while group.steps == 2 * arguments.steps // 3 and group.size < arguments.processes:
                time.sleep(0.01)  # until the new process is here: it takes longer to start than the rest of this training
        result = {"digest": group.digest(), "taken": len(taken), "first": taken[0], "last": taken[-1]}
        result["without_gaps"] = taken == list(range(taken[0], taken[-1] + 1))
        print(json.dumps(result | {"statistics": group.statistics}), flush=True)


class Member:
    """A process of the group, and what it printed."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, __file__, "--member", "--address", address, "--group", arguments.group]
        for option in ("steps", "processes", "pause", "timeout"):
            command += [f"--{option}", str(getattr(arguments, option))]
        self.process = subprocess.Popen(command + ["--ddp"] * arguments.ddp + ["--fsdp"] * arguments.fsdp, stdout=subprocess.PIPE, text=True)
        self.step, self.size, self.result = 0, 0, None
        self.losses: list[float] = []
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        for line in self.process.stdout:
            report = json.loads(line)
            if "loss" in report:
                self.step, self.size = report["step"], report["members"]
                self.losses.append(report["loss"])
            elif "joined" in report:
                self.step = max(self.step, report["joined"])
            else:
                self.result = report


def wait(what: str, condition, limit: float = 120.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"failed: no {what} within {limit} s")
        time.sleep(0.005)


def main(address: str) -> None:
    members = [Member(address) for _ in range(arguments.processes)]
    try:
        if not arguments.no_kill:
            victim = members[-1]
            wait("step", lambda: victim.step >= arguments.steps // 3)
            victim.process.send_signal(signal.SIGKILL)
            print(f"killed a process after step {victim.step}; a new one joins", flush=True)
            members.append(Member(address))
        living = [it for it in members if it is not members[arguments.processes - 1] or arguments.no_kill]
        wait("end", lambda: all(it.process.poll() is not None for it in living))
        for it in living:
            it.thread.join(10)
        results = [it.result for it in living]
        if any(it.process.returncode for it in living) or not all(results):
            sys.exit(f"failed: {[(it.process.returncode, it.result) for it in living]}")
        for number, result in enumerate(results):
            figures = result.pop("statistics")
            print(f"process {number}: {result}")
            recovery = 1e3 * figures["max_recovery_seconds"]
            print(f"           overlap {figures['overlap']:.0%}, recovery {recovery:.0f} ms, {figures['repeated']:.0f} steps reduced again")
        survivors = results[: len(results) - (not arguments.no_kill)]
        # A process that starts late joins at a later step.
        every = [range(it["first"], arguments.steps + 1) for it in survivors]
        is_whole = [it["without_gaps"] and it["taken"] == len(steps) for it, steps in zip(survivors, every, strict=True)]
        if not all(is_whole) or min(steps.start for steps in every) != 1:
            sys.exit("failed: a survivor lost a step")
        if not arguments.no_kill and not (results[-1]["first"] > 1 and results[-1]["without_gaps"]):
            sys.exit("failed: the new process did not take part")
        digests = {it["digest"] for it in results}
        if len(digests) != 1:
            sys.exit(f"failed: the processes differ: {digests}")
        print(f"loss {members[0].losses[0]:.3f} -> {members[0].losses[-1]:.3f}; all processes have digest {digests.pop()}")
    finally:
        for it in members:
            it.process.kill()


if "ENGRAM_RUN" in os.environ and not arguments.member and not arguments.address:
    # A process of a run of kind Job, which starts it again after a failure.
    arguments.address, arguments.group = "env:", os.environ["ENGRAM_GROUP"]
    arguments.processes = int(os.environ["ENGRAM_WORLD_SIZE"])
    member()
elif arguments.member:
    member()
elif arguments.address:
    main(arguments.address)
else:
    with engram.connect(workers=3, config={"replicationFactor": 2}) as db:
        main("grpc://" + ",".join(worker.address for worker in db.status().workers))
