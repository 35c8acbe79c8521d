import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest

import engram
from engram._local import program


def test_roadmap_example_converges_while_a_worker_is_killed() -> None:
    learner = engram.DistributedLearner(
        num_nodes=3, gpu_enabled="auto", memory_capacity=20_000, decay_rate=0.01, replication_factor=2,
        config={"partitions": 8},
    )
    with learner:
        first = learner.run_epoch()
        assert first["convergence"] == first.convergence == 1.0
        assert (first.memories, first.updates) == (10_000, 10_000)
        learner.kill_node(1)
        history = learner.run(epochs=9)
        assert history[-1].epoch == learner.epoch == 10
        # Decay 0.01 and rate 0.05: +0.03 - 0.01 against -0.03 - 0.01 ... the difference grows by the same amount per epoch.
        assert history.column("convergence") == pytest.approx(np.arange(2, 11), rel=1e-6)
        assert len(learner.status().workers) == 3
        assert [node.ordinal for node in learner.nodes] == [0, 1, 2]
        report = pickle.loads(pickle.dumps(history[-1]))
        assert report == history[-1] and dict(report)["epoch"] == 10


def test_own_memories_decay_and_are_reinforced() -> None:
    with engram.DistributedLearner(memory_capacity=100, decay_rate=0.125) as learner:
        put = learner.put(np.array([0.5, 1.0]))
        assert put.ids.tolist() == [0, 1] and put.created == 2
        report = learner.run_epoch([1], deltas=[0.125])
        assert learner.get([0, 1]).tolist() == [0.375, 1.0]
        assert (report.updates, report.rejected, report.mean_weight) == (1, 0, 0.6875)
        assert np.isnan(report.convergence)
        assert learner.top(1).ids.tolist() == [1]
        assert [report.epoch for report in learner.stream(2)] == [2, 3]
        with pytest.raises(engram.NotFoundError, match="ENG-0508"):
            learner.get([5])


def test_same_program_runs_on_a_cluster_by_its_address(tmp_path: Path) -> None:
    def program(**where: str) -> str:
        with engram.DistributedLearner(memory_capacity=40_000, decay_rate=0.02, **where) as learner:
            learner.run(3, progress=False)
            return learner.digest().digest

    with engram.connect(workers=2) as db:
        address = db.status().workers[0].address
        assert program() == program(address=f"grpc://{address}")


def test_snapshot_is_restored_with_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with engram.DistributedLearner(num_nodes=2, memory_capacity=10_000) as learner:
        learner.put([0.25, 0.5, 1.0])
        learner.snapshot(path)
        digest = learner.digest().digest
        with pytest.raises(engram.EngramError, match="kept"):
            learner.snapshot(path)
        address = learner.db.status().workers[0].address
        with engram.DistributedLearner(address=f"grpc://{address}") as other, pytest.raises(engram.ConfigError, match="snapshot is for"):
            other.snapshot(tmp_path / "other")
    data = tmp_path / "data"
    command = [program(), "snapshot", "restore", str(path), "--state-dir", str(data), "--partitions", "16", "--yes"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).returncode == 0
    with engram.connect(f"file:{data}") as db:
        assert db.digest().digest == digest


def test_metrics_count_what_each_worker_did() -> None:
    with engram.DistributedLearner(num_nodes=2, memory_capacity=10_000) as learner:
        learner.put([0.25, 0.5, 1.0])
        metrics = learner.metrics()
        assert sorted(metrics) == [0, 1]
        memories = [sum(value for name, value in worker.items() if name.startswith("engram_memories")) for worker in metrics.values()]
        assert sum(memories) >= 3, metrics


def test_until_ends_a_run() -> None:
    with engram.DistributedLearner(memory_capacity=1_000) as learner:
        seen: list[int] = []
        history = learner.run(50, until={"convergence": 3}, callbacks=[lambda report: seen.append(report.epoch)])
        assert len(history) == 3 and seen == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_nodes": 0}, "workers"),
        ({"memory_capacity": 0}, "memories"),
        ({"decay_rate": 2.0}, "decay"),
        ({"replication_factor": 4}, "replicationFactor"),
        ({"config": {"learning": {"rat": 0.1}}}, "rat"),
        ({"config": "missing.yaml"}, "missing.yaml"),
        ({"gpu_enabled": "yes"}, "gpu_enabled"),
    ],
)
def test_bad_setting_is_reported_before_anything_starts(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((engram.ConfigError, engram.InvalidValueError), match=message):
        engram.DistributedLearner(**arguments)  # type: ignore[arg-type]


def test_required_gpu_is_an_error_without_one() -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has a GPU")
    with pytest.raises(engram.GpuError) as raised:
        engram.DistributedLearner(gpu_enabled=True)
    assert raised.value.code == "ENG-0201"
