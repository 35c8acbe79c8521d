"""The interface of cpprb over a replay buffer of a cluster: replace ``from cpprb import`` by ``from engram.cpprb import``.

>>> import numpy as np
>>> from engram.cpprb import PrioritizedReplayBuffer
>>> buffer = PrioritizedReplayBuffer(1_000, {"obs": {"shape": 3}, "rew": {}, "done": {}})
>>> _ = buffer.add(obs=np.zeros((8, 3)), rew=np.arange(8), done=np.zeros(8), priorities=np.ones(8))
>>> sample = buffer.sample(4, beta=0.4)
>>> buffer.update_priorities(sample["indexes"], np.full(4, 2.0))
>>> sample["obs"].shape, sample["rew"].shape, buffer.get_stored_size()
((4, 3), (4, 1), 8)

What differs: ``indexes`` are handles, which are never reused, so that an update of an item that was overwritten meanwhile changes nothing.
``next_of``, ``stack_compress`` and ``Nstep`` are not supported.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._arrays import U64
from ._database import Database
from ._errors import invalid
from ._replay import ReplayBuffer as _Buffer
from ._samplers import Prioritized, Sampler, Uniform
from ._shared import database_of

_names = itertools.count()


class ReplayBuffer:
    """As ``cpprb.ReplayBuffer``: uniform sampling. Without ``db`` a local cluster is started, which the buffers of this process share."""

    _sampler: Sampler = Uniform()

    def __init__(
        self,
        size: int,
        env_dict: Mapping[str, Mapping[str, Any]],
        *,
        db: Database | str | None = None,
        name: str | None = None,
        default_dtype: Any = np.float32,
    ) -> None:
        fields = {}
        for field, form in env_dict.items():
            unknown = set(form) - {"shape", "dtype"}
            if unknown:
                raise invalid(f"env_dict of {field} has {sorted(unknown)}; allowed: shape, dtype")
            fields[field] = (np.dtype(form.get("dtype") or default_dtype), tuple(np.atleast_1d(form.get("shape", 1)).tolist()))
        self._fields, self._size = fields, size
        self._db = database_of(db)
        self._name = name or f"cpprb-{os.getpid()}-{next(_names)}"
        self._buffer = self._create()

    def _create(self) -> _Buffer:
        return _Buffer(self._db, self._name, capacity=self._size, sampler=self._sampler, fields=self._fields)

    def add(self, *, priorities: object = None, **columns: object) -> U64:
        """Adds one item or several; returns their handles."""
        absent = set(self._fields) - set(columns)
        if absent:
            raise invalid(f"no values of {sorted(absent)}; required: {', '.join(self._fields)}")
        data = {}
        for name, value in columns.items():
            if name not in self._fields:
                raise invalid(f"unknown field {name}; allowed: {', '.join(self._fields)}")
            dtype, shape = self._fields[name]
            data[name] = np.asarray(value, dtype).reshape(-1, *shape)
        return self._buffer.extend(data, None if priorities is None else np.atleast_1d(np.asarray(priorities, np.float64)))

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draws items, with replacement."""
        return self._columns(self._buffer.sample(batch_size))

    def get_all_transitions(self) -> dict[str, Any]:
        """Returns all items, oldest first."""
        return self._columns(self._buffer.get(self._buffer.list(limit=self._size)))

    def get_stored_size(self) -> int:
        """Returns the number of items."""
        return len(self._buffer)

    def get_buffer_size(self) -> int:
        """Returns the capacity."""
        return self._size

    def clear(self) -> None:
        """Deletes all items."""
        self._buffer.drop()
        self._buffer = self._create()

    def on_episode_end(self) -> None:
        """Does nothing: there are no caches to flush."""

    def save_transitions(self, file: str | os.PathLike[str]) -> None:
        """Writes all items to a file."""
        self._buffer.save(file, progress=False)

    def load_transitions(self, file: str | os.PathLike[str]) -> None:
        """Adds the items of a file of :meth:`save_transitions`."""
        self._buffer.load(file)

    def _columns(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: batch[name] for name in self._fields}


class PrioritizedReplayBuffer(ReplayBuffer):
    """As ``cpprb.PrioritizedReplayBuffer``: sampling in proportion to ``priority ** alpha``."""

    def __init__(self, size: int, env_dict: Mapping[str, Mapping[str, Any]], *, alpha: float = 0.6, **options: Any) -> None:
        self._sampler = Prioritized(alpha=alpha)
        super().__init__(size, env_dict, **options)

    def sample(self, batch_size: int, beta: float = 0.4) -> dict[str, Any]:
        """Draws items; ``weights`` and ``indexes`` are added to the fields."""
        batch = self._buffer.sample(batch_size, beta=beta)
        return {**self._columns(batch), "weights": batch["weight"], "indexes": batch["index"]}

    def update_priorities(self, indexes: Any, priorities: Any) -> None:
        """Sets priorities; those of overwritten items are left out."""
        self._buffer.update_priority(indexes, priorities)
