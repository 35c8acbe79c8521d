"""TorchRL: a ``Storage`` on a cluster. Needs ``torchrl``.

>>> import engram, torch
>>> from engram.torchrl import EngramStorage, collate
>>> from tensordict import TensorDict
>>> from torchrl.data import ReplayBuffer
>>> with engram.connect() as db:
...     buffer = ReplayBuffer(storage=EngramStorage(db, "train", max_size=1_000), collate_fn=collate, batch_size=4)
...     _ = buffer.extend(TensorDict({"obs": torch.zeros(8, 3), ("next", "reward"): torch.ones(8, 1)}, batch_size=[8]))
...     buffer.sample()["next", "reward"].shape
torch.Size([4, 1])
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers.storages import Storage

from ._arrays import U64, Timeout
from ._database import Database
from ._errors import NotFoundError, create, invalid
from ._replay import ReplayBuffer

#: Separates the parts of the name of a nested field.
SEPARATOR = "."
#: Field of data that is one tensor.
SINGLE = "data"


def collate(batch: Any) -> Any:
    """Returns a batch as it is: the ``collate_fn`` of a TorchRL buffer, which knows none for storages that are not its own."""
    return batch


class EngramStorage(Storage):  # type: ignore[misc, unused-ignore]
    """A TorchRL storage whose items are in a replay buffer of a cluster: they survive this process, and a worker's end with replicas.

    TorchRL addresses items by slot. An overwritten slot is a new item; the old one is deleted. A new storage of the same name finds the items
    again. One process writes; for several writers use :class:`engram.ReplayBuffer`, whose handles are never reused. ``state_dict`` has the
    handles of the slots: items that were overwritten after it was made are not there any more, which :meth:`load_state_dict` reports.
    """

    def __init__(self, db: Database, name: str, max_size: int, *, timeout: Timeout = None) -> None:
        super().__init__(max_size)
        if max_size < 1:
            raise invalid(f"max_size is {max_size}; allowed: at least 1")
        # Overwritten items are deleted after their successors are stored, and partitions have equal shares of the capacity.
        self.buffer = ReplayBuffer(db, name, capacity=2 * max_size + 4096, remover="refuse", timeout=timeout)
        self._handles = np.zeros(max_size, np.uint64)
        self._lock = threading.Lock()
        self._find()

    def _find(self) -> None:
        """Finds the items of an earlier storage of this name."""
        try:
            listed = self.buffer.list(limit=2 * self.max_size + 4096)
        except NotFoundError:
            return
        slots = listed.trajectories.astype(np.int64) - 1
        if len(slots) and (slots.min() < 0 or slots.max() >= self.max_size):
            problem = f"the buffer {self.buffer.name!r} has items that are no slots of a storage of {self.max_size}"
            raise create("Conflict", problem, "ENG-0106")
        # Oldest first: the newest of a slot remains.
        self._handles[slots] = listed.index

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Stores items in slots."""
        if set_cursor:
            self._set_last_cursor(cursor)
        single = isinstance(cursor, (int, np.integer)) or (isinstance(cursor, torch.Tensor) and cursor.ndim == 0)
        slots = self._slots(cursor)
        columns = _columns(data, single)
        with self._lock:
            new = self.buffer.extend(columns, trajectory=(slots + 1).astype(np.uint64))
            # Of a slot that is named twice the last item counts.
            last = {int(slot): row for row, slot in enumerate(slots)}
            kept = np.array(list(last.values()), np.int64)
            old = self._handles[slots[kept]]
            superseded = np.setdiff1d(np.arange(len(slots)), kept)
            self._handles[slots[kept]] = new[kept]
            gone: U64 = np.concatenate([old[old != 0], new[superseded]])
            if len(gone):
                self.buffer.delete(gone)
        self._bump_mutation_revision()
        for entity in self._attached_entities_iter():
            entity.mark_update(cursor)

    def get(self, index: Any) -> Any:
        """Returns the items of slots."""
        slots = self._slots(index)
        handles = self._handles[slots]
        if not handles.all():
            empty = int(slots[np.argmin(handles != 0)])
            raise IndexError(f"slot {empty} is empty")
        batch = self.buffer.get(handles)
        if len(batch.missing):
            text = f"{len(batch.missing)} items were deleted by another process"
            raise create("NotFound", text, "ENG-0508")
        fields = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in batch.items() if name not in ("index", "weight", "version")}
        if set(fields) == {SINGLE}:
            rows = fields[SINGLE]
        else:
            rows = TensorDict(fields, batch_size=[len(slots)]).unflatten_keys(SEPARATOR)
        single = isinstance(index, (int, np.integer)) or (isinstance(index, torch.Tensor) and index.ndim == 0)
        return rows[0] if single else rows

    def contains(self, item: Any) -> Any:
        """Whether slots have items."""
        slots = np.asarray(item)
        inside = (slots >= 0) & (slots < self.max_size)
        found = inside & (self._handles[np.where(inside, slots, 0)] != 0)
        return bool(found) if found.ndim == 0 else torch.from_numpy(found)

    def __len__(self) -> int:
        return int(np.count_nonzero(self._handles))

    def state_dict(self) -> dict[str, Any]:
        """Returns the handles of the slots; the items stay on the cluster."""
        return {"name": self.buffer.name, "handles": torch.from_numpy(self._handles.view(np.int64).copy())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Uses the slots of a state; raises :class:`engram.NotFoundError` if some of its items were overwritten since."""
        handles = state_dict["handles"].numpy().view(np.uint64)
        if state_dict["name"] != self.buffer.name or len(handles) != self.max_size:
            found = f"{state_dict['name']!r} with {len(handles)} slots"
            raise create("Conflict", f"the state is of {found}; required: {self.buffer.name!r} with {self.max_size}", "ENG-0106")
        used = handles[handles != 0]
        missing = self.buffer.get(used, fields=[]).missing if len(used) else used
        if len(missing):
            raise create("NotFound", f"{len(missing)} of {len(used)} items of the state were overwritten since", "ENG-0508")
        with self._lock:
            later = np.setdiff1d(self._handles[self._handles != 0], used)
            if len(later):
                self.buffer.delete(later)
            self._handles = handles.copy()
        self._bump_mutation_revision()

    def _empty(self) -> None:
        with self._lock:
            used = self._handles[self._handles != 0]
            if len(used):
                self.buffer.delete(used)
            self._handles[:] = 0
        self._bump_mutation_revision()

    def _slots(self, index: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        if isinstance(index, slice):
            return np.arange(*index.indices(len(self)), dtype=np.int64)
        if isinstance(index, tuple):
            (index,) = index
        slots = np.atleast_1d(np.asarray(index, np.int64))
        if slots.size and (slots.min() < 0 or slots.max() >= self.max_size):
            raise IndexError(f"slots are {slots.min()} to {slots.max()}; allowed: 0 to {self.max_size - 1}")
        return slots


def _columns(data: Any, single: bool) -> dict[str, Any]:
    """Returns the fields of data, with a row per item."""
    if isinstance(data, (list, tuple)):
        data = torch.stack(list(data))
    if isinstance(data, torch.Tensor):
        return {SINGLE: data[None] if single else data}
    if not isinstance(data, TensorDictBase):
        raise invalid(f"data is a {type(data).__name__}; allowed: a tensor, or a TensorDict")
    rows = data.unsqueeze(0) if single else data
    return dict(rows.flatten_keys(SEPARATOR).items())
