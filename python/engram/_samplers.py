"""Samplers and limiters of a replay buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ._errors import invalid


@dataclass(frozen=True)
class Prioritized:
    """Draws in proportion to ``priority ** alpha``, with replacement; ``weight`` is the importance weight with exponent ``beta``."""

    alpha: float = 0.6
    beta: float = 0.4


@dataclass(frozen=True)
class Uniform:
    """Draws every item alike, with replacement."""


@dataclass(frozen=True)
class Fifo:
    """Returns the oldest items."""


@dataclass(frozen=True)
class Lifo:
    """Returns the newest items."""


@dataclass(frozen=True)
class Slices:
    """Draws slices of ``length`` consecutive items of one trajectory."""

    length: int


@dataclass(frozen=True)
class Groups:
    """Returns the oldest complete groups of ``n`` items with the same ``trajectory``, as the answers to one prompt."""

    n: int


Sampler: TypeAlias = "Prioritized | Uniform | Fifo | Lifo | Slices | Groups"


@dataclass(frozen=True)
class SampleToInsert:
    """Keeps ``ratio`` samples per insert: who is ahead waits. Samples wait for ``min_size`` items.

    ``error`` is how far, in samples, the ratio may be left; by default a tenth of ``min_size`` inserts, at least two inserts.
    """

    ratio: float
    min_size: int = 1
    error: float | None = None

    def parts(self) -> tuple[float, int, float, float]:
        """Returns ratio, minimum size, and the bounds of the difference."""
        if not self.ratio > 0:
            raise invalid(f"limiter.ratio is {self.ratio}; allowed: above 0")
        error = max(2.0, 0.1 * self.min_size) * max(self.ratio, 1.0) if self.error is None else self.error
        middle = self.min_size * self.ratio
        return (self.ratio, self.min_size, middle - error, middle + error)


@dataclass(frozen=True)
class Bounds:
    """Keeps ``low <= inserts * ratio - samples <= high``. Samples wait for ``min_size`` items."""

    ratio: float
    min_size: int
    low: float
    high: float

    def parts(self) -> tuple[float, int, float, float]:
        """Returns ratio, minimum size, and the bounds of the difference."""
        return (self.ratio, self.min_size, self.low, self.high)


@dataclass(frozen=True)
class MinSize:
    """Samples wait for ``min_size`` items; appends never wait."""

    min_size: int

    def parts(self) -> tuple[float, int, float, float]:
        """Returns ratio, minimum size, and the bounds of the difference."""
        return (1.0, self.min_size, -1e300, 1e300)


def options_of(sampler: Sampler | None, beta: float | None) -> tuple[str, dict[str, Any]]:
    """Returns name and options of a sampler for the native module; ``None`` is that of the buffer."""
    match sampler:
        case None:
            if beta is not None:
                raise invalid(f"beta is {beta} with sampler=None; allowed: the beta of the buffer's own sampler")
            return "default", {}
        case Prioritized(alpha, own):
            return "prioritized", {"alpha": alpha, "beta": own if beta is None else beta}
        case Uniform():
            return "uniform", {}
        case Fifo():
            return "fifo", {}
        case Lifo():
            return "lifo", {}
        case Slices(length):
            return "slices", {"length": length}
        case Groups(n):
            return "groups", {"length": n}
    raise invalid(f"sampler is {sampler!r}; allowed: Prioritized, Uniform, Fifo, Lifo, Slices, Groups, or None = that of the buffer")
