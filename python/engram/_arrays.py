"""Arguments to arrays: checked once, here, before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from . import _engram
from ._errors import invalid

#: Ids as integers, or keys as strings.
Ids: TypeAlias = "int | str | Sequence[int] | Sequence[str] | npt.ArrayLike"
#: Seconds, or a duration.
Timeout: TypeAlias = "float | timedelta | None"

U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]


def seconds(timeout: Timeout) -> float | None:
    """Returns a timeout in seconds."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if value is not None and not (isinstance(value, (int, float)) and value > 0 and math.isfinite(value)):
        raise invalid(f"timeout is {value!r}; allowed: seconds above 0, a timedelta, or None")
    return None if value is None else float(value)


def as_array(name: str, value: object) -> npt.NDArray[Any]:
    """Returns the array of a value; tensors in main memory are not copied."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise invalid(f"{name} cannot be converted to an array: {error}") from error


def ids_and_keys(name: str, value: Ids) -> tuple[U64, list[str] | None]:
    """Returns ids, and the keys that they were derived from, if keys were given."""
    if isinstance(value, str):
        return _engram.key_ids([value]), [value]
    if isinstance(value, (list, tuple)) and value and all(isinstance(key, str) for key in value):
        keys = [str(key) for key in value]
        return _engram.key_ids(keys), keys
    is_iterator = isinstance(value, Iterable) and not isinstance(value, Sequence) and not hasattr(value, "__array__")
    array = as_array(name, list(value) if isinstance(value, Iterable) and is_iterator else value)
    if array.dtype.kind == "U":
        keys = [str(key) for key in np.atleast_1d(array).tolist()]
        return _engram.key_ids(keys), keys
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.uint64)
    if array.dtype.kind not in "ui":
        raise invalid(f"{name} has dtype {array.dtype}; allowed: integers, or strings as keys")
    array = np.atleast_1d(array)
    if array.ndim != 1:
        raise invalid(f"{name} has shape {array.shape}; allowed: one dimension")
    if array.dtype.kind == "i" and array.size and int(array.min()) < 0:
        index = int(np.argmin(array))
        raise invalid(f"{name}[{index}] is {array[index]}; allowed: 0 to 2^64 - 1")
    return np.ascontiguousarray(array, dtype=np.uint64), None


def floats(name: str, value: object, rows: int, low: float, high: float) -> F32:
    """Returns one number in ``[low, high]`` per row; a scalar is repeated."""
    array = as_array(name, value)
    if array.dtype.kind not in "fiu" and array.size:
        raise invalid(f"{name} has dtype {array.dtype}; allowed: real numbers")
    if array.ndim == 0:
        array = np.broadcast_to(array, (rows,))
    if array.shape != (rows,):
        raise invalid(f"{name} has shape {array.shape}; required: ({rows},), one per id")
    valid = (array >= low) & (array <= high)
    if not valid.all():
        index = int(np.argmin(valid))
        raise invalid(f"{name}[{index}] is {array[index]}; allowed: {low:g} to {high:g}")
    return np.ascontiguousarray(array, dtype=np.float32)


def group_column(name: str, value: object, rows: int) -> U8:
    """Returns one group in 0 to 255 per row; a scalar is repeated."""
    array = as_array(name, value)
    if array.dtype.kind not in "ui" and array.size:
        raise invalid(f"{name} has dtype {array.dtype}; allowed: integers")
    if array.ndim == 0:
        array = np.broadcast_to(array, (rows,))
    if array.shape != (rows,):
        raise invalid(f"{name} has shape {array.shape}; required: ({rows},), one per id")
    valid = (array >= 0) & (array <= 255)
    if not valid.all():
        index = int(np.argmin(valid))
        raise invalid(f"{name}[{index}] is {array[index]}; allowed: 0 to 255")
    return np.ascontiguousarray(array, dtype=np.uint8)


def cast(name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns an array as contiguous floats of a type; refuses finite values that are too large for it."""
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(array, dtype=dtype)
    if result.dtype != array.dtype and (np.isfinite(array) & ~np.isfinite(result)).any():
        raise invalid(f"{name} has values above {np.finfo(result.dtype).max:g}; allowed: numbers in the range of {result.dtype}")
    return result


def matrix(name: str, value: object, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Returns a matrix of finite real numbers."""
    array = as_array(name, value)
    if array.dtype.kind not in "fiu":
        raise invalid(f"{name} has dtype {array.dtype}; allowed: real numbers")
    if array.ndim != 2:
        raise invalid(f"{name} has shape {array.shape}; required: two dimensions")
    finite = np.isfinite(array)
    if not finite.all():
        row, column = np.unravel_index(int(np.argmin(finite)), array.shape)
        raise invalid(f"{name}[{row}, {column}] is {array[row, column]}; allowed: finite numbers")
    return cast(name, array, dtype)


def vector(name: str, value: object, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """Returns a vector of finite real numbers."""
    array = as_array(name, value)
    if array.ndim != 1:
        raise invalid(f"{name} has shape {array.shape}; required: one dimension")
    result: npt.NDArray[Any] = matrix(name, array[None, :], dtype)[0]
    return result
