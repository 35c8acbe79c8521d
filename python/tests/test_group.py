"""Elastic groups with PyTorch: processes of this machine on a local cluster."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import engram
from engram._database import cluster_manifest
from engram._local import program, read_endpoints

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[2] / "examples/python/ddp_elastic.py"


def address(db: engram.Database) -> str:
    return "grpc://" + ",".join(worker.address for worker in db.status().workers)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [[], ["--ddp"], ["--fsdp"]], ids=["hooks", "ddp", "fsdp"])
def test_killed_process_costs_no_step_and_a_joiner_ends_with_the_same_bits(db: engram.Database, options: list[str]) -> None:
    command = [sys.executable, str(EXAMPLE), "--address", address(db), "--group", "-".join(["example", *options])]
    done = subprocess.run([*command, "--steps", "120", "--pause", "0.02", *options], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all processes have digest" in done.stdout


GRADIENTS = """
import json, sys, torch
from torch import nn
from engram.torch import Group

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
unused = nn.Linear(6, 2)
model.register_module("unused", unused)
inputs, targets = torch.randn(30, 6), torch.randn(30, 3)
parts = [slice(0, 20), slice(20, 29), slice(29, 30)]


def forward(model, x):
    module = model.module if hasattr(model, "module") else model
    return module[1:3](module[0](x))


class Head(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, use):
        out = self.body[2](self.body[1](self.body[0](x)))
        return out + (self.body.unused(x).sum() if use else 0)


head = Head(model)
if sys.argv[2] == "fsdp":
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1,))
    for layer in (model[0], model[2], unused):
        fully_shard(layer, mesh=mesh)
    fully_shard(head, mesh=mesh)
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
address, ddp = sys.argv[1], sys.argv[2] == "ddp"
with Group(address, "gradients-" + sys.argv[2], min_members=3, bucket_mb=0.0005, timeout=2.0) as group:
    wrapped = group.wrap(head, optimizer, ddp=ddp)
    while group.steps < 6:
        part = parts[group.rank]
        group.samples = part.stop - part.start
        # Only one process uses the last layer: the others need its gradient all the same.
        loss = (wrapped(inputs[part], group.rank == 1) - targets[part]).square().sum()
        loss.backward()
        assert group.step(), group.last_step
    own = [getattr(it.detach(), "full_tensor", it.detach)().clone() for it in head.parameters()]
    digest, statistics = group.digest(), group.statistics

torch.manual_seed(0)
reference = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))
reference.register_module("unused", nn.Linear(6, 2))
single = Head(reference)
optimizer = torch.optim.AdamW(single.parameters(), lr=1e-2)
for _ in range(6):
    optimizer.zero_grad()
    total = sum((single(inputs[part], index == 1) - targets[part]).square().sum() for index, part in enumerate(parts))
    (total / 30).backward()
    optimizer.step()
worst = max(float((a - b).abs().max()) for a, b in zip(own, single.parameters()))
print(json.dumps({"digest": digest, "worst": worst, "steps": statistics["steps"]}))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["hooks", "ddp", "fsdp"])
def test_uneven_batches_and_unused_parameters_equal_one_process_on_all_samples(db: engram.Database, kind: str) -> None:
    command = [sys.executable, "-c", GRADIENTS, address(db), kind]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    results = [json.loads(output) for output, _ in outputs]
    assert len({result["digest"] for result in results}) == 1
    assert all(result["worst"] < 1e-5 and result["steps"] == 6 for result in results), results


