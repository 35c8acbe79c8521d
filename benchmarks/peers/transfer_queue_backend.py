"""Engram as the storage backend of TransferQueue, against its in-memory store, in the same run.

One process puts and gets batches through TransferQueue's public API; each backend and case runs in a process of its own, in turn. Needs the
wheel of Engram next to TransferQueue; ``ENGRAM_BIN`` is the engram program, if it is not in the wheel. ``cargo xtask bench transfer-queue`` runs it.
Usage: transfer_queue_backend.py [--rounds N] [--case NAME] [--scratch FOLDER] [--json]"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

REPLICAS = 2
FIELDS = 4
# Samples in a batch, bytes of a field, repetitions, durability.
CASES = {
    "4KiB": (1024, 4096, 10, "Replicated"),
    "128KiB": (256, 131_072, 6, "Sync"),
}
BACKENDS = ["SimpleStorage", "Engram"]
# Least ratio to the in-memory store, and, of the case that waits for the disk, to the bandwidth of the disk by the number of replicas.
FLOORS = {("4KiB", "put"): ("SimpleStorage", 0.3), ("4KiB", "get"): ("SimpleStorage", 0.7), ("128KiB", "put"): ("disk / replicas", 0.5)}
# Bytes of the measurement of the disk, and of each of its writes.
DISK_BYTES, DISK_PIECE = 512 << 20, 4 << 20


def disk_bandwidth(folder):
    """Returns bytes per second of writes of 4 MiB to one file, each followed by fdatasync as a log does."""
    piece = os.urandom(DISK_PIECE)
    path = os.path.join(folder, "bandwidth")
    with open(path, "wb", buffering=0) as file:
        started = time.perf_counter()
        for _ in range(DISK_BYTES // DISK_PIECE):
            file.write(piece)
            os.fdatasync(file.fileno())
        seconds = time.perf_counter() - started
    os.remove(path)
    return DISK_BYTES / seconds


def start(backend, durability, folder):
    """Starts Ray, TransferQueue, and for Engram a local cluster; returns the cluster."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf

    # Its actors reserve more cores than this machine may have; without them it waits.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    db, section = None, {}
    if backend == "Engram":
        import engram
        import engram.transfer_queue  # noqa: F401 - registers the backend

        # As `engram up` does in a folder on the disk to be measured.
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config = {"replicationFactor": REPLICAS, "durability": {"mode": durability}}
        db = engram.connect(workers=REPLICAS, config=config)
        section = {"address": "grpc://" + ",".join(worker.address for worker in db.status().workers), "capacity": 200_000}
    tq.init(OmegaConf.create({"backend": {"storage_backend": backend, backend: section}}))
    return db


