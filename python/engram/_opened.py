"""The native buffer behind a replay buffer: opened or created at its first use, and again in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import _engram
from ._aio import Steps
from ._arrays import Timeout, seconds
from ._batch import Batch
from ._columns import OPAQUE, Field, Schema, decode, infer, name_of
from ._database import Database
from ._deadline import Deadline, Waiting
from ._errors import NotFoundError, create, invalid

#: Interval of checks whether another process has created the buffer: a cluster does not notify of new buffers.
POLL_SECONDS = 0.05


class OpenedBuffer:
    """Connection to a buffer that may not exist yet."""

    def __init__(
        self,
        db: Database,
        name: str,
        settings: Mapping[str, Any],
        as_: Literal["numpy", "torch", "tensordict"],
        pin_memory: bool,
        timeout: Timeout,
    ) -> None:
        self.db, self.name, self.as_, self.pin_memory = db, name, as_, pin_memory
        self._settings = settings
        self._timeout = seconds(timeout)
        self._buffer: _engram.Buffer | None = None
        self._schema: Schema | None = None
        self._lock = threading.Lock()
        self._process = os.getpid()
        if pin_memory:
            _check_pinned(as_)

    def _forked(self) -> None:
        """In a forked child: the lock may have been held."""
        self._process, self._lock = os.getpid(), threading.Lock()

    def _limit(self, timeout: Timeout) -> float | None:
        return self._timeout if timeout is None else seconds(timeout)

    def _current(self) -> _engram.Buffer | None:
        if self._process != os.getpid():
            self._forked()
        buffer = self._buffer
        return buffer if buffer is not None and buffer.is_own else None

    def _deadline(self, timeout: Timeout) -> Deadline:
        """Returns the deadline of a call."""
        return Deadline(self._limit(timeout))

    def _waiting(self, limit: float | None) -> Waiting:
        """Returns the deadline of a call that waits on the cluster; by default the connection's."""
        return Waiting(self.db._native.timeout if limit is None else limit)

    def _existing(self, deadline: Deadline) -> Steps[_engram.Buffer]:
        native = self._current()
        if native is None:
            left = deadline.left(f"the buffer {self.name!r} is not open")
            native = self._use((yield _engram.open_buffer(self.db._native, self.name, timeout=left)))
        return native

    def _open(self, columns: Mapping[str, Any], deadline: Deadline) -> Steps[_engram.Buffer]:
        native = self._current()
        if native is not None:
            return native
        if self._schema is None:
            try:
                return (yield from self._existing(deadline))
            except NotFoundError:
                return (yield from self._declare(infer(columns), deadline))
        return (yield from self._declare(self._schema, deadline))

    def _declare(self, schema: Schema, deadline: Deadline) -> Steps[_engram.Buffer]:
        # Concurrent calls create the same buffer: that is one call's creation, and the others' opening.
        parts = [field.parts() for field in schema]
        left = deadline.left(f"the buffer {self.name!r} is not created")
        return self._use((yield _engram.create_buffer(self.db._native, self.name, parts, timeout=left, **self._settings)))

    def _use(self, native: _engram.Buffer) -> _engram.Buffer:
        self._schema = [Field(name, dtype, tuple(shape), jagged) for name, dtype, shape, jagged in native.fields()]
        self._buffer = native
        return native

    def _fields(self) -> Schema:
        assert self._schema is not None, "is known once the buffer is open"
        return self._schema

    def _wait_for_buffer(self, deadline: Waiting) -> Steps[_engram.Buffer]:
        while True:
            try:
                return (yield from self._existing(deadline))
            except NotFoundError:
                deadline.remaining(f"no process has created the buffer {self.name!r}", POLL_SECONDS)
            yield POLL_SECONDS

    def _numpy(self, columns: dict[str, Any]) -> Batch:
        batch = Batch(decode(columns["columns"]))
        batch["index"] = columns["handles"]
        weights = columns["weights"]
        batch["weight"] = weights if len(weights) else np.ones(len(columns["handles"]), np.float32)
        batch["version"] = columns["versions"]
        batch.priorities, batch.trajectories, batch.missing = columns["priorities"], columns["trajectories"], columns["missing"]
        batch.scale = columns["scale"]
        batch.tags = [tag.decode(errors="replace") for tag in columns["tags"]]
        return batch

    def _batch(self, columns: dict[str, Any]) -> Batch:
        batch = self._numpy(columns)
        if self.as_ == "numpy":
            return batch
        import torch

        from .torch import to_tensors

        # PyTorch takes no opaque elements: their bits are viewed as its own type.
        opaque = [name for name, value in batch.items() if _is_opaque(value)]
        for name in opaque:
            batch[name] = _viewed(batch[name], np.uint16)
        # A TensorDict is used like the dict that a batch is.
        tensors: Batch = to_tensors(batch, self.as_, self.pin_memory)
        for name in opaque:
            tensors[name] = _viewed(tensors[name], torch.bfloat16)
        return tensors


def _is_opaque(value: Any) -> bool:
    return bool(value) and value[0].dtype == OPAQUE if isinstance(value, list) else value.dtype == OPAQUE


def _viewed(value: Any, dtype: Any) -> Any:
    return [row.view(dtype) for row in value] if isinstance(value, list) else value.view(dtype)


def declared(name: str, dtype: npt.DTypeLike, shape: Sequence[int | None]) -> Field:
    """Returns a field; ``None`` as first dimension makes it jagged."""
    jagged = bool(shape) and shape[0] is None
    fixed = tuple(int(size) for size in (shape[1:] if jagged else shape) if size is not None)
    return Field(name, dtype if isinstance(dtype, str) and dtype == "bfloat16" else name_of(np.dtype(dtype)), fixed, jagged)


def _check_pinned(as_: str) -> None:
    """Refuses page-locked memory where there is none."""
    if as_ == "numpy":
        raise invalid("pin_memory is True with as_='numpy'; allowed: with as_='torch' or 'tensordict'")
    import torch

    if not torch.cuda.is_available():
        raise create("Gpu", "pin_memory is True, and PyTorch has no CUDA device; allowed: pin_memory=False", "ENG-0201")
