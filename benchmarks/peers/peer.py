"""What both peers share: the command line, the timing, the JSON that is printed."""

import argparse
import json
import statistics
import sys
import time

UPDATES = 10_000
TOP = 1_000
DIMENSION = 384
ALIKE = 10
DECAY = 0.01
# Learning rate times quality: what one update of quality 0.8 adds.
DELTA = 0.05 * 0.8
SEED = 7
# Size of the suite algebra at which the Fisher matrix is computed; other sizes are max-plus products.
FISHER_SAMPLES = 10_000
FISHER_PARAMETERS = 1_000

MIN_REPEATS = 5
MAX_REPEATS = 5_000
MIN_SECONDS = 1.0


def measure(workload, memories, work):
    """Times `work()`: one run unmeasured, then repeats; milliseconds, minimum and median."""
    work()
    took_ms = []
    started = time.perf_counter()
    while len(took_ms) < MAX_REPEATS:
        before = time.perf_counter()
        work()
        took_ms.append((time.perf_counter() - before) * 1e3)
        if len(took_ms) >= MIN_REPEATS and time.perf_counter() - started >= MIN_SECONDS:
            break
    return {
        "workload": workload,
        "memories": memories,
        "best": min(took_ms),
        "median": statistics.median(took_ms),
        "repeats": len(took_ms),
    }


def main(peer, version, threads, workloads_of):
    """Runs the workloads of one suite at each size; `workloads_of(suite, memories)` yields (name, work)."""
    parser = argparse.ArgumentParser(description=f"The work of Engram's benchmarks, done by {peer} on the CPU.")
    parser.add_argument("suite", choices=["epoch", "store", "rank", "recall", "algebra", "replay"])
    parser.add_argument("--memories", type=int, nargs="+", default=[100_000, 1_000_000, 10_000_000])
    arguments = parser.parse_args()
    # Libraries write logs to the standard output.
    output, sys.stdout = sys.stdout, sys.stderr
    rows = []
    for memories in arguments.memories:
        for workload, work in workloads_of(arguments.suite, memories):
            rows.append(measure(workload, memories, work))
            print(f"{peer}: {workload} {memories}: {rows[-1]['median']:.3f} ms", file=sys.stderr)
    json.dump({"peer": peer, "version": version, "threads": threads, "rows": rows}, output)
