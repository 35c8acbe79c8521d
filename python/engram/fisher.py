"""Fisher information of scores: the gradients of log-likelihoods, one row per sample.

>>> import numpy as np
>>> from engram import fisher
>>> scores = np.array([[1.0, 0.0], [0.0, 2.0]], np.float32)
>>> fisher.matrix(scores).tolist()
[[0.5, 0.0], [0.0, 2.0]]
"""

from __future__ import annotations

from . import _engram
from ._arrays import F64, matrix as _matrix, vector


def matrix(scores: object, *, fast: bool = False) -> F64:
    """Returns ``scores.T @ scores / samples`` in float64, of float32 scores (samples x parameters).

    The bits do not depend on how samples are split over workers; ``fast`` gives this up.
    """
    return _engram.fisher_matrix(_matrix("scores", scores), fast=fast)


def natural_gradient(scores: object, gradient: object, *, damping: float = 1e-3) -> F64:
    """Returns the solution ``x`` of ``(F + damping I) x = gradient``, where ``F`` is the Fisher matrix of ``scores``."""
    import numpy as np

    return _engram.natural_gradient(_matrix("scores", scores), vector("gradient", gradient, np.float64), damping)
