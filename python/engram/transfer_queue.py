"""TransferQueue: a storage backend that survives crashes and refuses stale handles. Needs ``TransferQueue``.

Importing this module registers the backend ``Engram`` in TransferQueue's registries, in this process::

    import transfer_queue as tq
    import engram.transfer_queue

    tq.init(OmegaConf.create({"backend": {"storage_backend": "Engram", "Engram": {"address": "grpc://worker-0:7443"}}}))

Processes that call ``tq.init`` later import it by themselves. Where the first ``tq.init`` is in an actor, Ray has to import it in each worker:
``ray.init(runtime_env={"worker_process_setup_hook": "engram.transfer_queue.register"})``.

Settings of ``backend.Engram``: ``address`` (as of :func:`engram.connect`; absent: the process of the first ``tq.init`` starts a local cluster of
``workers`` with ``replication_factor`` replicas, which ends with that process), ``token`` and ``tls``, ``buffer`` (name of the replay buffer),
``capacity`` (items of it: one per sample, eight fields and put), ``timeout`` in seconds, ``heal`` (see :class:`EngramManager`).

What is fenced: with metadata that is held while its sample is cleared and the slot given to another, ``get_data``, ``put`` and
``clear_samples`` are refused with :class:`StaleHandleError`. What is not: the ``kv_*`` calls look handles up at each call, so that there
only the time between look-up and store is covered; and TransferQueue's controller, which is one process without replicas.

Checkpoints: after ``tq.load_checkpoint`` of one of the last two, the samples are those of the checkpoint, also where they were overwritten or
cleared since.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue.metadata import extract_field_schema
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory

from . import _tq_values as forms
from ._database import Database, connect
from ._errors import EngramError, create, invalid
from ._tq_store import Handle, SampleStore
from ._tq_store import StaleHandleError as StaleHandleError

#: Name of the backend, of its section of the configuration, and of its client.
BACKEND, CLIENT = "Engram", "EngramClient"


class Plugin:
    """Travels in TransferQueue's configuration: unpickling it in another process imports this module, which registers the backend there."""


def register() -> None:
    """For Ray's ``worker_process_setup_hook``: importing this module has registered the backend."""


def tag_of(partition: str, index: int) -> str:
    """Returns the tag of a sample's items: its partition and its slot in the controller."""
    return f"{partition}@{index}"


