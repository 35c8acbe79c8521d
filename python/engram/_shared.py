"""The local cluster that is shared by objects that were created without a connection."""

from __future__ import annotations

import atexit
import os
import threading

from ._database import Database, connect

_lock = threading.Lock()
_shared: dict[int, Database] = {}


def database_of(db: Database | str | None) -> Database:
    """Returns a connection: the given one, one to an address, or one to the shared local cluster, which ends with this process."""
    if isinstance(db, Database):
        return db
    if db is not None:
        return connect(db)
    with _lock:
        if os.getpid() not in _shared:
            _shared[os.getpid()] = connect()
            atexit.register(_shared[os.getpid()].close)
        return _shared[os.getpid()]
