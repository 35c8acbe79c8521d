"""``DistributedLearner``: learning epochs on a cluster."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from . import _engram
from ._aio import Steps, calls, in_thread, steps, twin
from ._arrays import F64, U64, Ids, Timeout, ids_and_keys, seconds
from ._database import Database, cluster_manifest, connect, local_database
from ._errors import create, invalid
from ._local import LocalCluster
from ._progress import Progress, progress_bar
from ._results import ONE, ClusterStatus, Digest, GroupQuality, Memories, Quality, Worker, WriteResult, table

#: Memories of the experiment that a learner without memories of its own creates: as of a manifest's ``synthetic: {}``.
SYNTHETIC_MEMORIES = 100_000
#: Its groups, and the quality with which each is reinforced in every epoch.
REWARDED, PUNISHED = (0, 0.8), (1, 0.2)
#: Memories per request of the first insertion.
BATCH = 1 << 16
#: Longest wait for the processes of a local cluster, in seconds.
LOCAL_TIMEOUT = 60.0


@dataclass(frozen=True)
class EpochReport(Mapping[str, Any]):
    """What an epoch did: an object and a mapping."""

    #: Number of the epoch, from 1.
    epoch: int
    #: Separation of groups 0 and 1, divided by that after the first epoch; NaN unless both have memories.
    convergence: float
    #: Difference of the mean weights of groups 0 and 1; NaN unless both have memories.
    separation: float
    #: Number of memories.
    memories: int
    #: Mean weight of all memories; NaN without memories.
    mean_weight: float
    #: Updates that were applied, after the decay of every memory.
    updates: int
    #: Updates that were not applied: their memory does not exist.
    rejected: int
    #: Duration of the call.
    seconds: float

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in _REPORT_FIELDS

    def __iter__(self) -> Iterator[str]:
        return iter(_REPORT_FIELDS)

    def __len__(self) -> int:
        return len(_REPORT_FIELDS)

    def _repr_html_(self) -> str:
        return table(f"epoch {self.epoch}", list(self), [[self[name] for name in self]], 1)


_REPORT_FIELDS = tuple(field.name for field in fields(EpochReport))


class History(Sequence[EpochReport]):
    """Reports of a run, in order."""

    def __init__(self, reports: Sequence[EpochReport] = ()) -> None:
        self.reports = list(reports)

    def __getitem__(self, index: Any) -> Any:
        return History(self.reports[index]) if isinstance(index, slice) else self.reports[index]

    def __len__(self) -> int:
        return len(self.reports)

    def column(self, name: str) -> F64:
        """Returns one figure of every epoch."""
        return np.array([report[name] for report in self.reports], np.float64)

    def __repr__(self) -> str:
        return f"History({len(self)} epochs{f', last: {self.reports[-1]}' if self.reports else ''})"

    def _repr_html_(self) -> str:
        rows = [[report[name] for name in _REPORT_FIELDS] for report in self.reports[-10:]]
        return table(f"{len(self)} epochs", _REPORT_FIELDS, rows, len(rows))


@dataclass(frozen=True, eq=False)
class PutResult:
    """Ids and counts of an insertion."""

    ids: U64
    created: int
    evicted: int
    rejected: int


class DistributedLearner:
    """Memories on several workers, and epochs that learn from them.

    An epoch decays every memory, then applies updates, on all workers. A learner whose memories were never written runs the
    experiment with two groups: 100,000 memories (at most half of the capacity), of which the even ids are reinforced with quality 0.8
    and the odd ones with 0.2.

    >>> from engram import DistributedLearner
    >>> with DistributedLearner(num_nodes=1, memory_capacity=1_000) as learner:
    ...     history = learner.run(epochs=5)
    >>> round(history[-1].convergence, 6)
    5.0

    ``num_nodes``, ``memory_capacity``, ``decay_rate``, ``replication_factor`` and ``gpu_enabled`` are ``workers``,
    ``capacity.memories``, ``learning.decay``, ``replicationFactor`` and ``gpu.mode`` of a manifest. ``config`` is the path of a manifest,
    or a mapping of fields of its ``spec``. With an ``address`` (as of :func:`engram.connect`) the cluster exists, and these describe
    nothing but the decay.
    """

    def __init__(
        self,
        *,
        num_nodes: int = 1,
        gpu_enabled: bool | Literal["auto"] = "auto",
        memory_capacity: int | None = None,
        decay_rate: float | None = None,
        replication_factor: int | None = None,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        address: str | os.PathLike[str] | None = None,
        timeout: Timeout = 60.0,
    ) -> None:
        limit = seconds(timeout) or 60.0
        spec = _spec(config)
        spec["workers"] = num_nodes
        _set(spec, "capacity", "memories", memory_capacity)
        _set(spec, "learning", "decay", decay_rate)
        if replication_factor is not None:
            spec["replicationFactor"] = replication_factor
        modes: dict[object, str] = {True: "required", False: "disabled", "auto": "auto"}
        if gpu_enabled not in modes:
            raise invalid(f"gpu_enabled is {gpu_enabled!r}; allowed: True, False, 'auto'")
        # The parser of manifests checks all values and fills in the defaults.
        manifest = cluster_manifest("python", spec)
        effective = json.loads(_engram.parse_manifest(json.dumps(manifest), "arguments"))["spec"]
        self._decay = float(effective["learning"]["decay"])
        self._capacity = int(effective["capacity"]["memories"])
        self._initial_weight = float(effective["learning"]["initialWeight"])
        if address is None:
            local = LocalCluster(manifest, gpu=modes[gpu_enabled])
            self._db = local_database(local, limit, "local")
        else:
            self._db = connect(address, timeout=limit)
        self._epoch = 0
        # Finished steps of the current epoch: the decay, the updates.
        self._step = 0
        self._written = WriteResult(0, 0, 0, 0)
        self._first: Fraction | None = None
        self._next_id = 0
        self._is_synthetic: bool | None = None

    # Memories

    @calls
    def put(self, weights: object = None, ids: Ids | None = None, *, groups: object = None, timeout: Timeout = None) -> Steps[PutResult]:
        """Inserts memories: ``weights`` in [0, 1], or ``None`` for the initial weight of the cluster.

        Without ``ids`` the next free numbers of this learner are used, from 0.
        """
        if ids is None:
            if weights is None:
                raise invalid("required: weights, ids, or both")
            count = len(np.atleast_1d(np.asarray(weights)))
            numbers: Ids = np.arange(self._next_id, self._next_id + count, dtype=np.uint64)
            self._next_id += count
        else:
            numbers = ids
        self._is_synthetic = False
        written = yield from steps(Database.insert)(self._db, numbers, weights, groups=groups, timeout=timeout)
        return PutResult(ids_and_keys("ids", numbers)[0], written.created, written.evicted, written.rejected)

    @calls
    def reinforce(
        self,
        ids: Ids,
        qualities: object = None,
        *,
        deltas: object = None,
        on_missing: Literal["report", "create"] = "report",
        timeout: Timeout = None,
    ) -> Steps[WriteResult]:
        """Reinforces memories at once, outside an epoch; see :meth:`engram.Database.reinforce`."""
        apply = steps(Database.reinforce)
        return (yield from apply(self._db, ids, qualities, deltas=deltas, on_missing=on_missing, timeout=timeout))

    @calls
    def get(self, ids: Ids, *, timeout: Timeout = None) -> Steps[F64]:
        """Returns the weights of memories, exact. Raises :class:`engram.NotFoundError` for ids that do not exist."""
        found = yield from steps(Database.get)(self._db, ids, timeout=timeout)
        if len(found.missing):
            shown = ", ".join(map(str, found.missing[:5].tolist()))
            raise create("NotFound", f"{len(found.missing)} memories do not exist: {shown}", "ENG-0508")
        return found.weights

    @calls
    def top(self, k: int = 10, *, group: int | None = None, timeout: Timeout = None) -> Steps[Memories]:
        """Returns the ``k`` memories of the greatest weights, descending."""
        return (yield from steps(Database.rank)(self._db, k, group=group, timeout=timeout))

    # Learning

    @calls
    def run_epoch(
        self,
        ids: Ids | None = None,
        qualities: object = None,
        *,
        deltas: object = None,
        on_missing: Literal["report", "create"] = "report",
        timeout: Timeout = None,
    ) -> Steps[EpochReport]:
        """Learns one epoch: decays every memory, then reinforces ``ids``, if given, on all workers.

        After an exception the same call continues the epoch: what was applied is not applied again, except where the deadline passed
        while a write was in flight (:class:`engram.TimeoutError`).
        """
        started = time.perf_counter()
        limit = seconds(timeout)
        if ids is None and (qualities is not None or deltas is not None):
            raise invalid("qualities and deltas require ids")
        if ids is not None and self._is_synthetic is None:
            self._is_synthetic = False
        is_experiment = ids is None and (yield from self._populate(limit))
        if self._step == 0:
            yield from steps(Database.decay)(self._db, self._decay, timeout=limit)
            self._step = 1
        if self._step == 1:
            self._written = WriteResult(0, 0, 0, 0)
            if is_experiment:
                self._written = WriteResult.of((yield self._db._native.reinforce_groups([REWARDED, PUNISHED], timeout=limit)))
            elif ids is not None:
                apply = steps(DistributedLearner.reinforce)
                self._written = yield from apply(self, ids, qualities, deltas=deltas, on_missing=on_missing, timeout=limit)
            self._step = 2
        quality = yield from steps(Database.quality)(self._db, timeout=limit)
        self._epoch, self._step = self._epoch + 1, 0
        return self._report(self._written, quality, time.perf_counter() - started)

    def _populate(self, limit: float | None) -> Steps[bool]:
        """Inserts the memories of the experiment into a cluster that has none; returns whether the epoch is one of the experiment."""
        if self._is_synthetic is None:
            if (yield from steps(Database.digest)(self._db, timeout=limit)).memories:
                self._is_synthetic = False
                return False
            # Partitions have equal shares of the capacity: a full cluster would evict from those that hashing fills first.
            count = min(SYNTHETIC_MEMORIES, self._capacity // 2) & ~1
            for start in range(0, count, BATCH):
                ids = np.arange(start, min(start + BATCH, count), dtype=np.uint64)
                groups = ids & np.uint64(1)
                yield from steps(Database.insert)(self._db, ids, self._initial_weight, groups=groups, timeout=limit)
            self._next_id = count
            self._is_synthetic = True
        return self._is_synthetic

    def _report(self, written: WriteResult, quality: Quality, duration: float) -> EpochReport:
        separation = _separation(quality.get(REWARDED[0]), quality.get(PUNISHED[0]))
        if self._epoch == 1:
            self._first = separation
        factor = separation / self._first if separation is not None and self._first else None
        total = quality.total
        return EpochReport(
            epoch=self._epoch,
            convergence=math.nan if factor is None else float(factor),
            separation=math.nan if separation is None else float(separation),
            memories=total.count,
            mean_weight=total.mean,
            updates=written.applied,
            rejected=written.rejected,
            seconds=duration,
        )

    def stream(self, epochs: int, *, timeout: Timeout = None) -> Iterator[EpochReport]:
        """Yields the report of each epoch as it ends."""
        for _ in range(epochs):
            yield self.run_epoch(timeout=timeout)

    @calls
    def run(
        self,
        epochs: int = 10,
        *,
        until: Mapping[str, float] | None = None,
        progress: Progress = "auto",
        callbacks: Sequence[Callable[[EpochReport], object]] = (),
        timeout: Timeout = None,
    ) -> Steps[History]:
        """Learns several epochs. Ends early when a figure of ``until``, as ``{"convergence": 12}``, is reached.

        ``progress`` shows a bar if tqdm is installed; ``"auto"`` only on a terminal.
        """
        unknown = set(until or {}) - set(_REPORT_FIELDS)
        if unknown:
            raise invalid(f"until has {sorted(unknown)}; allowed: {', '.join(_REPORT_FIELDS)}")
        history = History()
        with progress_bar(epochs, "epoch", progress) as advance:
            for _ in range(epochs):
                report = yield from steps(DistributedLearner.run_epoch)(self, timeout=timeout)
                history.reports.append(report)
                advance(1)
                for callback in callbacks:
                    callback(report)
                if any(report[name] >= value for name, value in (until or {}).items()):
                    break
        return history

    # The cluster

    @calls
    def status(self) -> Steps[ClusterStatus]:
        """Returns workers and partitions."""
        return (yield from steps(Database.status)(self._db))

    @property
    def nodes(self) -> tuple[Worker, ...]:
        """Workers, as of :meth:`status`."""
        return self.status().workers

    @calls
    def quality(self, *, timeout: Timeout = None) -> Steps[Quality]:
        """Returns number and weights of the memories per group."""
        return (yield from steps(Database.quality)(self._db, timeout=timeout))

    @calls
    def digest(self, *, timeout: Timeout = None) -> Steps[Digest]:
        """Returns the digest of all memories."""
        return (yield from steps(Database.digest)(self._db, timeout=timeout))

    def metrics(self, *, timeout: Timeout = None) -> dict[int, dict[str, float]]:
        """Returns the metrics of each worker by its number, those with labels by ``name{label="value"}``. Only for a cluster that this learner started:
        of others Prometheus reads them.
        """
        return self._local("metrics").metrics(seconds(timeout) or LOCAL_TIMEOUT)

    def snapshot(self, path: str | os.PathLike[str], *, timeout: Timeout = None) -> None:
        """Writes a snapshot of all memories to the folder ``path``, which must not exist, while everything is served. Only for a cluster that this
        learner started.

        ``engram snapshot restore PATH --state-dir DATA --partitions 16 --yes`` makes a state directory of it, for
        ``engram.connect("file:DATA")``.
        """
        self._local("snapshot").snapshot(Path(path).absolute(), seconds(timeout) or LOCAL_TIMEOUT)

    def kill_node(self, ordinal: int) -> int:
        """Kills a worker process as ``kill -9`` does; it is started again. Only for a cluster that this learner started."""
        return self._local("kill_node").kill_worker(ordinal)

    def _local(self, call: str) -> LocalCluster:
        if self._db.local is None:
            raise create("Config", f"{call} is for a local cluster that this learner started")
        return self._db.local

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._epoch

    @property
    def db(self) -> Database:
        """Connection to the cluster."""
        return self._db

    @cached_property
    def aio(self) -> AsyncDistributedLearner:
        """The same calls, awaitable."""
        return AsyncDistributedLearner(self)

    def close(self) -> None:
        """Stops the cluster that this learner started."""
        self._db.close()

    def __enter__(self) -> DistributedLearner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<engram.DistributedLearner {self._db.address}, epoch {self._epoch}>"

    def _repr_html_(self) -> str:
        return self._db._repr_html_()


class AsyncDistributedLearner:
    """Awaitable calls of a :class:`DistributedLearner`."""

    def __init__(self, sync: DistributedLearner) -> None:
        self.sync = sync

    put = twin(DistributedLearner.put)
    reinforce = twin(DistributedLearner.reinforce)
    get = twin(DistributedLearner.get)
    top = twin(DistributedLearner.top)
    run_epoch = twin(DistributedLearner.run_epoch)
    run = twin(DistributedLearner.run)
    status = twin(DistributedLearner.status)
    quality = twin(DistributedLearner.quality)
    digest = twin(DistributedLearner.digest)
    metrics = in_thread(DistributedLearner.metrics)
    snapshot = in_thread(DistributedLearner.snapshot)
    close = in_thread(DistributedLearner.close)

    async def stream(self, epochs: int, *, timeout: Timeout = None) -> Any:
        """Yields the report of each epoch as it ends."""
        for _ in range(epochs):
            yield await self.run_epoch(timeout=timeout)

    async def __aenter__(self) -> AsyncDistributedLearner:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _spec(config: str | os.PathLike[str] | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of a specification that were given."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        spec: Mapping[str, Any] = config.get("spec", config)
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in spec.items()}
    path = Path(config)
    try:
        text = path.read_text()
    except OSError as error:
        raise create("Config", f"failed to read the manifest {path}: {error.strerror}", "ENG-0302") from error
    parsed: dict[str, Any] = json.loads(_engram.parse_manifest(text, str(path)))["spec"]
    return parsed


def _set(spec: dict[str, Any], block: str, name: str, value: object) -> None:
    """Sets a field of a block of a specification, unless the value is absent."""
    if value is not None:
        spec.setdefault(block, {})[name] = value


def _separation(rewarded: GroupQuality | None, punished: GroupQuality | None) -> Fraction | None:
    """Returns the difference of two mean weights, exact; ``None`` without memories in one of them."""
    if rewarded is None or punished is None or not rewarded.count or not punished.count:
        return None
    return Fraction(rewarded.units, rewarded.count * ONE) - Fraction(punished.units, punished.count * ONE)
