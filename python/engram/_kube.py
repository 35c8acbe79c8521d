"""Clusters in Kubernetes: connections through ``engram proxy``, which forwards through the API server as ``kubectl port-forward`` does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

from . import _engram
from ._errors import EngramError, create
from ._local import program, stop

#: How long the proxy may take to find the cluster: its own deadlines for that are shorter, and their errors say more.
START_TIMEOUT = 60.0
#: How long it may take to end.
STOP_TIMEOUT = 10.0
#: Interval of checks of the starting proxy: its state file has no notification that Python could wait for.
POLL_SECONDS = 0.02

#: Names of Kubernetes objects.
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def parse(text: str) -> tuple[str, str, str | None]:
    """Returns namespace, cluster and context of ``kube://namespace/cluster?context=name``.

    >>> parse("kube://research/words")
    ('research', 'words', None)
    >>> parse("kube://research/words?context=staging")
    ('research', 'words', 'staging')
    """
    path, _, query = text.removeprefix("kube://").rstrip("/").partition("?")
    namespace, _, name = path.partition("/")
    key, _, context = query.partition("=")
    if not (_NAME.fullmatch(namespace) and _NAME.fullmatch(name)) or (query and not (key == "context" and context)):
        raise create("Config", f"address is {text!r}; required: kube://NAMESPACE/CLUSTER, or kube://NAMESPACE/CLUSTER?context=CONTEXT", "ENG-0103")
    return namespace, name, context or None


class Proxy:
    """``engram proxy`` as a child process. It ends with :meth:`stop`, or with this process."""

    def __init__(self, options: list[str]) -> None:
        scratch = Path(tempfile.mkdtemp(prefix="engram-"))
        log = scratch / "proxy.log"
        command = [program(), *options, "proxy", "--folder", str(scratch)]
        with open(log, "wb") as output:
            try:
                # A session of its own: Ctrl-C in the terminal interrupts Python only.
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
            except OSError as error:
                shutil.rmtree(scratch, ignore_errors=True)
                raise create("Config", f"failed to start {command[0]}: {error}") from error
        self._finalizer = weakref.finalize(self, stop, os.getpid(), self.process, scratch, STOP_TIMEOUT)
        try:
            self._description = self._wait_until_ready(scratch / "proxy.json", log)
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, path: Path, log: Path) -> dict[str, Any]:
        deadline = time.monotonic() + START_TIMEOUT
        while not path.exists():
            status = self.process.poll()
            if status is not None:
                raise _failure(status, log.read_text(errors="replace"))
            if time.monotonic() > deadline:
                raise create("Timeout", f"the cluster was not reached within {START_TIMEOUT:.0f} s", "ENG-0602")
            time.sleep(POLL_SECONDS)
        description: dict[str, Any] = json.loads(path.read_text())
        return description

    def client(self, runtime: _engram.Runtime, limit: float) -> _engram.Client:
        """Connects to the cluster."""
        found = self._description
        return _engram.Client(
            runtime, found["endpoints"], cluster=found["cluster"], ca=found["ca"], token_file=found["token"],
            proxy=found["socket"], timeout=limit,
        )  # fmt: skip

    def stop(self) -> None:
        """Ends the process, and removes its files."""
        self._finalizer()


#: Exception classes, and codes of errors without one, by exit status of the command.
_BY_STATUS = {
    2: ("Config", "ENG-0106"),
    3: ("NotFound", "ENG-0301"),
    4: ("Unavailable", "ENG-0601"),
    6: ("Unavailable", "ENG-0601"),
    7: ("Denied", "ENG-0607"),
    8: ("VersionMismatch", "ENG-0606"),
}


def _failure(status: int, text: str) -> EngramError:
    code = text.partition("error[")[2].partition("]")[0]
    message = text.strip().removeprefix(f"error[{code}]: ").removeprefix("error: ")
    name, general = _BY_STATUS.get(status, ("Unavailable", "ENG-0601"))
    return create(name, message or f"engram proxy ended with status {status}", code or general)
