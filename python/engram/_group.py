"""Elastic data-parallel training of PyTorch models: ``engram.torch.Group``."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from . import _engram, _training_state
from ._database import Database, connect
from ._errors import create, invalid

#: Steps between two comparisons of the whole state of all members.
_DIGEST_STEPS = 50


class Group:
    """Processes that train one model together, any of which may fail or join at any time.

    Each process computes the gradient of its own samples; the group sums the gradients over TCP while the backward pass runs, and every
    process takes the same step. A process that dies costs no step: the others reduce the gradients that they kept again, without it. A process that
    joins, or was stopped for too long, receives parameters and optimizer state from the others. The membership is a replicated record of
    the cluster at ``address``, for which ``tls`` and ``token`` are those of :func:`engram.connect`; gradients never pass the cluster. In a cluster
    with TLS they are encrypted between the processes, too.

        with Group("grpc://worker-0:7443", "demo") as group:
            model = group.wrap(model, optimizer)
            while group.steps < 1000:
                inputs, targets = batch(group.steps, group.rank, group.size)
                loss(model(inputs), targets).backward()           # a sum over samples, not a mean
                group.step(samples=len(inputs))

    ``timeout`` is the time in seconds after which a silent member is removed; all limits of the protocol are multiples of it. It and
    ``min_members``, below which the group pauses, are the same on all members. ``join_timeout`` is the longest wait of the caller: to become a member,
    or for the end of a step, while another member computes or the group is paused.
    """

    def __init__(
        self,
        address: Any,
        name: str,
        *,
        timeout: float = 0.5,
        min_members: int = 1,
        join_timeout: float = 60.0,
        bind: str | None = None,
        bucket_mb: float = 1.0,
        tls: Mapping[str, str | os.PathLike[str]] | None = None,
        token: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= 128:
            raise invalid(f"name is {name!r}; allowed: 1 to 128 characters")
        if not 0.01 <= timeout <= 60.0:
            raise invalid(f"timeout is {timeout}; allowed: 0.01 to 60 seconds")
        if not 1 <= min_members <= 1024:
            raise invalid(f"min_members is {min_members}; allowed: 1 to 1024")
        if not bucket_mb > 0:
            raise invalid(f"bucket_mb is {bucket_mb}; allowed: megabytes, above 0")
        self.name, self.timeout, self.min_members, self.join_timeout = name, timeout, min_members, join_timeout
        #: Samples of the next backward pass, by which the summed gradient is divided; 1 again after each step.
        self.samples = 1
        self._bind, self._bucket_bytes = bind, max(4, int(bucket_mb * 2**20))
        self._owns_database = not isinstance(address, Database)
        if not self._owns_database and (tls is not None or token is not None):
            raise invalid("tls and token are for an address; a Database has them from connect()")
        self._database = connect(address, tls=tls, token=token) if self._owns_database else address
        self._native: _engram.Group | None = None
        self._reducer: _Hooks | _Ddp | None = None
        self._lock = threading.Lock()
        self._applied = 0
        self._last = (0, 0, 0, 0)
        me = weakref.ref(self)

        def at_exit() -> None:
            group = me()
            if group is not None:
                group.close()

        self._at_exit = at_exit
        atexit.register(at_exit)

    # Life cycle

    def wrap(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        *,
        ddp: bool = False,
        step: int = 0,
    ) -> torch.nn.Module:
        """Joins the group with a model, and returns the model to train: when it returns, its state is that of the group.

        Gradients are collected by hooks of the parameters. With ``ddp`` the result is a ``DistributedDataParallel`` over a process group of this
        process alone, whose communication hook does it. ``step`` is that of a state which was loaded from a checkpoint: of processes
        that start a group, the newest step is kept.
        """
        if self._native is not None:
            raise create("Conflict", "this group has a model; one group trains one model")
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        parameters = _trainable(inner)
        owned = {id(parameter) for part in optimizer.param_groups for parameter in part["params"]}
        foreign = [name for name, parameter in parameters if id(parameter) not in owned]
        if foreign:
            raise invalid(f"optimizer does not have parameter {foreign[0]}; required: all parameters that need a gradient")
        self.model, self.optimizer, self.scheduler = inner, optimizer, scheduler
        reducer = _Ddp if ddp or isinstance(model, DistributedDataParallel) else _Hooks
        kind = "ddp" if reducer is _Ddp else "hooks"
        text = "\n".join([kind, str(self._bucket_bytes), *(f"{name} {tuple(it.shape)}" for name, it in parameters)])
        self._applied = step
        me = weakref.ref(self)
        self._native = _engram.Group(
            self._database._native,
            self.name,
            lambda: None if (group := me()) is None else group._provide(),
            layout=_hash(text, 8),
            digest=int(self.digest()[:16], 16),
            step=step,
            timeout=self.timeout,
            wait_limit=self.join_timeout,
            min_members=self.min_members,
            address=self._bind,
        )
        self._wait_member()
        self._reducer = reducer(self, self._native, parameters, self._bucket_bytes)
        return self._reducer.start(inner)

    def close(self) -> None:
        """Leaves the group after the open step, so that the others need not find out."""
        atexit.unregister(self._at_exit)
        native, self._native = self._native, None
        if native is not None:
            native.leave(max(2.0, 8 * self.timeout))
        if self._reducer is not None:
            self._reducer.stop()
        if self._owns_database:
            self._database.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Training

    def step(self, samples: int | None = None, *, clip_norm: float | None = None) -> bool:
        """Ends a step after ``backward()``: waits for the gradient of the group, applies it and clears the gradients.

        ``samples`` is the number of samples of this process, if ``group.samples`` was not set before the backward pass. The gradient is the sum
        over all members, divided by the samples of all: exact for any sizes. Without a number each member counts once, so that a mean loss
        gives the mean over members. Returns whether the optimizer took a step: not if a gradient is not finite, which all members see, or if
        the group went on without this process, whose state is then that of the group.
        """
        native, reducer = self._started()
        if samples is not None:
            if samples < 0:
                raise invalid(f"samples is {samples}; allowed: 0 and above")
            if reducer.is_sent and samples != self.samples:
                raise invalid(f"samples is {samples}, but {self.samples} were sent; set group.samples before backward() with ddp")
            self.samples = samples
        if not reducer.is_sent:
            reducer.finish(self.samples, self._state_digest())
        outcome, step, generation, size, total = native.wait_step()
        self.samples = 1
        if outcome == "superseded":
            reducer.discard()
            self._wait_member()
            reducer.begin()
            return False
        with self._lock:
            if outcome == "applied":
                reducer.assign()
                if clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
                self.optimizer.step()
                if self.scheduler is not None:
                    self.scheduler.step()
            self._applied = step
            self._last = (step, generation, size, total)
        reducer.begin()
        return outcome == "applied"

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes within it are added up by this process, and sent with the next one after it."""
        _, reducer = self._started()
        with reducer.accumulate():
            yield

    # Figures

    @property
    def generation(self) -> int:
        """Number of the membership; 0 outside of the group."""
        return self._view()[0]

    @property
    def rank(self) -> int:
        """Place of this process among the members: 0 up to ``size``. It may change with the generation."""
        return self._view()[1]

    @property
    def size(self) -> int:
        """Number of members."""
        return self._view()[2]

    @property
    def steps(self) -> int:
        """Steps that the state of this process contains, skipped ones included."""
        return self._applied

    @property
    def last_step(self) -> dict[str, int]:
        """Step, generation, members and samples of the last step: of those that took part in it."""
        return dict(zip(("step", "generation", "members", "samples"), self._last, strict=True))

    @property
    def statistics(self) -> dict[str, float]:
        """Figures of this process since it joined.

        ``overlap`` is the part of the time in reductions that lies before the end of the backward pass. ``last_recovery_seconds`` and
        ``max_recovery_seconds`` measure from the first failed message to the next finished step. ``link_latency_seconds`` and
        ``link_bytes_per_second`` are those of the slowest link between members, measured when the membership changes.
        """
        figures: dict[str, float] = self._started()[0].statistics()
        reduced = figures["reduce_seconds"]
        figures["overlap"] = figures["hidden_seconds"] / reduced if reduced else 0.0
        return figures

    def digest(self) -> str:
        """Digest of parameters and optimizer state, 32 hexadecimal digits: the same on all members after the same step."""
        return _training_state.digest(self.model, self.optimizer)

    # Internals

    def _started(self) -> tuple[_engram.Group, _Hooks | _Ddp]:
        if self._native is None or self._reducer is None:
            raise create("Conflict", "this group has no model, or was closed; required: wrap() before it")
        return self._native, self._reducer

    def _state_digest(self) -> int:
        """Returns a digest of the state if all members compare theirs in the open step, or else 0."""
        return int(self.digest()[:16], 16) if (self._applied + 1) % _DIGEST_STEPS == 0 else 0

    def _view(self) -> tuple[int, int, int, int, bool]:
        return (0, 0, 0, 0, False) if self._native is None else self._native.view()

    def _provide(self) -> tuple[int, bytes] | None:
        """Copies the state for another process; on a thread of the native module."""
        with self._lock:
            return self._applied, _training_state.encode(self.model, self.optimizer, self.scheduler)

    def _wait_member(self) -> None:
        """Waits until this process is a member, and installs the state of the group if it has another one."""
        native = self._native
        assert native is not None
        end = time.monotonic() + self.join_timeout
        while True:
            kind, step, digest, content = native.wait_ready(0.1)
            if kind == "ready":
                return
            if kind == "install":
                with self._lock:
                    _training_state.install(content, self.model, self.optimizer, self.scheduler)
                    self._applied = step
                native.installed(step, digest)
                end = time.monotonic() + self.join_timeout
            elif time.monotonic() > end:
                raise create("Timeout", f"not a member of group {self.name} within join_timeout={self.join_timeout} s: {content}", "ENG-0601")


