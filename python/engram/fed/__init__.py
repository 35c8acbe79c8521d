"""Federated learning: clients that keep their data.

A client of a run (``kind: Federated``) waits for tasks, trains the model that it receives on its own data, and answers with the change of the
parameters. Each update counts at most once, whatever is repeated or restarted. With ``spec.federated.secureAggregation`` the update is masked
before it leaves this process.

>>> import engram, engram.fed, numpy as np
>>> app = engram.fed.ClientApp()
>>> @app.train()
... def train(model, task):
...     return engram.fed.Update({"w": model["w"] + 1}, samples=10, loss=0.5)
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .. import _engram
from .._database import Database, connect
from .._errors import ConflictError, EngramError, TimeoutError, UnavailableError, create, invalid

__all__ = ["ClientApp", "Model", "Status", "Task", "Update", "model", "status", "submit", "tasks"]

#: Parameters by the name of their layer.
Model: TypeAlias = "dict[str, npt.NDArray[np.float32]]"

#: Longest wait of one call for a task, in seconds.
_WAIT_SECONDS = 20.0
#: Bounds of the pause after a failure, in seconds.
_PAUSES = (0.5, 60.0)


class _Pauses:
    """Growing random pauses between attempts, for some seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.reset()

    def reset(self) -> None:
        """Begins again after a success."""
        self._end = time.monotonic() + self._seconds
        self._failures = 0

    def rest(self) -> float:
        """Returns the seconds that are left."""
        return max(0.0, self._end - time.monotonic())

    def wait(self) -> bool:
        """Waits before the next attempt; returns whether there is time for one."""
        pause = random.uniform(0.05, 1.0) * min(_PAUSES[0] * 2**self._failures, _PAUSES[1])
        if self.rest() <= 0:
            return False
        time.sleep(min(pause, self.rest()))
        self._failures = min(self._failures + 1, 16)
        return True


@dataclass(frozen=True)
class Update:
    """Result of local training: the trained parameters of the layers that are shared, and the number of samples."""

    parameters: Mapping[str, npt.ArrayLike]
    samples: int
    #: Mean loss of the received model on the client's data: what the run shows.
    loss: float | None = None
    #: With strategy ``Scaffold``: the sum of the step sizes of all local steps.
    rate_sum: float | None = None