def test_bad_models_and_other_settings_are_rejected_with_the_field(db: engram.Database) -> None:
    import torch

    from engram.torch import Group

    def model(width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        layer = torch.nn.Linear(width, 1)
        return layer, torch.optim.SGD(layer.parameters(), lr=0.1)

    with pytest.raises(engram.InvalidValueError, match="min_members is 0"):
        Group(db, "settings", min_members=0)
    with Group(db, "settings") as group:
        with pytest.raises(engram.InvalidValueError, match="not supported; allowed: dense float32"):
            half = torch.nn.Linear(2, 1).half()
            group.wrap(half, torch.optim.SGD(half.parameters(), lr=0.1))
        group.wrap(*model())
        assert (group.size, group.rank, group.steps) == (1, 0, 0)
        with pytest.raises(engram.ConflictError, match="model: its parameters"):
            Group(db, "settings", join_timeout=10).wrap(*model(5))
        with pytest.raises(engram.ConflictError, match="timeout is 900 ms; allowed: 500 ms"):
            Group(db, "settings", timeout=0.9, join_timeout=10).wrap(*model())


SHARDED = """
import sys, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate

import engram
from engram.torch import Group


def refused(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        Group(sys.argv[1], "sharded").wrap(model, optimizer, **options)
    except engram.InvalidValueError as error:
        return str(error)
    raise AssertionError("the model was accepted")


dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[3]), world_size=2)
error = refused(fully_shard(nn.Linear(4, 2), mesh=dist.init_device_mesh("cpu", (2,))))
assert "weight is sharded over 2 processes: not supported" in error and "a mesh of one process in each member" in error, error
alone = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pair", "alone"))["alone"]
layer = nn.Linear(4, 2)
layer.weight = nn.Parameter(DTensor.from_local(layer.weight.detach(), alone, [Replicate()], run_check=False))
error = refused(layer)
assert "weight is a DTensor, but no module is one of fully_shard" in error, error
# Both processes have to make it.
error = refused(FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu")))
assert "FullyShardedDataParallel (FSDP1): not supported" in error, error
dist.destroy_process_group()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
error = refused(fully_shard(nn.Linear(4, 2), mesh=dist.init_device_mesh("cpu", (1,))), ddp=True)
assert "allowed: ddp=False" in error, error
"""


@pytest.mark.timeout(120)
def test_models_that_are_sharded_over_processes_are_rejected_with_what_is_allowed(db: engram.Database, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHARDED, address(db), str(tmp_path / "store")]
    processes = [subprocess.Popen([*command, rank], stderr=subprocess.PIPE, text=True) for rank in ("0", "1")]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


def test_state_of_an_fsdp_model_is_copied_and_installed_while_its_parameters_are_whole(db: engram.Database) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from engram._training_state import TrainingState

    def state(seed: int) -> TrainingState:
        torch.manual_seed(seed)
        model = fully_shard(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)), mesh=mesh)
        return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.1), None)

    inputs = torch.randn(8, 3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        first, second = state(0), state(1)
        first.model(inputs).square().sum().backward()
        first.optimizer.step()
        before, copies = first.digest(), []
        # Within a pass the modules have whole parameters; after a forward pass they keep them until the backward pass.
        hook = first.model[1].register_forward_pre_hook(lambda *_: copies.append(first.encode()))
        first.model(inputs).sum().backward()
        hook.remove()
        assert first.digest() == before
        second.model(inputs)
        second.install(copies[0])
        assert second.digest() == before
        first.model.eval()
        second.model.eval()
        for own, other in zip(first.model[0].parameters(), second.model[0].parameters(), strict=True):
            assert torch.equal(own.full_tensor(), other.full_tensor())
    finally:
        dist.destroy_process_group()


def test_step_with_a_gradient_that_is_not_finite_is_skipped(db: engram.Database) -> None:
    import torch

    from engram.torch import Group

    layer = torch.nn.Linear(2, 1)
    before = layer.weight.detach().clone()
    with Group(db, "finite") as group:
        model = group.wrap(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
        (model(torch.ones(1, 2)) * float("nan")).sum().backward()
        assert not group.step(samples=1)
        assert torch.equal(layer.weight, before)
        model(torch.ones(1, 2)).sum().backward()
        assert group.step(samples=1, clip_norm=0.5)
        assert group.last_step["members"] == 1 and group.steps == 2
        assert not torch.equal(layer.weight, before)
        assert group.statistics["skipped"] == 1


ELASTIC = """
import json, sys, time, torch
import torch.distributed as dist
from engram.torch import ElasticProcessGroup

torch.set_num_threads(1)
steps, state, failed, is_changed = 90, torch.zeros(2), False, False
with ElasticProcessGroup(sys.argv[1], "elastic", timeout=1.0, collective_timeout=5.0) as members:
    while state[0] < steps:
        is_changed |= members.sync(failed)
        failed = False
        try:
            if is_changed:
                dist.broadcast(state, members.root)
                is_changed = False
            elif dist.get_world_size() < 3 and state[0] in (0, 60):
                time.sleep(0.02)  # until all are here
            else:
                total = torch.ones(1)
                dist.all_reduce(total)
                assert total == dist.get_world_size()
                state += torch.tensor([1.0, total / dist.get_world_size()])
                print(json.dumps({"step": int(state[0]), "size": dist.get_world_size(), "rank": dist.get_rank()}), flush=True)
                time.sleep(0.01)
        except RuntimeError:
            failed = True
    print(json.dumps({"state": state.tolist()}), flush=True)
"""


@pytest.mark.timeout(200)
def test_process_group_of_pytorch_goes_on_with_the_living_members(db: engram.Database) -> None:
    import torch

    if not hasattr(torch.distributed, "_reconfigure"):
        pytest.skip("this PyTorch has no torch.distributed._reconfigure")

    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", ELASTIC, address(db)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first, second, victim = start(), start(), start()
    try:
        assert victim.stdout is not None
        for line in victim.stdout:
            if json.loads(line)["step"] >= 20:
                break
        victim.kill()
        victim.communicate()
        members = [first, second, start()]
        outputs = [member.communicate(timeout=150) for member in members]
        assert [member.returncode for member in members] == [0, 0, 0], outputs
        reports = [[json.loads(line) for line in output.splitlines()] for output, _ in outputs]
        assert [report[-1]["state"] for report in reports] == [[90.0, 90.0]] * 3
        assert [sorted({it["size"] for it in report[:-1]}) for report in reports] == [[2, 3], [2, 3], [3]]
        assert {report[-2]["rank"] for report in reports} == {0, 1, 2}
        # A joiner has the state of the others.
        assert reports[2][0]["step"] == 61
    finally:
        for process in (first, second, victim):
            process.kill()


SECURED = """
import json, sys, torch
from engram.torch import Group

torch.manual_seed(int(sys.argv[2]))
layer = torch.nn.Linear(300, 40)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
user = sys.argv[3] + "/client.pem"
tls = {"ca": sys.argv[3] + "/ca.pem", "certificate": user, "key": user}
with Group(sys.argv[1], "secured", min_members=2, timeout=2.0, tls=tls) as group:
    model = group.wrap(layer, optimizer)
    while group.steps < 5:
        model(torch.ones(1, 300)).square().sum().backward()
        group.step(samples=1)
    print(json.dumps({"digest": group.digest(), "members": group.last_step["members"]}))
"""


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Path]:
    """State directory of a local cluster with TLS."""
    manifest = tmp_path / "cluster.json"
    manifest.write_text(json.dumps(cluster_manifest("secured", {"workers": 2, "partitions": 8})))
    command = [program(), "up", str(manifest), "--state-dir", str(tmp_path / "state"), "--port-base", "0", "--stop-with-stdin", "--tls"]
    with open(tmp_path / "up.log", "wb") as log:
        up = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 100
        while read_endpoints(tmp_path / "state") is None:
            assert up.poll() is None and time.monotonic() < end, (tmp_path / "up.log").read_text()
            time.sleep(0.05)
        yield tmp_path / "state"
    finally:
        up.communicate(timeout=60)


@pytest.mark.timeout(240)
def test_processes_of_a_cluster_with_tls_share_gradients_and_states(secured: Path) -> None:
    endpoints = read_endpoints(secured)
    assert endpoints is not None and endpoints["tls"]
    target = "grpc://" + ",".join(worker["client"] for worker in endpoints["workers"])
    # The processes start with different parameters: one of them receives the state of the other.
    processes = [
        subprocess.Popen([sys.executable, "-c", SECURED, target, seed, str(secured / "tls")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in ("0", "1")
    ]
    outputs = [process.communicate(timeout=150) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    first, second = (json.loads(output) for output, _ in outputs)
    assert first == second and first["members"] == 2, outputs
