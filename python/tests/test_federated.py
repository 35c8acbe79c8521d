"""Clients of federated runs, on a real cluster."""

import threading
from pathlib import Path

import numpy as np
import pytest

import engram
import engram.fed

MODEL = {"layers": [{"name": "w", "shape": [2, 1]}, {"name": "b", "shape": [1]}]}


def run(db: engram.Database, name: str, clients: int, rounds: int, **more: object) -> None:
    spec = {"model": MODEL, "rounds": rounds, "clients": {"population": clients, "perRound": clients}, **more}
    assert engram.fed.submit(db, name, spec)


def test_clients_train_together_and_the_model_is_their_weighted_mean(db: engram.Database, tmp_path: Path) -> None:
    run(db, "together", 2, 2, settings={"rate": 0.5})
    accepted: dict[int, int] = {}

    def client(number: int) -> None:
        app = engram.fed.ClientApp()

        @app.train()
        def train(model: engram.fed.Model, task: engram.fed.Task) -> engram.fed.Update:
            assert task.settings == {"rate": 0.5} and model["w"].shape == (2, 1)
            return engram.fed.Update({"w": model["w"] + number, "b": model["b"] - 1}, samples=1 + 2 * number, loss=1.0 / (1 + task.version))

        accepted[number] = app.run(db, "together", f"client-{number}", keys=tmp_path / f"{number}.json")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert accepted == {0: 2, 1: 2}
    status = engram.fed.status(db, "together")
    assert (status.phase, status.version, status.updates) == ("succeeded", 2, 4)
    assert status.metrics["loss"] == pytest.approx(0.5)
    model = engram.fed.model(db, "together", {"w": (2, 1), "b": (1,)})
    with pytest.raises(engram.DeniedError, match="another key"):
        engram.fed.model(db, "together", {"w": (2, 1), "b": (1,)}, model_key=64 * "0")
    # Client 1 has three of four samples, in each of two rounds.
    assert model["w"] == pytest.approx(np.full((2, 1), 1.5)) and model["b"] == pytest.approx([-2])
    with pytest.raises(engram.DeniedError, match="first 2 clients"):
        run(db, "full", 2, 1)
        for name in ("a", "b", "c"):
            engram.fed._engram.Participant(db._native, "full", name).next(0).wait()


def test_one_file_of_keys_serves_several_runs_and_another_key_of_a_model_is_refused(db: engram.Database, tmp_path: Path) -> None:
    keys = tmp_path / "device.json"
    for name in ("first", "second"):
        run(db, name, 1, 2)
        task = next(engram.fed.tasks(db, name, "device", keys=keys))
        assert task.reply({"w": np.ones((2, 1)), "b": np.zeros(1)}, samples=1)
    kept = keys.with_suffix(".model-key")
    first, second = kept.read_text().splitlines()
    assert first.split()[0] == "first" and second.split()[0] == "second" and first.split()[1] != second.split()[1]
    kept.write_text(f"first {second.split()[1]}\n")
    with pytest.raises(engram.DeniedError, match="another key"):
        next(engram.fed.tasks(db, "first", "device", keys=keys))


def test_wrong_parameters_are_refused_before_they_are_sent(db: engram.Database) -> None:
    run(db, "wrong", 1, 1)
    found = engram.fed.tasks(db, "wrong", "one")
    task = next(found)
    with pytest.raises(engram.InvalidValueError, match=r"'w'.*shape \(2,\)"):
        task.reply({"w": np.zeros(2), "b": np.zeros(1)}, samples=1)
    with pytest.raises(engram.InvalidValueError, match="no 'b'"):
        task.reply({"w": np.zeros((2, 1))}, samples=1)
    with pytest.raises(engram.InvalidValueError, match="nan at 0|NaN at 0"):
        task.reply({"w": np.full((2, 1), np.nan), "b": np.zeros(1)}, samples=1)
    with pytest.raises(engram.InvalidValueError, match="samples"):
        task.reply({"w": np.zeros((2, 1)), "b": np.zeros(1)}, samples=0)
    assert task.reply({"w": np.ones((2, 1)), "b": np.zeros(1)}, samples=1)
    assert list(found) == []
    with pytest.raises(engram.InvalidValueError, match="single updates"):
        run(db, "robust", 3, 1, strategy={"kind": "Median"}, secureAggregation={})


