"""Elastic data-parallel training of PyTorch models: ``engram.torch.Group``."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from . import _engram, _sharded
from ._database import Database, connect
from ._errors import create, invalid
from ._reducers import Ddp, Hooks, hash_text, trainable
from ._training_state import TrainingState

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
        self._reducer: Hooks | Ddp | None = None
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

        Gradients are collected by hooks of the parameters, also for a model of FSDP2 (``fully_shard``) over a mesh of this process alone. With
        ``ddp`` the result is a ``DistributedDataParallel`` over a process group of this process alone, whose communication hook collects them.
        ``step`` is that of a state which was loaded from a checkpoint: of processes
        that start a group, the newest step is kept.
        """
        if self._native is not None:
            raise create("Conflict", "this group has a model; one group trains one model")
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        _sharded.reshard(inner)
        parameters = trainable(inner)
        owned = {id(parameter) for part in optimizer.param_groups for parameter in part["params"]}
        foreign = [name for name, parameter in parameters if id(parameter) not in owned]
        if foreign:
            raise invalid(f"optimizer does not have parameter {foreign[0]}; required: all parameters that need a gradient")
        state = TrainingState(inner, optimizer, scheduler)
        reducer = Ddp if ddp or isinstance(model, DistributedDataParallel) else Hooks
        if state.is_fsdp and reducer is Ddp:
            raise invalid("ddp is True, but the model is one of FSDP2 (fully_shard); allowed: ddp=False")
        self.model, self.optimizer, self.scheduler, self._state = inner, optimizer, scheduler, state
        self._parameters = [parameter for _, parameter in parameters]
        kind = "ddp" if reducer is Ddp else "fsdp" if state.is_fsdp else "hooks"
        text = "\n".join([kind, str(self._bucket_bytes), *(f"{name} {tuple(it.shape)}" for name, it in parameters)])
        self._applied = step
        me = weakref.ref(self)
        self._native = _engram.Group(
            self._database._native,
            self.name,
            lambda: None if (group := me()) is None else group._provide(),
            layout=hash_text(text, 8),
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
                    torch.nn.utils.clip_grad_norm_(self._parameters, clip_norm)
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
        return self._state.digest()

    # Internals

    def _started(self) -> tuple[_engram.Group, Hooks | Ddp]:
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
            return self._applied, self._state.encode()

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
                    self._state.install(content)
                    self._applied = step
                native.installed(step, digest)
                end = time.monotonic() + self.join_timeout
            elif time.monotonic() > end:
                raise create("Timeout", f"not a member of group {self.name} within join_timeout={self.join_timeout} s: {content}", "ENG-0601")
