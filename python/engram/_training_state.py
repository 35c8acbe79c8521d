"""The state of a training as bytes: parameters, buffers, optimizer and scheduler. Without pickle: reading it executes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from . import _sharded
from ._errors import create, invalid

_MAGIC = b"engrtst1"
_PLAIN = (type(None), bool, int, float, str)


def _flatten(value: Any, tensors: list[torch.Tensor], where: str) -> Any:
    """Replaces tensors by their number, and marks containers that JSON does not have."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        if _sharded.is_distributed(value):
            return {"sharded": [len(tensors) - 1, _sharded.dimension(value)]}
        return {"tensor": len(tensors) - 1}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        pairs = [[_flatten(key, tensors, where), _flatten(item, tensors, where)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(item, tensors, where) for item in value]}
    raise invalid(f"{where} has a value of type {type(value).__name__}; allowed: tensors, numbers, texts, lists, tuples and dicts")


def _restore(value: Any, tensors: list[torch.Tensor], reference: torch.Tensor | None) -> Any:
    """Reverts :func:`_flatten`. Sharded tensors are on the mesh of `reference`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "sharded":
        assert reference is not None, "members with another kind of model are refused before"
        number, dimension = content
        return _sharded.along(reference, tensors[number], dimension)
    if kind == "dict":
        return {_restore(key, tensors, reference): _restore(item, tensors, reference) for key, item in content}
    items = [_restore(item, tensors, reference) for item in content]
    return items if kind == "list" else tuple(items)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = _sharded.local(tensor).detach().cpu().contiguous().reshape(-1)
    # Before Python 3.12 the types do not say that an array is a buffer.
    data: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(data)


class TrainingState:
    """Model, optimizer and scheduler of a member.

    A model of FSDP2 has its sharded tensors in its modules between the passes only, so that they are noted here once: the state is copied
    by another thread at any time.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.is_fsdp = _sharded.is_fsdp(model)
        self._parameters = list(model.parameters())
        self._noted = dict(model.state_dict(keep_vars=True)) if self.is_fsdp else None

    def _parts(self) -> Iterator[tuple[str, Any]]:
        yield "model", dict(self.model.state_dict()) if self._noted is None else self._noted
        yield "optimizer", self.optimizer.state_dict()
        if self.scheduler is not None:
            yield "scheduler", {key: value for key, value in self.scheduler.state_dict().items() if not callable(value)}

    def encode(self) -> bytes:
        """Copies the state: a header of JSON, then the content of the tensors."""
        return _encode(self._parts())

    def install(self, content: bytes) -> None:
        """Replaces the state by that of another member."""
        reference = next((tensor for tensor in self._parameters if _sharded.is_distributed(tensor)), None)
        state = _decode(content, reference)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])

    def digest(self) -> str:
        """Returns a digest of parameters and optimizer state as 32 hexadecimal digits. Buffers of a model, which differ per process, are left out."""
        hash_ = hashlib.blake2b(digest_size=16)
        for parameter in self._parameters:
            hash_.update(_bytes_of(parameter))
        tensors: list[torch.Tensor] = []
        hash_.update(json.dumps(_flatten(self.optimizer.state_dict(), tensors, "optimizer")).encode())
        for tensor in tensors:
            hash_.update(_bytes_of(tensor))
        return hash_.hexdigest()


def _encode(parts: Iterator[tuple[str, Any]]) -> bytes:
    tensors: list[torch.Tensor] = []
    content = {name: _flatten(value, tensors, name) for name, value in parts}
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    header = json.dumps({"content": content, "tensors": kinds}).encode()
    return b"".join([_MAGIC, len(header).to_bytes(8, "little"), header, *map(_bytes_of, tensors)])


def _decode(content: bytes, reference: torch.Tensor | None) -> dict[str, Any]:
    if content[:8] != _MAGIC:
        raise create("VersionMismatch", "the state of the other member has another format; required: the same version of engram")
    length = int.from_bytes(content[8:16], "little")
    header = json.loads(content[16 : 16 + length])
    tensors, at = [], 16 + length
    for kind, shape in header["tensors"]:
        dtype = getattr(torch, kind)
        count = 1
        for size in shape:
            count *= size
        if count:
            tensor = torch.frombuffer(bytearray(content[at : at + count * dtype.itemsize]), dtype=dtype).reshape(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        at += count * dtype.itemsize
        tensors.append(tensor)
    return {name: _restore(value, tensors, reference) for name, value in header["content"].items()}