def _hash(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "little")


def _trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Returns the parameters with a gradient, in the order of their registration."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not parameters:
        raise invalid("model has no parameter that needs a gradient")
    for name, parameter in parameters:
        if type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            raise invalid(f"parameter {name} is a {kind}: FSDP and other sharded parameters are not supported; allowed: whole tensors")
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32 or parameter.layout != torch.strided:
            kind = f"{parameter.dtype} on {parameter.device}".removeprefix("torch.")
            raise invalid(f"parameter {name} is {kind}: not supported; allowed: dense float32 on cpu")
    return parameters


class _Bucket:
    """Some parameters, with their sums and their reduced gradient as one tensor each."""

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self.parameters = [parameter for _, parameter in parameters]
        self.key = _hash("\n".join(name for name, _ in parameters), 4)
        elements = sum(parameter.numel() for parameter in self.parameters)
        self.sums, self.reduced = torch.zeros(elements), torch.empty(elements)
        self.missing = 0

    def views(self, flat: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        at = 0
        for parameter in self.parameters:
            yield parameter, flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()

    def submit(self, native: _engram.Group) -> None:
        tensors = (self.sums, self.reduced)
        native.submit(self.key, self.sums.data_ptr(), self.reduced.data_ptr(), self.sums.numel(), tensors)


class _Hooks:
    """Collects gradients by hooks of the parameters. Buckets are cut once, in reverse order of registration: the same on all members."""

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
                parameter.grad = self.where[id(parameter)][1]

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
        if gradient is not None and gradient.data_ptr() != view.data_ptr():  # it was set to None before
            view.copy_(gradient)
            parameter.grad = view
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
                parameter.grad = view


class _Ddp:
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
        key = _hash("\n".join(self.names[id(parameter)] for parameter in parameters), 4)
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