def run(backend, case, folder):
    """Measures a case, and prints the medians in seconds."""
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    samples, size, repetitions, durability = CASES[case]
    db = start(backend, durability, folder)
    data = TensorDict({f"f{n}": torch.randn(samples, size // 4) for n in range(FIELDS)}, batch_size=samples)
    seconds = {"put": [], "get": [], "clear": []}
    for repetition in range(repetitions + 1):
        keys = [f"{repetition}-{n}" for n in range(samples)]
        calls = {
            "put": lambda keys=keys: tq.kv_batch_put(keys=keys, partition_id="p", fields=data),
            "get": lambda keys=keys: tq.kv_batch_get(keys=keys, partition_id="p"),
            "clear": lambda keys=keys: tq.kv_clear(keys=keys, partition_id="p"),
        }
        for name, call in calls.items():
            started = time.perf_counter()
            result = call()
            seconds[name].append(time.perf_counter() - started)
            if name == "get":
                found = torch.stack(result["f1"].unbind())
                assert torch.equal(found, data["f1"]), "values differ from what was put"
    # The first repetition is a warm-up.
    print("RESULT " + json.dumps({name: statistics.median(values[1:]) for name, values in seconds.items()}), flush=True)
    tq.close()
    if db is not None:
        db.close()


def measure(backend, case, folder):
    """Runs a case in a process of its own."""
    command = [sys.executable, __file__, "--one", backend, case, "--scratch", folder]
    environment = {**os.environ, "TQ_LOGGING_LEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": "1"}
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"failed to measure {backend}, {case}:\n{output.stdout[-2000:]}\n{output.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def compare(case, rounds, folder):
    """Measures a case in rounds; returns seconds of each round by backend and call, and bytes per second of the disk."""
    results = {backend: [] for backend in BACKENDS}
    bandwidths = []
    for number in range(rounds):
        bandwidths.append(disk_bandwidth(folder))
        for backend in BACKENDS:
            results[backend].append(measure(backend, case, folder))
            print(f"round {number + 1}: {case} {backend}: {results[backend][-1]}", file=sys.stderr, flush=True)
    return results, statistics.median(bandwidths)


def rows(case, results, disk):
    """Returns rows of ``cargo xtask bench``: milliseconds, those of the in-memory store, and the time in which the disk writes every replica."""
    samples, size, repetitions, durability = CASES[case]

    def figure(seconds):
        return {"best": min(seconds) * 1e3, "median": statistics.median(seconds) * 1e3, "repeats": repetitions * len(seconds)}

    found = []
    for name in ("put", "get", "clear"):
        simple, ours = ([row[name] for row in results[backend]] for backend in BACKENDS)
        peers = [{"name": "SimpleStorage", "figure": figure(simple)}]
        if name == "put" and durability == "Sync":
            peers.append({"name": "disk / replicas", "figure": figure([samples * FIELDS * size * REPLICAS / disk])})
        floor = FLOORS.get((case, name))
        found.append(
            {
                "title": f"{name} of {FIELDS} fields of {size >> 10} KiB, {durability}, {REPLICAS} replicas",
                "memories": samples,
                "unit": "ms",
                "better": "lower",
                "ours": figure(ours),
                "peers": peers,
                "budgets": [{"ratio": {"peer": floor[0], "at_least": floor[1]}}] if floor else [],
            }
        )
    return found


def report(case, results, disk):
    """Prints a table."""
    samples, size, _, durability = CASES[case]
    batch, rounds = samples * FIELDS * size, len(results[BACKENDS[0]])

    def median(backend, name):
        return statistics.median(row[name] for row in results[backend])

    simple, ours = ({name: median(backend, name) for name in ("put", "get", "clear")} for backend in BACKENDS)
    print(f"\n{samples} samples x {FIELDS} fields x {size >> 10} KiB, {durability}, {REPLICAS} replicas, medians of {rounds}\n")
    print("| call | SimpleStorage | Engram | ratio | Engram |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in simple:
        rate = f"{batch / ours[name] / 2**20:.0f} MiB/s" if name != "clear" else ""
        print(f"| {name} | {simple[name] * 1e3:.1f} ms | {ours[name] * 1e3:.1f} ms | {simple[name] / ours[name]:.2f} | {rate} |")
    share = batch / ours["put"] / (disk / REPLICAS)
    print(f"\nThe disk writes {disk / 2**20:.0f} MiB/s; put is {share:.2f} of it by the number of replicas.")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--scratch", default=os.getcwd())
    parser.add_argument("--json", action="store_true", help="write the rows for `cargo xtask bench` instead of tables")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        run(*arguments.one, arguments.scratch)
        return
    folder = tempfile.mkdtemp(prefix="transfer-queue-", dir=arguments.scratch)
    try:
        cases = [arguments.case] if arguments.case else list(CASES)
        measured = {case: compare(case, arguments.rounds, folder) for case in cases}
        if arguments.json:
            print(json.dumps({"threads": os.cpu_count(), "rows": [row for case in cases for row in rows(case, *measured[case])]}))
            return
        for case in cases:
            report(case, *measured[case])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
