"""PyTorch: batches as tensors, data sets, and elastic data-parallel training. Needs the extra ``engram[torch]``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ._batch import Batch
from ._database import one_of
from ._group import Group as Group
from ._process_group import ElasticProcessGroup as ElasticProcessGroup
from ._replay import ReplayBuffer as _ReplayBuffer
from ._stream import Part


class ReplayBuffer(_ReplayBuffer):
    """A :class:`engram.ReplayBuffer` whose batches hold tensors; with ``pin_memory`` in page-locked memory."""

    def __init__(self, *args: Any, as_: str = "torch", **options: Any) -> None:
        super().__init__(*args, as_=one_of("as_", as_, ("numpy", "torch", "tensordict")), **options)  # type: ignore[arg-type]


class BufferDataset(torch.utils.data.IterableDataset[Batch]):
    """Batches of a replay buffer. Each worker process of a ``DataLoader`` draws its part."""

    def __init__(self, buffer: _ReplayBuffer, fields: Sequence[str] | None, batches: int | None) -> None:
        self.buffer, self.fields, self.batches = buffer, fields, batches

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        part: Part = {} if worker is None else {"rank": worker.id, "world_size": worker.num_workers}
        count = 0
        while self.batches is None or count < self.batches:
            yield self.buffer.sample(fields=self.fields, **part)
            count += 1


def to_tensors(batch: Batch, kind: str, pin_memory: bool) -> Any:
    """Returns a batch of tensors that share the memory of its arrays, or a TensorDict of them."""
    tensors = {name: _tensor(value, pin_memory) for name, value in batch.items()}
    if kind == "tensordict":
        from tensordict import TensorDict

        return TensorDict(tensors, batch_size=[len(batch["index"])])
    result = Batch(tensors)
    result.__dict__.update(batch.__dict__)
    return result


def _tensor(value: Any, pin_memory: bool) -> Any:
    if isinstance(value, list):
        return [_tensor(row, pin_memory) for row in value]
    array = np.ascontiguousarray(value)
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.pin_memory() if pin_memory else tensor
