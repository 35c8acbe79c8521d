"""Runs the performance script that comes in TransferQueue's wheel, unchanged, on its in-memory store and on the backend Engram.

    python performance.py SITE_PACKAGES/scripts/performance_test/perftest.py

Only the pauses of the script, 16 s for each iteration, are shortened. Fails unless every iteration has figures, every value of a put was stored in the
cluster, and none is left after the script's last delete.
"""

import argparse
import csv
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

IN_MEMORY, OURS = "SimpleStorage", "Engram"
SAMPLES, ITERATIONS = 1024, 4
# Fields, floats of a field, other arguments of the script.
CASES = {
    "4 fields of 4 KiB": (4, 1024, []),
    "9 fields of at most 4 KiB: dense, jagged and text": (9, 1024, ["--use_complex_case"]),
}
PAUSE_SECONDS = 0.2
LIMIT_SECONDS = 600


def run(script: str, backend: str, case: str, output: str) -> None:
    """Runs the script in this process."""
    import ray

    fields, floats, others = CASES[case]
    db, section, hook = None, {"num_data_storage_units": 2, "total_storage_size": None}, {}
    if backend == OURS:
        import engram

        db = engram.connect(workers=2, config={"replicationFactor": 2, "partitions": 8})
        section = {"address": "grpc://" + ",".join(worker.address for worker in db.status().workers), "capacity": 200_000}
        # The first tq.init of the script is in an actor: Ray registers the backend in each worker.
        hook = {"runtime_env": {"worker_process_setup_hook": "engram.transfer_queue.register"}}
    config = Path(output).with_suffix(".yaml")
    config.write_text(yaml.safe_dump({"backend": {"storage_backend": backend, backend: section}}))
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR", **hook)
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, PAUSE_SECONDS))
    sizes = ["--global_batch_size", SAMPLES, "--field_num", fields, "--seq_len", floats, "--num_test_iterations", ITERATIONS]
    where = ["--backend_config", config, "--head_node_ip", ray.util.get_node_ip_address(), "--output_csv", output]
    sys.argv = [script, *map(str, [*sizes, *where]), *others]
    runpy.run_path(script, run_name="__main__")
    ray.shutdown()
    if db is not None:
        check(db, fields)
        db.close()


def check(db, fields: int) -> None:
    """Checks that the cluster has stored every sample, and that none of them is left."""
    from engram._tq_store import COLUMNS, SampleStore

    store = SampleStore(db, "transfer-queue", 200_000, 30.0)
    items = SAMPLES * ITERATIONS * -(-fields // COLUMNS)
    found = store.buffer.stats()
    assert found["appended"] == items, f"{found['appended']} items were stored; expected: {items}"
    store.sweep()
    assert len(store.buffer) == 0, f"{len(store.buffer)} items are left"


def measure(script: str, backend: str, case: str, folder: str) -> dict[str, float]:
    """Runs the script in a process of its own; returns the median seconds of each call."""
    output = os.path.join(folder, f"{backend}-{list(CASES).index(case)}.csv")
    command = [sys.executable, __file__, script, "--one", backend, case, output]
    environment = {**os.environ, "TQ_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=environment)
    if done.returncode:
        sys.exit(f"the script failed on {backend}, {case}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    with open(output) as file:
        rows = list(csv.DictReader(file))
    assert [row["backend"] for row in rows] == [backend] * ITERATIONS, rows
    # The first iteration is a warm-up.
    return {name: statistics.median(float(row[f"{name}_time"]) for row in rows[1:]) for name in ("put", "get")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", help="perftest.py of TransferQueue")
    parser.add_argument("--one", nargs=3, metavar=("BACKEND", "CASE", "CSV"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run(arguments.script, *arguments.one)
        return
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            simple, ours = (measure(arguments.script, backend, case, folder) for backend in (IN_MEMORY, OURS))
            print(f"TransferQueue's performance script, {SAMPLES} samples, {case}:")
            for name in simple:
                times = f"{IN_MEMORY} {simple[name] * 1e3:.1f} ms, {OURS} {ours[name] * 1e3:.1f} ms"
                print(f"  {name}: {times}, ratio {simple[name] / ours[name]:.2f}", flush=True)


if __name__ == "__main__":
    main()
