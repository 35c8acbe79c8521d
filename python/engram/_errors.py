"""Exceptions. Every one has the code that ``engram explain`` documents, if there is one."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._arrays import U64


class EngramError(Exception):
    """Base of all exceptions of this package."""

    #: Code of the error, as in ``engram explain ENG-0602``; empty if it has none.
    code: str = ""
    #: Cause and possible remedies; empty without a code.
    help: str = ""
    #: Of an ``extend`` that failed after a part of its items was appended: the handles of these, the first items; otherwise ``None``.
    handles: U64 | None = None

    def __str__(self) -> str:
        text = str(self.args[0]) if self.args else ""
        return f"[{self.code}] {text}" if self.code else text


class ConfigError(EngramError, ValueError):
    """A manifest, an address or an argument is invalid."""


class InvalidValueError(EngramError, ValueError):
    """A value is out of range, or an array has the wrong dtype or shape. Nothing was changed unless ``handles`` says so."""


class UnavailableError(EngramError, ConnectionError):
    """The cluster does not respond, or cannot serve the request now."""


class TimeoutError(EngramError, builtins.TimeoutError):
    """The deadline passed. A write that was in flight may have been applied."""


class NotFoundError(EngramError, KeyError):
    """A memory, buffer or run does not exist."""


class ConflictError(EngramError):
    """The state of the cluster does not permit the request."""


class CapacityError(EngramError):
    """The cluster is full and refuses new memories."""


class DeniedError(EngramError, PermissionError):
    """The caller is not allowed to do this."""


class GpuError(EngramError, RuntimeError):
    """A GPU is required and none is usable."""


class VersionMismatchError(EngramError):
    """Client and cluster do not speak the same version of the protocol."""


class ForkedError(EngramError, RuntimeError):
    """The object belongs to the parent process and cannot be used in a forked child."""


_CLASSES: dict[str, type[EngramError]] = {
    "Config": ConfigError,
    "InvalidValue": InvalidValueError,
    "Unavailable": UnavailableError,
    "Timeout": TimeoutError,
    "NotFound": NotFoundError,
    "Conflict": ConflictError,
    "Capacity": CapacityError,
    "Denied": DeniedError,
    "Gpu": GpuError,
    "VersionMismatch": VersionMismatchError,
    "Forked": ForkedError,
}


def create(name: str, text: str, code: str = "", help: str = "") -> EngramError:
    """Creates the exception of a class, named without ``Error``."""
    error = _CLASSES[name](text)
    error.code, error.help = code, help
    return error


def invalid(text: str) -> EngramError:
    """Creates the exception of an argument with an invalid value."""
    return create("InvalidValue", text, "ENG-0507")
