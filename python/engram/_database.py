"""Connections to clusters: ``engram.connect``."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from . import _engram
from ._aio import Steps, calls, in_thread, twin
from ._arrays import Ids, Timeout, floats, group_column, ids_and_keys, matrix, seconds, vector
from ._errors import create, invalid
from ._kube import Proxy, parse
from ._local import LocalCluster, owner_key, read_endpoints, state_base
from ._results import ClusterStatus, Digest, Memories, Quality, Worker, WriteResult

#: Partitions of a cluster that ``connect`` starts: enough for a few workers, and a buffer of a thousand items still has room in each.
LOCAL_PARTITIONS = 16

_runtime: _engram.Runtime | None = None


def runtime() -> _engram.Runtime:
    """Returns the background threads of this process; a forked child gets its own."""
    global _runtime
    if _runtime is None or _runtime.process != os.getpid():
        _runtime = _engram.Runtime()
    return _runtime


class Database:
    """A cluster's memories: weighted records that decay and are reinforced.

    Made by :func:`engram.connect`. Safe to use from several threads; a forked child connects again at its first call.

    >>> import engram
    >>> with engram.connect() as db:
    ...     _ = db.insert(["tea", "coffee"], weights=[0.5, 0.25])
    ...     _ = db.reinforce(["coffee"], deltas=[0.5])
    ...     db.rank(limit=1).keys
    ['coffee']
    """

    def __init__(
        self, connect: Callable[[], _engram.Client], local: LocalCluster | None, address: str, proxy: Proxy | None = None
    ) -> None:
        self._connect = connect
        self._local = local
        self._proxy = proxy
        self._address = address
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._client: _engram.Client | None = None
        self._client = connect()

    @property
    def _native(self) -> _engram.Client:
        client = self._client
        if client is not None and client.is_own:
            return client
        if self._closed:
            raise create("Unavailable", "the connection is closed")
        if self._process != os.getpid():
            # The lock may have been held by another thread of the parent.
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            if self._client is None or not self._client.is_own:
                self._client = self._connect()
            return self._client

    # Memories

    @calls
    def insert(
        self,
        ids: Ids,
        weights: object = None,
        *,
        groups: object = None,
        features: object = None,
        payloads: Sequence[bytes] | None = None,
        timeout: Timeout = None,
    ) -> Steps[WriteResult]:
        """Inserts memories, or changes the given columns of existing ones.

        ``ids`` are integers, or strings as keys, from which ids are derived. ``weights`` in [0, 1], one per id or one for all;
        absent: the cluster's initial weight. ``groups`` 0 to 255. ``features`` one row per id.
        """
        numbers, keys = ids_and_keys("ids", ids)
        rows = len(numbers)
        columns: dict[str, Any] = {"keys": keys, "timeout": seconds(timeout)}
        if weights is not None:
            columns["weights"] = floats("weights", weights, rows, 0.0, 1.0)
        if groups is not None:
            columns["groups"] = group_column("groups", groups, rows)
        if features is not None:
            columns["features"] = matrix("features", features)
            if len(columns["features"]) != rows:
                raise invalid(f"features has {len(columns['features'])} rows; required: {rows}, one per id")
        if payloads is not None:
            if len(payloads) != rows:
                raise invalid(f"payloads has {len(payloads)} entries; required: {rows}, one per id")
            columns["payloads"] = [bytes(payload) for payload in payloads]
        return WriteResult.of((yield self._native.upsert(numbers, **columns)))

    upsert = insert

    @calls
    def get(
        self, ids: Ids, *, features: bool = False, payloads: bool = False, timeout: Timeout = None
    ) -> Steps[Memories]:
        """Reads memories in the given order. Ids that do not exist are in ``missing``."""
        numbers, _ = ids_and_keys("ids", ids)
        options = {"features": features, "payloads": payloads, "timeout": seconds(timeout)}
        return Memories(**(yield self._native.get(numbers, **options)))

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
        """Reinforces memories: by quality in [0, 1], or by change of weight in [-1, 1]; exactly one of the two.

        A repeated id is reinforced again. ``on_missing="create"`` creates unknown memories first.
        """
        numbers, keys = ids_and_keys("ids", ids)
        signal = signals(qualities, deltas, len(numbers))
        create_missing = one_of("on_missing", on_missing, ("report", "create")) == "create"
        counts = yield self._native.reinforce(
            numbers, keys=keys, create=create_missing, timeout=seconds(timeout), **signal
        )
        return WriteResult.of(counts)

    @calls
    def decay(self, amount: float, *, timeout: Timeout = None) -> Steps[WriteResult]:
        """Decays every memory by ``amount`` in [0, 1]."""
        if not 0.0 <= amount <= 1.0:
            raise invalid(f"amount is {amount}; allowed: 0 to 1")
        return WriteResult.of((yield self._native.decay(float(amount), timeout=seconds(timeout))))

    @calls
    def remove(self, ids: Ids, *, timeout: Timeout = None) -> Steps[WriteResult]:
        """Removes memories; unknown ones are counted as rejected."""
        numbers, _ = ids_and_keys("ids", ids)
        return WriteResult.of((yield self._native.remove(numbers, timeout=seconds(timeout))))

    @calls
    def rank(self, limit: int = 10, *, group: int | None = None, timeout: Timeout = None) -> Steps[Memories]:
        """Returns the memories of the greatest weights, descending; ``limit=0`` returns all."""
        if limit < 0:
            raise invalid(f"limit is {limit}; allowed: 0 = all, or more")
        return Memories(**(yield self._native.rank(limit, group=group_number(group), timeout=seconds(timeout))))

    @calls
    def recall(
        self, query: object, limit: int = 10, *, group: int | None = None, timeout: Timeout = None
    ) -> Steps[Memories]:
        """Returns the memories most similar to ``query``, descending by cosine times weight."""
        if not 1 <= limit <= 4096:
            raise invalid(f"limit is {limit}; allowed: 1 to 4096")
        values = vector("query", query)
        options = {"limit": limit, "group": group_number(group), "timeout": seconds(timeout)}
        return Memories(**(yield self._native.recall(values, **options)))

    @calls
    def quality(self, *, timeout: Timeout = None) -> Steps[Quality]:
        """Returns number and weights of the memories per group."""
        return Quality.of((yield self._native.quality(timeout=seconds(timeout))))

    @calls
    def digest(self, *, timeout: Timeout = None) -> Steps[Digest]:
        """Returns the digest of all memories."""
        return Digest(*(yield self._native.digest(timeout=seconds(timeout))))

    def __len__(self) -> int:
        """Number of memories."""
        return self.digest().memories

    def __bool__(self) -> bool:
        return True

    # The cluster

    @calls
    def status(self) -> Steps[ClusterStatus]:
        """Returns workers and partitions."""
        found = yield self._native.map()
        workers = tuple(Worker(*worker) for worker in found["workers"])
        return ClusterStatus(found["cluster"], found["name"], found["partitions"], workers, found["dimension"])

    @property
    def local(self) -> LocalCluster | None:
        """The cluster that this connection started; ``None`` for one that runs on its own."""
        return self._local

    @property
    def address(self) -> str:
        """What the connection was made to."""
        return self._address

    @cached_property
    def aio(self) -> AsyncDatabase:
        """The same calls, awaitable."""
        return AsyncDatabase(self)

    def close(self) -> None:
        """Closes the connection. A cluster that it started is stopped; its data stays if it has a folder."""
        if self._closed:
            return
        self._closed = True
        if self._client is not None and self._client.is_own:
            self._client = None
        if self._local is not None:
            self._local.stop()
        if self._proxy is not None:
            self._proxy.stop()

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        local = getattr(self, "_local", None)
        if local is not None and not self._closed and local.process_id == os.getpid():
            warnings.warn(f"unclosed {self!r}: call close() or use with", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<engram.Database {self._address}{' (closed)' if self._closed else ''}>"

    def _repr_html_(self) -> str:
        return repr(self) if self._closed else self.status()._repr_html_()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a connection cannot be pickled; connect in the other process")


class AsyncDatabase:
    """Awaitable calls of a :class:`Database`: ``await db.aio.get(ids)``. Cancelling the task cancels the request."""

    def __init__(self, sync: Database) -> None:
        self.sync = sync

    insert = twin(Database.insert)
    upsert = twin(Database.upsert)
    get = twin(Database.get)
    reinforce = twin(Database.reinforce)
    decay = twin(Database.decay)
    remove = twin(Database.remove)
    rank = twin(Database.rank)
    recall = twin(Database.recall)
    quality = twin(Database.quality)
    digest = twin(Database.digest)
    status = twin(Database.status)
    close = in_thread(Database.close)

    async def __aenter__(self) -> AsyncDatabase:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def signals(qualities: object, deltas: object, rows: int) -> dict[str, Any]:
    """Returns the one signal that is given."""
    if (qualities is None) == (deltas is None):
        raise invalid("required: exactly one of qualities and deltas")
    if qualities is not None:
        return {"qualities": floats("qualities", qualities, rows, 0.0, 1.0)}
    return {"deltas": floats("deltas", deltas, rows, -1.0, 1.0)}


def group_number(group: int | None) -> int | None:
    """Checks the number of a group."""
    if group is not None and not 0 <= group <= 255:
        raise invalid(f"group is {group}; allowed: 0 to 255, or None")
    return group


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """Checks a word."""
    if value not in allowed:
        raise invalid(f"{name} is {value!r}; allowed: {', '.join(map(repr, allowed))}")
    return value


def connect(
    address: str | os.PathLike[str] | None = None,
    *,
    workers: int | None = None,
    config: Mapping[str, Any] | None = None,
    gpu: Literal["auto", "required", "disabled"] | None = None,
    tls: Mapping[str, str | os.PathLike[str]] | None = None,
    token: str | os.PathLike[str] | None = None,
    timeout: Timeout = 30.0,
) -> Database:
    """Connects to a cluster.

    =====================  ==============================================================================================
    ``connect()``          starts a local cluster that is deleted by ``close()``
    ``"file:./data"``      starts a local cluster whose data is in a folder
    ``"cluster.yaml"``     the local cluster of a manifest: the running one, or what ``engram up`` would start
    ``"grpc://host:7443"``  workers of a cluster, comma-separated; the others are discovered
    ``"env:"``             the cluster of a run of kind Job, whose processes have its address and credentials as variables
    ``"kube://ns/name"``   a cluster in Kubernetes, through its API server, as the kubeconfig says; ``?context=`` selects a context
    =====================  ==============================================================================================

    ``workers`` and ``config``, a mapping of fields of ``spec`` of a ``LearnerCluster``, describe a cluster that is started; without a
    manifest it has 16 partitions.
    ``tls`` has the paths ``ca`` and, without a ``token``, ``certificate`` and ``key``; ``token`` is the path of a file. In Kubernetes both
    are found: ``kube://`` needs the permissions that ``kubectl engram status`` needs, and ``engram`` of this package.
    ``timeout`` is the deadline of every call that has none of its own.
    """
    limit = seconds(timeout) or 30.0
    text = None if address is None else os.fspath(address)
    if text == "env:":
        return _of_job(limit)
    if text is not None and text.startswith("grpc://"):
        return _remote(text, limit, tls, token)
    if tls is not None or token is not None:
        raise create("Config", f"tls and token are for grpc:// addresses; the address is {text!r}", "ENG-0106")
    if text is not None and text.startswith("kube://"):
        return _in_kubernetes(text, limit)
    if text is not None and "://" in text:
        allowed = "file:FOLDER, a manifest, grpc://HOST:PORT, kube://NAMESPACE/CLUSTER, env:, or none"
        raise create("Config", f"address is {text!r}; allowed: {allowed}", "ENG-0104")
    if text is not None and not text.startswith("file:"):
        if workers is not None or config is not None:
            raise create("Config", f"workers and config do not go together with the manifest {text}", "ENG-0106")
        return _manifest(Path(text), limit, gpu)
    spec: dict[str, Any] = {"workers": 1, "partitions": LOCAL_PARTITIONS, **(config or {})}
    if workers is not None:
        spec["workers"] = workers
    folder = None if text is None else Path(text.removeprefix("file:")).absolute()
    manifest = cluster_manifest("python", spec)
    return local_database(LocalCluster(manifest, folder, gpu=gpu), limit, text or "local")


def cluster_manifest(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a cluster."""
    head = {"apiVersion": "engram.dev/v1alpha1", "kind": "LearnerCluster", "metadata": {"name": name}}
    return {**head, "spec": dict(spec)}


