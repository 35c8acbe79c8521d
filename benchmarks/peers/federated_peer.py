"""Rounds of Flower with real processes: one SuperLink, and one SuperNode per client, over loopback.

Each client returns the model plus a half, without training: a round is the cost of the protocol. Flower starts a process for the app of each client
and message (`--isolation subprocess`, its default), which is part of a round.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

PARAMETERS = 10_000
ROUNDS = 3
DEADLINE_SECONDS = 150

PYPROJECT = """
[project]
name = "federated-peer"
version = "1.0.0"
dependencies = ["flwr"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "engram"
[tool.flwr.app.components]
serverapp = "peer_app:server"
clientapp = "peer_app:client"
[tool.flwr.app.config]
"""

APP = """
import json, time
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

client = ClientApp()
server = ServerApp()

@client.train()
def train(message, context):
    arrays = message.content["arrays"].to_numpy_ndarrays()
    reply = {"arrays": ArrayRecord([array + np.float32(0.5) for array in arrays]), "metrics": MetricRecord({"num-examples": 1, "loss": 1.0})}
    return Message(content=RecordDict(reply), reply_to=message)

def counter():
    with open("/proc/net/dev") as file:
        return next(int(line.split(":")[1].split()[0]) for line in file if line.strip().startswith("lo:"))

class Marked(FedAvg):
    marks = []
    def configure_train(self, *arguments):
        self.marks.append((time.monotonic(), counter()))
        return super().configure_train(*arguments)

@server.main()
def main(grid, context):
    strategy = Marked(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(PARAMETERS, np.float32)]), num_rounds=ROUNDS + 1)
    strategy.marks.append((time.monotonic(), counter()))
    sum_ = float(result.arrays.to_numpy_ndarrays()[0][0])
    open("RESULT", "w").write(json.dumps({"marks": strategy.marks, "value": sum_}))
"""


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for_port(port):
    begun = time.monotonic()
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() - begun > 120:
                raise
            time.sleep(0.2)


def resident_kib(process):
    """Resident memory of a process and its descendants."""
    parents, memory = {}, {}
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if "VmRSS" in fields:
            parents[int(fields["Pid"])] = int(fields["PPid"])
            memory[int(fields["Pid"])] = int(fields["VmRSS"].split()[0])

    def belongs(pid):
        while pid in parents:
            if pid == process:
                return True
            pid = parents[pid]
        return False

    return sum(kib for pid, kib in memory.items() if belongs(pid))


def rows(clients, folder):
    tools = pathlib.Path(sys.executable).parent
    port = free_port()
    environment = os.environ | {
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    (folder / "home").mkdir()
    (folder / "home/config.toml").write_text(
        f'[superlink]\ndefault = "bench"\n[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    app, result = folder / "app", folder / "result.json"
    app.mkdir()
    (app / "pyproject.toml").write_text(PYPROJECT)
    constants = (("CLIENTS", clients), ("PARAMETERS", PARAMETERS), ("ROUNDS", ROUNDS), ("RESULT", result))
    text = APP
    for name, value in constants:
        text = text.replace(f'"{name}"', f'"{value}"').replace(name, str(value))
    (app / "peer_app.py").write_text(text)
    processes = []
    log = open(folder / "log", "wb")

    def start(*command):
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        processes.append(process)
        return process

    try:
        link = start(
            tools / "flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", str(port)
        )
        wait_for_port(port)
        idle_kib = resident_kib(link.pid)
        for _ in range(clients):
            start(tools / "flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port()))
        submitted = subprocess.run([tools / "flwr", "run", app, "bench"], env=environment, stdout=log, stderr=log, timeout=60)
        if submitted.returncode:
            raise SystemExit("flwr run failed: " + (folder / "log").read_text()[-4000:])
        most_kib, begun = 0, time.monotonic()
        while not result.exists():
            if time.monotonic() - begun > DEADLINE_SECONDS:
                print((folder / "log").read_text()[-4000:], file=sys.stderr)
                raise SystemExit("the run of Flower did not end")
            most_kib = max(most_kib, resident_kib(link.pid))
            time.sleep(0.2)
        time.sleep(0.5)
        measured = json.loads(result.read_text())
    finally:
        for process in processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        log.close()
    assert abs(measured["value"] - 0.5 * (ROUNDS + 1)) < 1e-4, measured["value"]
    marks = measured["marks"][1:]
    took_ms = [(after[0] - before[0]) * 1e3 for before, after in zip(marks, marks[1:])]
    moved = [(after[1] - before[1]) / 1024 / clients for before, after in zip(marks, marks[1:])]
    for workload, values in (("federated-round", took_ms), ("federated-bytes", moved), ("federated-memory", [(most_kib - idle_kib) / clients])):
        yield {
            "workload": workload,
            "memories": clients,
            "best": min(values),
            "median": statistics.median(values),
            "repeats": len(values),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rounds of Flower over loopback.")
    parser.add_argument("suite", choices=["federated"])
    parser.add_argument("--memories", type=int, nargs="+", default=[8])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flwr-") as folder:
        # Each client is a process, and another one per message: only the smallest number is measured.
        measured = list(rows(min(arguments.memories), pathlib.Path(folder)))
    version = importlib.metadata.version("flwr")
    json.dump({"peer": "flwr", "version": version, "threads": os.cpu_count(), "rows": measured}, sys.stdout)
