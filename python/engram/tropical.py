"""Max-plus and min-plus algebra on arrays: the same bits on any number of threads.

>>> import numpy as np
>>> from engram import tropical
>>> distances = np.array([[0, 3, np.inf], [np.inf, 0, 4], [1, np.inf, 0]], np.float32)
>>> tropical.matmul(distances, distances, semiring="min-plus")[0].tolist()      # at most two edges
[0.0, 3.0, 7.0]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _engram
from ._arrays import F32, as_array, cast
from ._database import one_of
from ._errors import invalid

if TYPE_CHECKING:
    from ._tropical_torch import Layer as Layer

__all__ = ["Layer", "matmul"]


def operand(name: str, value: object) -> F32:
    """Returns a matrix of real numbers or infinities."""
    array = as_array(name, value)
    if array.dtype.kind not in "fiu":
        raise invalid(f"{name} has dtype {array.dtype}; allowed: real numbers")
    if array.ndim != 2:
        raise invalid(f"{name} has shape {array.shape}; required: two dimensions")
    return cast(name, array, np.float32)


def matmul(left: object, right: object, *, semiring: Literal["max-plus", "min-plus"] = "max-plus") -> F32:
    """Returns ``C[i, j] = max over k of left[i, k] + right[k, j]``, or the minimum.

    Missing entries are ``-inf``, of min-plus ``inf``. NaN and the other infinity are refused.
    """
    is_min = one_of("semiring", semiring, ("max-plus", "min-plus")) == "min-plus"
    first, second = operand("left", left), operand("right", right)
    if not is_min:
        return _engram.tropical_matmul(first, second)
    return _engram.tropical_matmul(-first, -second, min_plus=True)


def __getattr__(name: str) -> Any:
    """Returns ``Layer``, which needs PyTorch."""
    if name != "Layer":
        raise AttributeError(f"module 'engram.tropical' has no attribute {name!r}")
    from ._tropical_torch import Layer

    return Layer