def local_database(local: LocalCluster, limit: float, address: str) -> Database:
    """Connects to a local cluster that this process started, and stops it if that fails."""
    try:
        return Database(lambda: local_client(local.folder, limit), local, address)
    except BaseException:
        local.stop()
        raise


def local_client(folder: Path, limit: float) -> _engram.Client:
    """Connects to the local cluster in a state directory."""
    endpoints = read_endpoints(folder)
    if endpoints is None:
        raise create("Unavailable", f"no local cluster is running in {folder}", "ENG-0408")
    if endpoints.get("tls"):
        raise create("Config", f"the local cluster in {folder} uses TLS; connect with grpc:// and tls=", "ENG-0106")
    addresses = [worker["client"] for worker in endpoints["workers"]]
    return _engram.Client(
        runtime(), addresses, cluster=endpoints["cluster"], owner_key=owner_key(folder), timeout=limit
    )


def _of_job(limit: float) -> Database:
    """Connects to the cluster that the environment of a process of a job names."""
    address = os.environ.get("ENGRAM_ADDRESS")
    if not address:
        raise create("Config", "address is 'env:', but ENGRAM_ADDRESS is not set; allowed: in a process of a run of kind Job", "ENG-0103")
    variables = {"ca": "CERTIFICATE_AUTHORITY", "certificate": "CLIENT_CERTIFICATE", "key": "CLIENT_KEY"}
    files = {name: path for name, variable in variables.items() if (path := os.environ.get(f"ENGRAM_{variable}"))}
    return _remote(f"grpc://{address}", limit, files or None, os.environ.get("ENGRAM_TOKEN_FILE") or None)