def test_a_reply_is_repeated_while_the_cluster_cannot_be_reached_and_a_lost_task_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Native:
        number = 7

        def layers(self) -> list[tuple[str, list[int], bool]]:
            return [("w", [2], False)]

        def model(self) -> np.ndarray:
            return np.zeros(2, np.float32)

    class Call:
        def __init__(self, failure: Exception | None) -> None:
            self.failure = failure

        def wait(self) -> bool:
            if self.failure is not None:
                raise self.failure
            return False

    class Participant:
        def __init__(self, *failures: Exception | None) -> None:
            self.failures = list(failures)

        def submit(self, *arguments: object, **more: object) -> Call:
            return Call(self.failures.pop(0))

    def reply(participant: Participant, patience: float, timeout: float | None = None) -> bool:
        task = engram.fed.Task({}, {}, 0, 1, 0.0, None, 60.0, participant, Native(), patience)  # type: ignore[arg-type]
        return task.reply({"w": np.ones(2)}, samples=1, timeout=timeout)

    monkeypatch.setattr(engram.fed, "_PAUSES", (0.001, 0.01))
    unavailable, late = engram.UnavailableError("no worker"), engram.TimeoutError("no answer")
    assert reply(Participant(unavailable, late, unavailable, None), 60.0)
    assert not reply(Participant(unavailable, engram.ConflictError("round has ended")), 60.0)
    for patience, timeout in [(0.0, None), (60.0, 0.0)]:
        participant = Participant(unavailable, None)
        with pytest.raises(engram.UnavailableError):
            reply(participant, patience, timeout)
        assert len(participant.failures) == 1


def test_control_variates_lead_unequal_clients_to_the_common_optimum(db: engram.Database, tmp_path: Path) -> None:
    rounds, steps, rate = 14, 5, 0.05
    spec = {"model": {"layers": [{"name": "y", "shape": [1]}]}, "rounds": rounds, "strategy": {"kind": "Scaffold"}}
    assert engram.fed.submit(db, "drift", spec | {"clients": {"population": 2, "perRound": 2, "minimum": 2}})

    def client(number: int, curvature: float, optimum: float) -> None:
        app = engram.fed.ClientApp()

        @app.train()
        def train(model: engram.fed.Model, task: engram.fed.Task) -> engram.fed.Update:
            assert task.correction is not None
            y = model["y"].copy()
            for _ in range(steps):
                y -= rate * (curvature * (y - optimum) + task.correction["y"])
            return engram.fed.Update({"y": y}, samples=1, rate_sum=steps * rate)

        app.run(db, "drift", f"client-{number}", keys=tmp_path / f"drift-{number}.json")

    threads = [threading.Thread(target=client, args=(number, *loss)) for number, loss in enumerate([(1.0, 0.0), (4.0, 5.0)])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    # (1 * 0 + 4 * 5) / (1 + 4); the mean of the local models converges to 3.74.
    assert engram.fed.model(db, "drift", {"y": (1,)})["y"] == pytest.approx([4.0], abs=0.01)


@pytest.mark.flower
def test_a_flower_app_takes_part_without_changes(db: engram.Database) -> None:
    pytest.importorskip("flwr", reason="flwr is not installed")
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    import engram.fed.flower

    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        arrays = [array + 1 for array in msg.content["arrays"].to_numpy_ndarrays()]
        assert msg.content["config"]["server-round"] >= 1
        metrics = MetricRecord({"num-examples": 5, "train_loss": 0.25})
        return Message(content=RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=msg)

    run(db, "flower", 1, 3)
    assert engram.fed.flower.run(app, db, "flower", "one") == 3
    assert engram.fed.model(db, "flower", {"w": (2, 1), "b": (1,)})["w"].tolist() == [[3.0], [3.0]]
