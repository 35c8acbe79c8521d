"""Federated learning on this machine: 20 clients with unequal data train one model, with differential privacy and secure aggregation.

Each client is a process. Two of them are slow, one disappears after its first round, and every client has data of its own region and size.
The run is that of examples/federated.yaml.
"""

import multiprocessing
import os
import sys
import time

import numpy as np

import engram
import engram.fed

CLIENTS, FEATURES = 20, 8
#: Seconds after which the run is given up: fifteen rounds of at most ten seconds, and the start of the processes.
DEADLINE = 240
TRUTH = np.linspace(-1, 1, FEATURES, dtype=np.float32)[:, None]


def data_of(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Data of a client: its region shifts the inputs, and sizes differ by a factor of ten."""
    random = np.random.default_rng(number)
    samples = 30 + 15 * number
    inputs = random.standard_normal((samples, FEATURES), np.float32) + 0.5 * np.sin(number + np.arange(FEATURES, dtype=np.float32))
    labels = (inputs @ TRUTH + 0.3 * random.standard_normal((samples, 1)) > 0).astype(np.float32)
    return inputs, labels


def loss_of(weights: np.ndarray, bias: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> float:
    signs = 2 * labels - 1
    return float(np.logaddexp(0, -signs * (inputs @ weights + bias)).mean())


def client(db: engram.Database, number: int) -> None:
    inputs, labels = data_of(number)
    app = engram.fed.ClientApp()
    rounds = 0

    @app.train()
    def train(model: engram.fed.Model, task: engram.fed.Task) -> engram.fed.Update:
        nonlocal rounds
        rounds += 1
        if number == 19 and rounds > 1:
            os._exit(0)  # The client disappears with its task.
        if number in (3, 7):
            time.sleep(1.0)
        weights, bias = model["weights"], model["bias"]
        loss = loss_of(weights, bias, inputs, labels)
        for _ in range(int(task.settings["localSteps"])):
            error = 1 / (1 + np.exp(-(inputs @ weights + bias))) - labels
            weights -= task.settings["learningRate"] * inputs.T @ error / len(inputs)
            bias -= task.settings["learningRate"] * error.mean()
        return engram.fed.Update({"weights": weights, "bias": bias}, samples=len(inputs), loss=loss)

    app.run(db, "hospitals", f"client-{number}")


def process(address: str, number: int) -> None:
    with engram.connect(address) as db:
        client(db, number)


RUN = {
    "model": {"layers": [{"name": "weights", "shape": [FEATURES, 1]}, {"name": "bias", "shape": [1]}]},
    "rounds": 15,
    "clients": {"population": CLIENTS, "perRound": 18, "minimum": 12},
    "deadline": "10s",
    "settings": {"learningRate": 0.3, "localSteps": 5},
    "privacy": {"epsilon": 100, "delta": 0.01, "noiseMultiplier": 0.5, "clip": 1.0},
    "secureAggregation": {"dropOut": 0.2},
}


def main() -> None:
    with engram.connect(workers=3) as db:
        started = time.monotonic()
        engram.fed.submit(db, "hospitals", RUN)
        status = engram.fed.status(db, "hospitals")
        address = "grpc://" + ",".join(worker.address for worker in db.status().workers)
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=process, args=(address, number), daemon=True) for number in range(CLIENTS)]
        for one in processes:
            one.start()
        version = -1
        while any(one.is_alive() for one in processes):
            if time.monotonic() - started > DEADLINE:
                alive = [number for number, one in enumerate(processes) if one.is_alive()]
                sys.exit(f"no end after {DEADLINE} s: {status.phase} at version {status.version}: {status.message}; clients {alive} still run")
            status = engram.fed.status(db, "hospitals")
            if status.version != version:
                version = status.version
                figures = {name: round(status.metrics.get(name, 0), 3) for name in ("participants", "rounds_aborted", "loss", "epsilon_spent")}
                print(f"version {version}: {figures}", flush=True)
            time.sleep(0.2)
        failed = [number for number, one in enumerate(processes) if one.exitcode]
        status = engram.fed.status(db, "hospitals")
        if status.phase != "succeeded" or failed:
            sys.exit(f"{status.phase} at version {status.version}: {status.message}; failed clients: {failed}")
        model = engram.fed.model(db, "hospitals", {"weights": (FEATURES, 1), "bias": (1,)})
        data = [data_of(number) for number in range(CLIENTS)]
        before = np.mean([loss_of(np.zeros((FEATURES, 1)), np.zeros(1), *one) for one in data])
        after = np.mean([loss_of(model["weights"], model["bias"], *one) for one in data])
        print(f"{status.phase}: version {status.version} from {status.updates} updates in {time.monotonic() - started:.0f} s")
        print(f"loss over all clients: {before:.3f} before, {after:.3f} after; epsilon {status.metrics['epsilon_spent']:.1f} of 100")


if __name__ == "__main__":
    main()
