"""Types of the native module."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

_Counts: TypeAlias = tuple[int, int, int, int, list[tuple[int, str]]]
_Figures: TypeAlias = list[tuple[int, int, int, int, int]]

class Runtime:
    def __init__(self) -> None: ...
    @property
    def process(self) -> int: ...

class Call:
    """A request: sent once, by ``wait`` or ``start``. Its result is what the comment at its function says."""

    def wait(self, traceparent: str | None = None) -> Any: ...
    def start(self, done: Callable[[Any, BaseException | None], None], traceparent: str | None = None) -> None: ...
    def cancel(self) -> None: ...

class Client:
    def __init__(
        self,
        runtime: Runtime,
        endpoints: Sequence[str],
        *,
        cluster: str | None = None,
        owner_key: str = "",
        ca: str | None = None,
        certificate: str | None = None,
        key: str | None = None,
        token_file: str | None = None,
        proxy: str | None = None,
        timeout: float = 30.0,
    ) -> None: ...
    @property
    def is_own(self) -> bool: ...
    @property
    def timeout(self) -> float: ...
    def upsert(self, ids: npt.NDArray[np.uint64], **columns: Any) -> Call: ...  # _Counts
    def remove(self, ids: npt.NDArray[np.uint64], *, timeout: float | None = None) -> Call: ...  # _Counts
    def reinforce(self, ids: npt.NDArray[np.uint64], **columns: Any) -> Call: ...  # _Counts
    def decay(self, amount: float, *, timeout: float | None = None) -> Call: ...  # _Counts
    def get(self, ids: npt.NDArray[np.uint64], **options: Any) -> Call: ...  # dict[str, Any]
    def rank(self, limit: int, *, group: int | None = None, timeout: float | None = None) -> Call: ...  # dict[str, Any]
    def recall(self, query: npt.NDArray[np.float32], **options: Any) -> Call: ...  # dict[str, Any]
    def quality(self, *, timeout: float | None = None) -> Call: ...  # _Figures
    def digest(self, *, timeout: float | None = None) -> Call: ...  # tuple[str, int]
    def reinforce_groups(self, groups: list[tuple[int, float]], *, timeout: float | None = None) -> Call: ...  # _Counts
    def map(self) -> Call: ...  # dict[str, Any]

def key_ids(keys: Sequence[str]) -> npt.NDArray[np.uint64]: ...
def parse_manifest(text: str, origin: str) -> str: ...

class Buffer:
    @property
    def is_own(self) -> bool: ...
    def fields(self) -> list[tuple[str, str, list[int], bool]]: ...
    def capacity(self) -> int: ...
    def refuses(self) -> bool: ...
    def initial_priority(self) -> float: ...
    def append(self, count: int, columns: Sequence[Any], **options: Any) -> Call: ...  # tuple[npt.NDArray[np.uint64], int]
    def sample(self, by: str, count: int, **options: Any) -> Call: ...  # dict[str, Any]
    def get(self, ids: npt.NDArray[np.uint64], **options: Any) -> Call: ...  # dict[str, Any]
    def list(self, **options: Any) -> Call: ...  # dict[str, Any]
    def update_priorities(
        self, ids: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64], *, timeout: float | None = None
    ) -> Call: ...  # tuple[int, int]
    def delete(self, ids: npt.NDArray[np.uint64], *, timeout: float | None = None) -> Call: ...  # tuple[int, int]
    def consume(self, consumer: str, count: int, **options: Any) -> Call: ...  # dict[str, Any]
    def acknowledge(
        self, consumer: str, ids: npt.NDArray[np.uint64], *, timeout: float | None = None
    ) -> Call: ...  # tuple[int, int]
    def stats(self, *, timeout: float | None = None) -> Call: ...  # dict[str, Any]

def create_buffer(
    client: Client, name: str, fields: Sequence[tuple[str, str, Sequence[int], bool]], **options: Any
) -> Call: ...  # Buffer
def open_buffer(client: Client, name: str, *, timeout: float | None = None) -> Call: ...  # Buffer
def list_buffers(client: Client, *, timeout: float | None = None) -> Call: ...  # list[tuple[str, int, int]]
def drop_buffer(client: Client, name: str, *, timeout: float | None = None) -> Call: ...  # int

class Group:
    def __init__(
        self,
        client: Client,
        name: str,
        provide: Callable[[], tuple[int, bytes] | None],
        *,
        layout: int,
        digest: int,
        step: int = 0,
        timeout: float = 0.5,
        wait_limit: float = 60.0,
        min_members: int = 1,
        address: str | None = None,
    ) -> None: ...
    def submit(self, key: int, sums: int, reduced: int, elements: int, tensors: Any) -> None: ...
    def finish(self, samples: int, state_digest: int, futures: Sequence[tuple[Any, Any]]) -> None: ...
    def wait_step(self) -> tuple[str, int, int, int, int]: ...
    def wait_ready(self, limit: float) -> tuple[str, int, int, Any]: ...
    def installed(self, step: int, digest: int) -> None: ...
    def view(self) -> tuple[int, int, int, int, bool]: ...
    def statistics(self) -> dict[str, float]: ...
    def leave(self, limit: float) -> None: ...

def tropical_matmul(
    left: npt.NDArray[np.float32], right: npt.NDArray[np.float32], *, min_plus: bool = False
) -> npt.NDArray[np.float32]: ...
def tropical_forward(
    weights: npt.NDArray[np.float32], biases: npt.NDArray[np.float32], batch: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint32]]: ...
def tropical_backward(
    inputs: int, winners: npt.NDArray[np.uint32], upstream: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...
def fisher_matrix(scores: npt.NDArray[np.float32], *, fast: bool = False) -> npt.NDArray[np.float64]: ...
def natural_gradient(
    scores: npt.NDArray[np.float32], gradient: npt.NDArray[np.float64], damping: float
) -> npt.NDArray[np.float64]: ...
def geodesic_example(step: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]: ...

class GeodesicTrainer:
    def __init__(
        self,
        ppb: npt.NDArray[np.float64],
        nm: npt.NDArray[np.float64],
        absorbance: npt.NDArray[np.float64],
        *,
        settings: str = "{}",
        fold: int | None = None,
        other: int | None = None,
        start: int = 0,
    ) -> None: ...
    def advance(self, steps: int) -> bool: ...
    def progress(self) -> tuple[int, float, float]: ...
    def predict(self, ppb: float) -> npt.NDArray[np.float64]: ...
    def save(self) -> bytes: ...
    def resume(self, state: bytes) -> None: ...
    def result(self) -> str: ...
    def profile(self) -> str: ...
    def metric(self) -> str: ...
    def report(
        self, results: Sequence[str], profiles: Sequence[str], calibrations: Sequence[str]
    ) -> tuple[str, str]: ...

def geodesic_invert(
    trainers: Sequence[GeodesicTrainer], spectrum: npt.NDArray[np.float64], confidence: float
) -> tuple[float, float, float, float, bool]: ...
def geodesic_calibration_pairs(folds: int) -> list[tuple[int, int]]: ...

class FederatedTask:
    @property
    def number(self) -> int: ...
    @property
    def round(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def lease_seconds(self) -> float: ...
    @property
    def proximal_weight(self) -> float: ...
    @property
    def is_masked(self) -> bool: ...
    def layers(self) -> list[tuple[str, list[int], bool]]: ...
    def settings(self) -> dict[str, float]: ...
    def model(self) -> npt.NDArray[np.float32]: ...
    def correction(self) -> npt.NDArray[np.float32] | None: ...

class Participant:
    def __init__(self, client: Client, run: str, name: str, *, keys: str | None = None, model_key: str | None = None) -> None: ...
    def next(self, wait: float, *, timeout: float | None = None) -> Call: ...  # FederatedTask | str | None
    def submit(
        self,
        task: FederatedTask,
        update: npt.NDArray[np.float32],
        samples: int,
        *,
        loss: float | None = None,
        rate_sum: float | None = None,
        timeout: float | None = None,
    ) -> Call: ...  # bool
    def give_up(self, task: int, *, timeout: float | None = None) -> Call: ...  # None
    def newest_model(self, *, timeout: float | None = None) -> Call: ...  # npt.NDArray[np.float32]

def submit_run(client: Client, name: str, spec: str, *, timeout: float | None = None) -> Call: ...  # bool
def run_status(
    client: Client, name: str, *, timeout: float | None = None
) -> Call: ...  # tuple[str, str, int, int, dict[str, float]] | None