@dataclass
class Task:
    """Work for a client. ``reply`` or ``give_up`` ends it."""

    #: Shared parameters by layer; arrays of this client.
    model: Model
    #: Settings of the run: ``spec.federated.settings``.
    settings: dict[str, float]
    #: Version of the model, and the round.
    version: int
    round: int
    #: Weight of the proximal term of FedProx: the local gradient of ``y`` has ``proximal_weight * (y - x)`` in addition; 0 = none.
    proximal_weight: float
    #: With strategy ``Scaffold``, by layer: a local step is ``y - rate * (gradient + correction)``. ``None`` with other strategies.
    correction: Model | None
    #: Seconds in which the update has to arrive.
    lease_seconds: float
    _participant: _engram.Participant = field(repr=False)
    _native: _engram.FederatedTask = field(repr=False)
    #: Seconds in which ``reply`` repeats its attempts.
    _patience: float = field(default=600.0, repr=False)

    @property
    def number(self) -> int:
        """Number of the task, unique within the run."""
        return self._native.number

    def reply(
        self,
        parameters: Mapping[str, npt.ArrayLike],
        *,
        samples: int,
        loss: float | None = None,
        rate_sum: float | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Sends the trained parameters. Returns whether they were sent in time to count.

        With secure aggregation it returns when the sum of the round is known. ``rate_sum`` is required with strategy ``Scaffold``. While the
        cluster cannot be reached, attempts are repeated for ``timeout`` seconds, unless stated those of ``patience`` of :func:`tasks`: an
        update counts once.
        """
        if self.correction is not None and rate_sum is None:
            raise invalid("rate_sum is None; required with strategy Scaffold: the sum of the step sizes of all local steps")
        update = self._change(parameters)
        loss = None if loss is None else float(loss)
        rate_sum = None if rate_sum is None else float(rate_sum)
        pauses = _Pauses(self._patience if timeout is None else timeout)
        while True:
            try:
                rest = None if timeout is None else pauses.rest()
                self._participant.submit(self._native, update, int(samples), loss=loss, rate_sum=rate_sum, timeout=rest).wait()
            except ConflictError:
                return False
            except (UnavailableError, TimeoutError):
                if not pauses.wait():
                    raise
            else:
                return True

    def give_up(self, *, timeout: float | None = None) -> None:
        """Returns the task, so that another client can have it."""
        self._participant.give_up(self._native.number, timeout=timeout).wait()

    def _change(self, parameters: Mapping[str, npt.ArrayLike]) -> npt.NDArray[np.float32]:
        """Returns the trained parameters minus the received ones, layer after layer."""
        unknown = set(parameters) - {name for name, _, _ in self._native.layers()}
        if unknown:
            raise invalid(f"parameters has {sorted(unknown)}; allowed: {sorted(self.model)}")
        parts = []
        start = 0
        received = self._native.model()
        for name, shape, local in self._native.layers():
            if local:
                continue
            if name not in parameters:
                raise invalid(f"parameters has no {name!r}; required: {sorted(self.model)}")
            array = np.asarray(parameters[name], np.float32)
            if array.shape != tuple(shape):
                raise invalid(f"parameters[{name!r}] has shape {array.shape}; required: {tuple(shape)}")
            parts.append(array.reshape(-1) - received[start : start + array.size])
            start += array.size
        return np.ascontiguousarray(np.concatenate(parts))


def _layers(native: _engram.FederatedTask, values: npt.NDArray[np.float32]) -> Model:
    layers: Model = {}
    start = 0
    for name, shape, local in native.layers():
        if not local:
            size = int(np.prod(shape))
            layers[name] = values[start : start + size].reshape(shape).copy()
            start += size
    return layers


def tasks(
    db: Database | str | os.PathLike[str],
    run: str,
    client: str,
    *,
    keys: str | os.PathLike[str] | None = None,
    model_key: str | None = None,
    patience: float = 600.0,
    **options: Any,
) -> Iterator[Task]:
    """Yields the tasks of a client until the run ends.

    ``db`` is a connection, or an address and ``options`` of :func:`engram.connect`. ``keys`` is a file with the secret and the identity key of
    the client, which is created: with it the client is the same after a restart. Each model is checked by the key of the run before it is used:
    ``model_key`` (output ``model_key`` of the run), or the key of the first task, kept in a file next to ``keys``. While the cluster cannot be reached, attempts are repeated
    with growing random pauses for ``patience`` seconds.
    """
    if not isinstance(db, Database):
        with connect(db, **options) as own:
            yield from tasks(own, run, client, keys=keys, model_key=model_key, patience=patience)
        return
    path = None if keys is None else os.fspath(keys)
    participant = _engram.Participant(db._native, run, client, keys=path, model_key=model_key)
    pauses = _Pauses(patience)
    while True:
        try:
            found = participant.next(_WAIT_SECONDS).wait()
        except (UnavailableError, TimeoutError):
            if not pauses.wait():
                raise
            continue
        pauses.reset()
        if isinstance(found, str):
            return
        if found is not None:
            correction = found.correction()
            yield Task(
                _layers(found, found.model()),
                dict(found.settings()),
                found.version,
                found.round,
                found.proximal_weight,
                None if correction is None else _layers(found, correction),
                found.lease_seconds,
                participant,
                found,
                patience,
            )
            pauses.reset()


def model(db: Database, run: str, layers: Mapping[str, tuple[int, ...]], *, model_key: str | None = None) -> Model:
    """Returns the newest model of a run, while it runs and after it. ``layers`` are names and shapes of the shared layers in their order.

    It is whole: its digest and signature are checked, by ``model_key`` (output ``model_key`` of the run) if given. It requires the permission ``read``.
    """
    values = _engram.Participant(db._native, run, "reader", model_key=model_key).newest_model().wait()
    sizes = {name: int(np.prod(shape)) for name, shape in layers.items()}
    if sum(sizes.values()) != len(values):
        raise invalid(f"layers have {sum(sizes.values())} parameters; the model has {len(values)}")
    result: Model = {}
    start = 0
    for name, shape in layers.items():
        result[name] = values[start : start + sizes[name]].reshape(shape)
        start += sizes[name]
    return result


@dataclass(frozen=True)
class Status:
    """Status of a run."""

    #: ``queued``, ``running``, ``succeeded``, ``failed``, ``cancelled`` or ``suspended``.
    phase: str
    #: What it waits for, or the error.
    message: str
    version: int
    #: Updates that were aggregated.
    updates: int
    #: Figures by name: ``loss``, ``clients``, ``participants``, ``epsilon_spent``, ...
    metrics: dict[str, float]


def submit(db: Database, name: str, federated: Mapping[str, Any], *, timeout: float | None = None) -> bool:
    """Submits a run of ``kind: Federated``; ``federated`` are the fields of ``spec.federated``. Returns whether it is new."""
    spec = {"clusterRef": {"name": db.status().name}, "kind": "Federated", "federated": dict(federated)}
    created: bool = _engram.submit_run(db._native, name, json.dumps(spec), timeout=timeout).wait()
    return created


def status(db: Database, name: str, *, timeout: float | None = None) -> Status:
    """Returns the status of a run."""
    found = _engram.run_status(db._native, name, timeout=timeout).wait()
    if found is None:
        raise create("NotFound", f"run {name!r} does not exist in this cluster")
    return Status(*found)


Train: TypeAlias = Callable[[Model, Task], Update]


class ClientApp:
    """A client as a function: ``@app.train()`` decorates the local training, ``app.run(...)`` takes part until the run ends."""

    def __init__(self) -> None:
        self._train: Train | None = None

    def train(self) -> Callable[[Train], Train]:
        """Decorates the function that trains: it gets the model and the task, and returns an :class:`Update`."""

        def decorate(function: Train) -> Train:
            self._train = function
            return function

        return decorate

    def run(
        self,
        db: Database | str | os.PathLike[str],
        run: str,
        client: str,
        *,
        keys: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> int:
        """Takes part in a run until it ends; arguments as of :func:`tasks`. Returns the number of updates that were accepted.

        A task whose training raises is given up, and the exception is raised.
        """
        if self._train is None:
            raise invalid("the app has no function for training; add one with @app.train()")
        accepted = 0
        for task in tasks(db, run, client, keys=keys, **options):
            try:
                update = self._train({name: array.copy() for name, array in task.model.items()}, task)
            except BaseException:
                try:
                    task.give_up(timeout=5)
                except EngramError:
                    pass  # The lease ends by itself.
                raise
            accepted += task.reply(update.parameters, samples=update.samples, loss=update.loss, rate_sum=update.rate_sum)
        return accepted
