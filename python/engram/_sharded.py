"""Distributed tensors of FSDP2 whose mesh is one process: their local shard is the whole tensor."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ._errors import invalid


def _kind(module: str, name: str) -> tuple[type, ...]:
    """Returns a class of PyTorch if its module is loaded; otherwise no object of it exists."""
    loaded = sys.modules.get(module)
    found = getattr(loaded, name, None)
    return () if found is None else (found,)


def is_distributed(tensor: object) -> bool:
    return isinstance(tensor, _kind("torch.distributed.tensor", "DTensor"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the shard of this process, in the memory of the tensor; a tensor that is not distributed as it is."""
    if not is_distributed(tensor):
        return tensor
    distributed: Any = tensor
    with torch.no_grad():
        shard: torch.Tensor = distributed.to_local()
    return shard


def like(reference: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Returns `shard` as a tensor that is distributed as `reference` is."""
    if not is_distributed(reference):
        return shard
    distributed: Any = reference
    return _distribute(shard, distributed.device_mesh, distributed.placements)


def dimension(tensor: Any) -> int | None:
    """Returns the dimension that a distributed tensor is sharded along."""
    return getattr(tensor.placements[0], "dim", None)


def along(reference: Any, shard: torch.Tensor, dimension: int | None) -> torch.Tensor:
    """Returns `shard` as a tensor on the mesh of `reference` that is sharded along a dimension."""
    from torch.distributed.tensor import Replicate, Shard

    return _distribute(shard, reference.device_mesh, [Replicate() if dimension is None else Shard(dimension)])


def _distribute(shard: torch.Tensor, mesh: Any, placements: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(shard, mesh, placements, run_check=False)


def reshard(model: torch.nn.Module) -> None:
    """Sets the sharded parameters of a model of FSDP2, which has whole ones after a forward pass."""
    for module in model.modules():
        if isinstance(module, _kind("torch.distributed.fsdp", "FSDPModule")):
            managed: Any = module
            managed.reshard()


def is_fsdp(model: torch.nn.Module) -> bool:
    """Returns whether a model is one of FSDP2.

    Raises an error if it is sharded in another way, or over several processes.
    """
    flat = _kind("torch.distributed.fsdp", "FullyShardedDataParallel")
    modules = list(model.modules())
    if any(isinstance(module, flat) for module in modules):
        raise invalid("model is a FullyShardedDataParallel (FSDP1): not supported; allowed: fully_shard (FSDP2) over a mesh of one process")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    distributed: list[tuple[str, Any]] = [(name, tensor) for name, tensor in tensors if is_distributed(tensor)]
    if not distributed:
        return False
    managed = _kind("torch.distributed.fsdp", "FSDPModule")
    if not any(isinstance(module, managed) for module in modules):
        raise invalid(f"{distributed[0][0]} is a DTensor, but no module is one of fully_shard: not supported; allowed: FSDP2 or whole tensors")
    for name, tensor in distributed:
        if tensor.device_mesh.size() != 1:
            count = tensor.device_mesh.size()
            raise invalid(
                f"{name} is sharded over {count} processes: not supported, since one of them may fail alone; "
                "allowed: fully_shard over a mesh of one process in each member of the group"
            )
    return True