def _remote(
    text: str,
    limit: float,
    tls: Mapping[str, str | os.PathLike[str]] | None,
    token: str | os.PathLike[str] | None,
) -> Database:
    addresses = text.removeprefix("grpc://").rstrip("/").split(",")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise create("Config", f"address is {text!r}; {address!r} is not HOST:PORT", "ENG-0103")
    files = {name: os.fspath(path) for name, path in (tls or {}).items()}
    unknown = set(files) - {"ca", "certificate", "key"}
    if unknown:
        raise create("Config", f"tls has {sorted(unknown)}; allowed: ca, certificate, key", "ENG-0101")
    options: dict[str, Any] = {**files, "token_file": None if token is None else os.fspath(token), "timeout": limit}
    return Database(lambda: _engram.Client(runtime(), addresses, **options), None, text)


def _in_kubernetes(text: str, limit: float) -> Database:
    namespace, name, context = parse(text)
    options = ["--namespace", namespace, "--cluster", name, *(["--context", context] if context else [])]
    return proxied_database(options, limit, text)


def proxied_database(options: list[str], limit: float, address: str) -> Database:
    """Connects through ``engram proxy``; the options select the cluster."""
    proxy = Proxy(options)
    try:
        return Database(lambda: proxy.client(runtime(), limit), None, address, proxy)
    except BaseException:
        proxy.stop()
        raise


def _manifest(path: Path, limit: float, gpu: str | None) -> Database:
    try:
        text = path.read_text()
    except OSError as error:
        raise create("Config", f"failed to read the manifest {path}: {error.strerror}", "ENG-0302") from error
    name = json.loads(_engram.parse_manifest(text, str(path)))["metadata"]["name"]
    folder = state_base() / name
    if read_endpoints(folder) is not None:
        return Database(lambda: local_client(folder, limit), None, str(path))
    return local_database(LocalCluster(path.absolute(), folder, gpu=gpu), limit, str(path))
