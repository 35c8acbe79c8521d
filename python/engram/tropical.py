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
from ._arrays import F32, as_array, cast, vector
from ._database import one_of
from ._errors import invalid

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._tropical_torch import Layer as Layer, LayerFunction as LayerFunction

__all__ = ["Layer", "LayerFunction", "backward", "forward", "matmul"]


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


def forward(batch: object, weights: object, biases: object) -> tuple[F32, npt.NDArray[np.uint32]]:
    """Returns ``max(max over i of (batch[s, i] + weights[i, j]), biases[j])``, and the winner of each output.

    A winner is the index of an input, the lowest on ties, or the number of inputs where the bias wins.
    """
    rows, edges = operand("batch", batch), operand("weights", weights)
    values, winners = _engram.tropical_forward(edges, vector("biases", biases, np.float32), rows)
    return values, winners.reshape(values.shape)


def backward(upstream: object, winners: object, inputs: int) -> tuple[F32, F32, F32]:
    """Returns the gradients of batch, weights and biases, given those of the outputs: only winners have one.

    ``winners`` are those of :func:`forward`; ``inputs`` is the number of rows of ``weights``. Gradients of weights and biases are sums
    over the samples.
    """
    own = as_array("winners", winners)
    gradients = operand("upstream", upstream)
    if own.shape != gradients.shape:
        raise invalid(f"winners has shape {own.shape}; required: that of upstream, {gradients.shape}")
    if own.dtype.kind not in "iu" or own.size and (own.min() < 0 or own.max() > inputs):
        raise invalid(f"winners are not indexes from 0 to {inputs}, as forward returns them")
    weights, biases, batch = _engram.tropical_backward(inputs, own.astype(np.uint32).ravel(), gradients)
    return batch, weights, biases


def __getattr__(name: str) -> Any:
    """Returns ``Layer`` and ``LayerFunction``, which need PyTorch."""
    if name not in ("Layer", "LayerFunction"):
        raise AttributeError(f"module 'engram.tropical' has no attribute {name!r}")
    from . import _tropical_torch

    return getattr(_tropical_torch, name)
