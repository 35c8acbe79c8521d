"""Example programs on a cluster that is already running: an address is all that changes."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import engram
from engram._local import program

EXAMPLES = Path(__file__).parents[2] / "examples/python"
MANIFEST = """
apiVersion: engram.dev/v1alpha1
kind: LearnerCluster
metadata: { name: shared }
spec:
  workers: 3
  replicationFactor: 2
  partitions: 8
  capacity: { memories: 200000 }
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster that `engram up --detach` has started, as a user reads it from the output."""
    folder = tmp_path_factory.mktemp("shared")
    manifest, state_dir = folder / "cluster.yaml", ["--state-dir", str(folder / "state")]
    manifest.write_text(MANIFEST)
    up = [program(), "up", str(manifest), "--detach", "--wait", "--port-base", "0", *state_dir]
    # Without pipes: the cluster in the background would keep them open.
    with (folder / "output").open("w") as output:
        subprocess.run(up, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True, timeout=120)
    try:
        workers = re.findall(r"gRPC (\S+)", (folder / "output").read_text())
        assert len(workers) == 3
        yield "grpc://" + ",".join(workers)
    finally:
        subprocess.run([program(), "down", *state_dir], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=60)


def run(example: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / example), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.timeout(240)
def test_quickstart_prints_the_same_on_a_running_cluster_by_its_address(address: str) -> None:
    def epochs(*arguments: str) -> str:
        done = run("quickstart.py", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(r"\d+ ms", "ms", done.stdout)

    assert epochs(address) == epochs()
    with engram.connect(address) as db:
        assert db.quality().total.count == 100_000


@pytest.mark.torch
@pytest.mark.timeout(240)
def test_dqn_trains_on_a_running_cluster_by_its_address(address: str) -> None:
    # It learns from step 500 on; the policy is trained in cargo xtask python --test --torch-examples.
    done = run("dqn_cartpole.py", "--address", address, "--steps", "1000")
    assert done.returncode == 1 and done.stderr.startswith("not solved in 1000 steps: mean return"), done.stdout + done.stderr
    listing = [program(), "buffer", "list", "--address", address.removeprefix("grpc://"), "-o", "json"]
    listed = json.loads(subprocess.run(listing, check=True, capture_output=True).stdout)
    (buffer,) = [it for it in listed["items"] if it["name"].startswith("cartpole-")]
    # Rows are appended in parts of 16; the first items have priority 1 until they are learned from.
    assert buffer["appended"] == buffer["items"] == 992 and buffer["prioritySum"] != 992, buffer
