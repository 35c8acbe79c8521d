"""Collect the gradients of a model and hand them to its group: by hooks of the parameters, or by the communication hook of DDP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _engram, _sharded
from ._errors import create, invalid

if TYPE_CHECKING:
    from ._group import Group


def hash_text(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters with a gradient, in the order of their registration."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not parameters:
        raise invalid("model has no parameter that needs a gradient")
    for name, parameter in parameters:
        shard = _sharded.local(parameter.data)
        if type(shard) is not torch.Tensor:
            raise invalid(f"parameter {name} is a {type(shard).__name__}: not supported; allowed: whole tensors, or FSDP2 over a mesh of one process")
        if shard.device.type != "cpu" or shard.dtype != torch.float32 or shard.layout != torch.strided:
            kind = f"{shard.dtype} on {shard.device}".removeprefix("torch.")
            raise invalid(f"parameter {name} is {kind}: not supported; allowed: dense float32 on cpu")
    return parameters


class _Bucket:
    """Some parameters, with their sums and their reduced gradient as one tensor each."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.parameters = [parameter for _, parameter in parameters]
        self.key = hash_text("\n".join(name for name, _ in parameters), 4)
        elements = sum(parameter.numel() for parameter in self.parameters)
        self.sums, self.reduced = torch.zeros(elements), torch.empty(elements)
        self.missing = 0

    def views(self, flat: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        at = 0
        for parameter in self.parameters:
            yield parameter, flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def submit(self, native: _engram.Group) -> None:
        tensors = (self.sums, self.reduced)
        native.submit(self.key, self.sums.data_ptr(), self.reduced.data_ptr(), self.sums.numel(), tensors)


class Hooks:
    """Collects gradients by hooks of the parameters. Buckets are cut once, in reverse order of registration: the same on all members.

    FSDP2 calls the hooks with its sharded parameters, whose gradients are then distributed tensors in the memory of the sums.
    """

    def __init__(
        self, group: Group, native: _engram.Group, parameters: list[tuple[str, torch.nn.Parameter]], bucket_bytes: int
    ) -> None:
        self.group, self.native = group, native
        self.buckets: list[_Bucket] = []
        part: list[tuple[str, torch.nn.Parameter]] = []
        for name, parameter in reversed(parameters):
            part.append((name, parameter))
            if sum(4 * it.numel() for _, it in part) >= bucket_bytes:
                self.buckets.append(_Bucket(part))
                part = []
        if part:
            self.buckets.append(_Bucket(part))
        self.where = {id(it): (bucket, view) for bucket in self.buckets for it, view in bucket.views(bucket.sums)}
        # PyTorch declares no types for the registration.
        tensors: list[Any] = [it for _, it in parameters]
        self.handles = [it.register_post_accumulate_grad_hook(self.ready) for it in tensors]
        self.is_accumulating = False
        self.begin()

    #: Samples are sent with :meth:`finish`.
    is_sent = False

    def start(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def stop(self) -> None:
        for handle in self.handles:
            handle.remove()

    def begin(self) -> None:
        """Clears the gradients, which are views of the sums."""
        self.next = 0
        for bucket in self.buckets:
            bucket.sums.zero_()
            bucket.missing = len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.grad = _sharded.like(parameter, self.where[id(parameter)][1])

    def discard(self) -> None:
        pass

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.is_accumulating = True
        try:
            yield
        finally:
            self.is_accumulating = False

    def ready(self, parameter: torch.nn.Parameter) -> None:
        bucket, view = self.where[id(parameter)]
        gradient = parameter.grad
        # Another tensor if it was set to None before.
        if gradient is not None and (shard := _sharded.local(gradient)).data_ptr() != view.data_ptr():
            view.copy_(shard)
            parameter.grad = _sharded.like(parameter, view)
        if self.is_accumulating:
            return
        bucket.missing -= 1
        if bucket.missing < 0:
            raise create("Conflict", "backward() twice in one step; use group.no_sync() for all but the last")
        while self.next < len(self.buckets) and self.buckets[self.next].missing == 0:
            self.submit()

    def submit(self) -> None:
        bucket = self.buckets[self.next]
        self.next += 1
        bucket.submit(self.native)

    def finish(self, samples: int, state_digest: int) -> None:
        """Ends the step: parameters that nothing used have a gradient of zero."""
        while self.next < len(self.buckets):
            self.submit()
        self.native.finish(samples, state_digest, [])

    def assign(self) -> None:
        for bucket in self.buckets:
            for parameter, view in bucket.views(bucket.reduced):
                parameter.grad = _sharded.like(parameter, view)


class Ddp:
    """Collects gradients by the communication hook of ``DistributedDataParallel`` over a process group of this process alone.

    Futures of all buckets are completed together at the end of the step: if they were completed one by one, a failure between two buckets would give
    a gradient of two memberships. ``find_unused_parameters`` keeps the buckets as they are, so that joiners have the same ones.
    """

    def __init__(
        self, group: Group, native: _engram.Group, parameters: list[tuple[str, torch.nn.Parameter]], bucket_bytes: int
    ) -> None:
        self.group, self.native, self.bucket_bytes = group, native, bucket_bytes
        self.names = {id(parameter): name for name, parameter in parameters}
        self.reduced: dict[int, tuple[torch.Tensor, list[torch.nn.Parameter]]] = {}
        self.futures: list[tuple[Any, torch.Tensor]] = []
        self.is_sent = False

    def start(self, model: torch.nn.Module) -> torch.nn.Module:
        if not dist.is_initialized():
            # A public name that the types of PyTorch do not export.
            store: Any = getattr(dist, "HashStore")
            dist.init_process_group("gloo", store=store(), rank=0, world_size=1)
        if dist.get_world_size() != 1:
            raise invalid(f"the default process group has {dist.get_world_size()} processes; allowed with ddp: 1, the group does the rest")
        cap = self.bucket_bytes / 2**20
        wrapped = DistributedDataParallel(model, bucket_cap_mb=cap, find_unused_parameters=True)
        # It must not have annotations as texts, which PyTorch would compare with its types.
        wrapped.register_comm_hook(self, lambda state, bucket: state(bucket))
        self.wrapped = wrapped
        return wrapped

    def stop(self) -> None:
        pass

    def __call__(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        sums, parameters = bucket.buffer(), bucket.parameters()
        key = hash_text("\n".join(self.names[id(parameter)] for parameter in parameters), 4)
        if key not in self.reduced:
            self.reduced[key] = (torch.empty_like(sums), parameters)
        reduced = self.reduced[key][0]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        # The wait within DDP does not raise an exception that was set; its continuation does.
        answer = future.then(lambda done: done.value())
        self.native.submit(key, sums.data_ptr(), reduced.data_ptr(), sums.numel(), (sums, reduced))
        self.futures.append((future, reduced))
        if bucket.is_last():
            futures, self.futures = self.futures, []
            self.is_sent = True
            self.native.finish(self.group.samples, self.group._state_digest(), futures)
        return answer

    def begin(self) -> None:
        self.is_sent = False
        self.group.optimizer.zero_grad()

    def discard(self) -> None:
        self.futures = []

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        with self.wrapped.no_sync():
            yield

    def finish(self, samples: int, state_digest: int) -> None:
        raise create("Conflict", "step() before backward(); with ddp the backward pass sends the gradients")

    def assign(self) -> None:
        """Sets all gradients: DDP leaves out those of parameters that this process alone did not use."""
        for reduced, parameters in self.reduced.values():
            at = 0
            for parameter in parameters:
                view = reduced[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
                if parameter.grad is None:
                    parameter.grad = view.clone()
                else:
                    parameter.grad.copy_(view)