@StorageClientFactory.register(CLIENT)
class EngramClient(StorageKVClient):  # type: ignore[misc, unused-ignore]
    """Values by key (``slot@field``) and handle. Safe to use from several threads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(dict(config))
        timeout = float(config.get("timeout") or 30.0)
        self.db = _connect(config)
        self.store = SampleStore(self.db, config.get("buffer") or "transfer-queue", int(config.get("capacity") or 1_000_000), timeout)

    def put(self, keys: list[str], values: list[Any]) -> list[Handle]:
        """Stores values, and returns their handles. They are new samples: without metadata there is no fence."""
        slots, fields = _parse(keys)
        rows = {slot: number for number, slot in enumerate(dict.fromkeys(slots))}
        by_field: dict[str, dict[int, Any]] = {}
        for slot, field, value in zip(slots, fields, values, strict=True):
            by_field.setdefault(field, {})[rows[slot]] = value
        owners: list[int | None] = [None] * len(rows)
        found: dict[tuple[str, str], Handle] = {}
        tags = [tag_of("", int(slot)) for slot in rows]
        encoded = {field: forms.encode(field, [column[number] for number in sorted(column)]) for field, column in by_field.items()}
        names = list(rows)
        try:
            for field, column in by_field.items():
                numbers = sorted(column)
                (handles,) = self.store.put([encoded[field]], [tags[n] for n in numbers], [owners[n] for n in numbers])
                for number, handle in zip(numbers, handles, strict=True):
                    owners[number] = handle[0]
                    found[names[number], field] = handle
        except BaseException:
            with suppress(EngramError):
                self.store.discard(list(found.values()))
            raise
        return [found[slot, field] for slot, field in zip(slots, fields, strict=True)]

    def get(
        self, keys: list[str], shapes: object = None, dtypes: object = None, custom_backend_meta: Sequence[Handle | None] | None = None
    ) -> list[Any]:
        """Returns values by handle."""
        return self.store.get(keys, _parse(keys)[1], _handles(keys, custom_backend_meta)) if keys else []

    def clear(self, keys: list[str], custom_backend_meta: Sequence[Handle | None] | None = None) -> None:
        """Deletes the samples of handles, whole; nothing if one is stale."""
        self.store.clear(keys, _handles(keys, custom_backend_meta))

    def close(self) -> None:
        """Closes the connection."""
        self.db.close()


@StorageManagerFactory.register(BACKEND)
class EngramManager(KVStorageManager):  # type: ignore[misc, unused-ignore]
    """Storage manager that fences by handle.

    TransferQueue marks samples as not ready before it asks the backend to clear them. If that is refused, the live samples in those slots are
    announced again (``heal``, on by default); readers may find them not ready for a moment. Values come back as TransferQueue's other backends
    return them: dense tensors as nested ones.
    """

    def __init__(self, controller_info: Any, config: Mapping[str, Any], zmq_context: Any = None) -> None:
        super().__init__(controller_info, {**config, "client_name": CLIENT})
        self._heals = config.get("heal") is not False

    async def put_data(self, data: Any, metadata: Any, data_parser: Callable[[Any], Any] | None = None) -> None:
        """Stores fields of samples, and announces them."""
        if data_parser is not None:
            raise NotImplementedError("data_parser is not supported by the backend Engram")
        indexes = list(metadata.global_indexes)
        if data.batch_size[0] != len(indexes):
            raise invalid(f"data has {data.batch_size[0]} rows; required: {len(indexes)}, one per sample of the metadata")
        if not indexes:
            return
        fields, partition = sorted(data.keys()), metadata.partition_ids[0]
        held = metadata._custom_backend_meta
        owners = [next((handle[0] for handle in row.values() if handle), None) for row in held]
        tags = [tag_of(partition, index) for index in indexes]

        def put() -> list[list[Handle]]:
            return self.storage_client.store.put([forms.encode(field, data[field]) for field in fields], tags, owners)

        columns = await asyncio.to_thread(put)
        by_index = {index: {field: column[row] for field, column in zip(fields, columns, strict=True)} for row, index in enumerate(indexes)}
        for row, index in enumerate(indexes):
            held[row].update(by_index[index])
        await self.notify_data_update(partition, indexes, extract_field_schema(data), by_index)

    async def get_data(self, metadata: Any) -> Any:
        """Reads the fields of the metadata. Runs in a thread: the event loop serves other requests meanwhile."""
        fields, held = sorted(metadata.field_names), metadata._custom_backend_meta
        if fields and held:
            handles = [[row.get(field) for row in held] for field in fields]
            columns = await asyncio.to_thread(self.storage_client.store.get_columns, fields, handles)
            if columns is not None:
                return TensorDict(columns, batch_size=len(held))
        return await asyncio.to_thread(asyncio.run, super().get_data(metadata))

    async def clear_data(self, metadata: Any) -> None:
        """Deletes samples, or none of them."""
        try:
            await asyncio.to_thread(asyncio.run, super().clear_data(metadata))
        except StaleHandleError:
            if self._heals:
                await self._announce_live(metadata)
            raise

    async def _announce_live(self, metadata: Any) -> None:
        for index, partition in zip(metadata.global_indexes, metadata.partition_ids, strict=True):
            found = await asyncio.to_thread(self.storage_client.store.live, tag_of(partition, index))
            if found:
                schema = {field: _schema(form) for field, (_, form) in found.items()}
                await self.notify_data_update(partition, [index], schema, {index: {field: handle for field, (handle, _) in found.items()}})

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Writes which buffer of which cluster has the samples, and the number of a checkpoint of it: the values are durable there.

        Samples that are cleared later stay until two more checkpoints are saved. Writes no values, and lists the items of the buffer.
        """
        saved = await asyncio.to_thread(self._place)
        saved["checkpoint"] = await asyncio.to_thread(self.storage_client.store.checkpoints.save)
        with open(os.path.join(checkpoint_dir, "engram.json"), "w") as file:
            json.dump(saved, file)

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Makes the samples live again that were cleared since the checkpoint, if it is one of the last two of the buffer.

        Of another one, a warning says that these samples are refused. Versions that were overwritten since are read in any case.
        """
        with open(os.path.join(checkpoint_dir, "engram.json")) as file:
            saved = json.load(file)
        number, found = saved.pop("checkpoint", 0), await asyncio.to_thread(self._place)
        if saved != found:
            raise create("Conflict", f"the checkpoint is of {saved}, and this backend uses {found}", "ENG-0605")
        if not await asyncio.to_thread(self.storage_client.store.checkpoints.restore, number):
            text = "the checkpoint is not one of the last two of the buffer: samples that were cleared since are refused"
            warnings.warn(text, stacklevel=2)

    def _place(self) -> dict[str, Any]:
        client: EngramClient = self.storage_client
        return {"cluster": client.db.status().cluster, "buffer": client.store.buffer.name}

    def close(self) -> None:
        """Closes the connection; the samples stay."""
        super().close()
        client = getattr(self, "storage_client", None)
        if client is not None:
            client.close()


@StorageBootstrapProvider.register_provider(BACKEND)
def provide(conf: Any) -> Database:
    """Connects to the cluster, or starts a local one; what is written into ``conf`` reaches every other process."""
    section: Any = OmegaConf.to_container(conf.backend.get(BACKEND) or OmegaConf.create({}))
    if section.get("address"):
        db = _connect(section)
    else:
        db = connect(workers=section.get("workers") or 1, config={"replicationFactor": section.get("replication_factor") or 1})
        address = "grpc://" + ",".join(worker.address for worker in db.status().workers)
        OmegaConf.update(conf, f"backend.{BACKEND}.address", address, force_add=True)
    # TransferQueue has no hook at the end of an external store: a local cluster ends with this process.
    atexit.register(db.close)
    OmegaConf.update(conf, f"backend.{BACKEND}.plugin", Plugin(), force_add=True, merge=False)
    return db


def _connect(config: Mapping[str, Any]) -> Database:
    address = config.get("address")
    if not address:
        raise create("Config", "backend.Engram.address is absent; tq.init of the first process sets it", "ENG-0105")
    return connect(address, tls=config.get("tls"), token=config.get("token"), timeout=float(config.get("timeout") or 30.0))


def _parse(keys: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns slots and fields of keys."""
    pairs = [key.split("@", 1) for key in keys]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _handles(keys: Sequence[str], handles: Sequence[Handle | None] | None) -> Sequence[Handle | None]:
    return [None] * len(keys) if handles is None else handles


def _schema(form: forms.Form) -> dict[str, Any]:
    """Returns the schema of a field as the controller has it."""
    kind, dtype, shape = form
    is_tensor = kind == "torch"
    return {
        "dtype": getattr(torch, dtype) if is_tensor else np.dtype(dtype) if kind == "numpy" else None,
        "shape": torch.Size(shape or (1,)) if is_tensor else None,
        "is_nested": False,
        "is_non_tensor": not is_tensor,
    }
