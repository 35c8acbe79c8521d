"""Cost of traces at 1 % sampling: three local clusters, one with traces and two without, measured in turns.

python3 benchmarks/trace_overhead.py target/release/engram [--endpoint http://127.0.0.1:4317] [--rounds 12] [--seconds 1] [--batch 100]

Each round measures all clusters with `engram bench`, in an order that rotates. Printed are medians over rounds of the ratio with traces to
without: calls per second of each measurement, and CPU time of workers and client per call, which other work on the machine changes less. The
ratio of the two clusters without traces is what the method cannot resolve.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
from pathlib import Path

MANIFEST = """apiVersion: engram.dev/v1alpha1
kind: LearnerCluster
metadata: {{ name: {name} }}
spec:
  workers: 2
  replicationFactor: 2
  partitions: 8
  capacity: {{ memories: 200000 }}
"""
#: What `engram bench` measures.
MEASUREMENTS = ["updates", "get one memory", "top 100", "quality"]
TICKS = os.sysconf("SC_CLK_TCK")


class Cluster:
    """A local cluster of real workers."""

    def __init__(self, program: str, folder: Path, name: str, traces: list[str]) -> None:
        self.program, self.state = program, folder / name
        # The client decides about the traces of its calls, as the workers do about their own.
        self.environment = dict(os.environ)
        if traces:
            self.environment |= {
                "OTEL_EXPORTER_OTLP_ENDPOINT": traces[1],
                "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
                "OTEL_TRACES_SAMPLER_ARG": "0.01",
            }
        manifest = folder / f"{name}.yaml"
        manifest.write_text(MANIFEST.format(name=name))
        self.run("up", str(manifest), "--detach", "--port-base", "0", *traces)
        rows = "".join(f'{{"id":{row}}}\n' for row in range(100_000))
        self.run("insert", "--file", "-", text=rows)

    def run(self, *arguments: str, text: str = "") -> str:
        """Runs a command on the cluster."""
        command = [self.program, *arguments, "--state-dir", str(self.state)]
        result = subprocess.run(command, input=text, capture_output=True, text=True, env=self.environment, check=False)
        if result.returncode != 0:
            raise SystemExit(f"{' '.join(command)}: {result.stderr}")
        return result.stdout

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the workers so far."""
        processes = json.loads(self.run("ps", "-o", "json"))["items"]
        return sum(cpu_seconds(item["pid"]) for item in processes if "worker" in item["name"])

    def measure(self, seconds: int, batch: int) -> tuple[list[int], float]:
        """Returns the number of calls of each measurement, and the CPU seconds of workers and client for all of them."""
        before = self.cpu_seconds() + client_seconds()
        result = json.loads(self.run("bench", "--seconds", str(seconds), "--batch", str(batch), "-o", "json"))
        after = self.cpu_seconds() + client_seconds()
        return [item["calls"] for item in result["items"]], after - before


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def client_seconds() -> float:
    """Returns user and system time of the commands that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(found: dict[int, list[tuple[list[int], float]]]) -> None:
    """Prints medians of the ratios with traces to without."""
    usual = [statistics.median(calls) for calls in zip(*(calls for calls, _ in found[0]), strict=True)]
    for name, part in zip(MEASUREMENTS, range(len(usual)), strict=True):
        ratios = [of[0][part] / without[0][part] for without, of in zip(found[0], found[1], strict=True)]
        print(f"{name}: {usual[part]:.0f} calls a round, calls with / without traces {statistics.median(ratios):.3f}")
    # Calls of different kinds cost differently: each counts as its share of a usual round.
    costs = {
        index: [cpu / sum(count / of for count, of in zip(calls, usual, strict=True)) for calls, cpu in rounds]
        for index, rounds in found.items()
    }
    for name, index in (("with traces / without", 1), ("without / without, the noise", 2)):
        ratios = sorted(of / without for without, of in zip(costs[0], costs[index], strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"CPU time per call, {name}: {statistics.median(ratios):.4f}, quartiles {low:.4f} and {high:.4f}")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--endpoint", default="http://127.0.0.1:4317")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=int, default=1)
    parser.add_argument("--batch", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="engram-traces-") as folder:
        traces = ["--otlp-endpoint", options.endpoint, "--trace-sample", "0.01"]
        clusters: list[Cluster] = []
        try:
            for name, of in (("without", []), ("with", traces), ("again", [])):
                clusters.append(Cluster(options.program, Path(folder), name, of))
            found: dict[int, list[tuple[list[int], float]]] = {0: [], 1: [], 2: []}
            for at in range(options.rounds):
                for index in ((at + turn) % 3 for turn in range(3)):
                    found[index].append(clusters[index].measure(options.seconds, options.batch))
            report(found)
        finally:
            for cluster in clusters:
                cluster.run("down")


if __name__ == "__main__":
    main()
