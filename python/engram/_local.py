"""Local clusters: the ``engram`` program as a child process that ends with this one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ._errors import EngramError, create

#: How long a cluster may take to become ready, in seconds.
START_TIMEOUT = 120.0
#: How long a graceful stop may take before the processes are killed, in seconds.
STOP_TIMEOUT = 60.0
#: Interval of checks of a starting cluster: its state file has no notification that Python could wait for.
POLL_SECONDS = 0.02
#: Lines of the log in the error of a failed start.
LAST_LINES = 15


def program() -> str:
    """Returns the ``engram`` program: ``ENGRAM_BIN``, the one of this package, or the one on the PATH."""
    named = os.environ.get("ENGRAM_BIN")
    if named:
        return named
    for folder in (sysconfig.get_path("scripts"), os.path.dirname(sys.executable)):
        candidate = os.path.join(folder, "engram")
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which("engram")
    if found is None:
        raise create("Config", "the engram program is neither next to this Python nor on the PATH; set ENGRAM_BIN to its path")
    return found


def state_base() -> Path:
    """Returns the folder of the state directories of ``engram up``."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "engram"


def read_endpoints(folder: Path) -> dict[str, Any] | None:
    """Reads the processes and addresses of the cluster in a state directory; ``None`` if none is running and ready."""
    try:
        endpoints: dict[str, Any] = json.loads((folder / "endpoints.json").read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return endpoints if endpoints.get("ready") and _is_alive(endpoints) else None


def _is_alive(endpoints: Mapping[str, Any]) -> bool:
    """Whether the supervisor runs: the start time distinguishes processes with the same id."""
    try:
        fields = Path(f"/proc/{endpoints['pid']}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, KeyError):
        return False
    return fields[0] not in "ZX" and int(fields[19]) == endpoints.get("started")


def owner_key(folder: Path) -> str:
    """Returns the owner's key of a local cluster; empty if this user cannot read it."""
    try:
        return (folder / "owner.key").read_text().strip()
    except OSError:
        return ""


class LocalCluster:
    """A local cluster that this process started. It ends with :meth:`stop`, or with this process."""

    def __init__(self, manifest: Path | Mapping[str, Any], folder: Path | None = None, *, gpu: str | None = None) -> None:
        self.process_id = os.getpid()
        # Next to the state directory, which must be empty at the first start.
        scratch = Path(tempfile.mkdtemp(prefix="engram-"))
        #: State directory of the cluster.
        self.folder = scratch / "state" if folder is None else folder
        path = manifest if isinstance(manifest, Path) else scratch / "cluster.json"
        if not isinstance(manifest, Path):
            path.write_text(json.dumps(manifest, indent=2) + "\n")
        #: Output of the supervisor.
        self.log = scratch / "up.log"
        command = [program(), "up", str(path), "--state-dir", str(self.folder), "--port-base", "0", "--stop-with-stdin"]
        if gpu is not None:
            command += ["--gpu", gpu]
        with open(self.log, "wb") as log:
            try:
                # A session of its own: Ctrl-C in the terminal interrupts Python only.
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                shutil.rmtree(scratch, ignore_errors=True)
                raise create("Config", f"failed to start {command[0]}: {error}") from error
        self._finalizer = weakref.finalize(self, stop, self.process_id, self.process, scratch, STOP_TIMEOUT)
        _clusters.add(self)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while (status := self.process.poll()) is None:
            endpoints = read_endpoints(self.folder)
            if endpoints is not None and endpoints["pid"] == self.process.pid:
                return
            if time.monotonic() > deadline:
                raise create("Timeout", f"the cluster was not ready within {START_TIMEOUT:.0f} s; log: {self.log}", "ENG-0407")
            time.sleep(POLL_SECONDS)
        raise self._failure(status)

    def _failure(self, status: int) -> EngramError:
        text = self.log.read_text(errors="replace").strip()
        code = text.partition("error[")[2].partition("]")[0]
        lines = "\n".join(text.splitlines()[-LAST_LINES:])
        name = {"ENG-02": "Gpu", "ENG-01": "Config", "ENG-04": "Conflict"}.get(code[:6], "Unavailable")
        return create(name, f"failed to start the cluster (status {status}):\n{lines}", code)

    def endpoints(self) -> dict[str, Any]:
        """Returns processes and addresses."""
        endpoints = read_endpoints(self.folder)
        if endpoints is None:
            raise create("Unavailable", f"the local cluster in {self.folder} is not running", "ENG-0408")
        return endpoints

    def kill_worker(self, ordinal: int) -> int:
        """Kills a worker process as ``kill -9`` does, and returns its process id. The supervisor starts it again."""
        workers = {worker["ordinal"]: worker for worker in self.endpoints()["workers"]}
        if ordinal not in workers:
            raise create("NotFound", f"worker is {ordinal}; allowed: one of {sorted(workers)}")
        process = workers[ordinal].get("process")
        if process is None:
            raise create("Conflict", f"worker {ordinal} is restarting")
        os.kill(process["pid"], signal.SIGKILL)
        return int(process["pid"])

    def metrics(self, timeout: float) -> dict[int, dict[str, float]]:
        """Returns the metrics of each worker by its number; those with labels by ``name{label="value"}``, as Prometheus writes them."""
        pages = {}
        for worker in self.endpoints()["workers"]:
            try:
                with urllib.request.urlopen(f"http://{worker['http']}/metrics", timeout=timeout) as page:
                    pages[int(worker["ordinal"])] = _samples(page.read().decode())
            except OSError as error:
                raise create("Unavailable", f"worker {worker['ordinal']} does not answer: {error}") from error
        return pages

    def snapshot(self, path: Path, timeout: float) -> None:
        """Writes a snapshot of the running cluster to a folder that does not exist."""
        command = [program(), "snapshot", "create", path.name, "--to", str(path.parent), "--state-dir", str(self.folder)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise create("Timeout", f"the snapshot was not complete within {timeout:.0f} s") from error
        if done.returncode != 0:
            code = done.stderr.partition("error[")[2].partition("]")[0]
            raise create("Conflict", f"failed to write a snapshot to {path}: {done.stderr.strip()}", code)

    def stop(self) -> None:
        """Stops the processes, and removes a state directory that is temporary."""
        if os.getpid() == self.process_id:
            self._finalizer()

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped."""
        return not self._finalizer.alive

    def close_in_child(self) -> None:
        """Closes the inherited end of the pipe: otherwise the cluster would live as long as a forked child."""
        self._finalizer.detach()
        if self.process.stdin is not None:
            os.close(self.process.stdin.fileno())
            # The descriptor is closed, and its number may be reused: the object must not close it again.
            _leaked.append(self.process.stdin)


def _samples(page: str) -> dict[str, float]:
    """Reads a page of metrics in the text format of Prometheus."""
    lines = (line for line in page.splitlines() if line and not line.startswith("#"))
    # An exemplar follows after " # ".
    pairs = (line.partition(" # ")[0].rpartition(" ") for line in lines)
    return {name: float(value) for name, _, value in pairs}


#: Clusters of this process, for forked children.
_clusters: weakref.WeakSet[LocalCluster] = weakref.WeakSet()
_leaked: list[Any] = []


def _after_fork() -> None:
    for cluster in list(_clusters):
        cluster.close_in_child()
    _clusters.clear()


os.register_at_fork(after_in_child=_after_fork)


def stop(process_id: int, process: subprocess.Popen[bytes], scratch: Path, timeout: float) -> None:
    """Ends a child by closing its standard input, and removes its folder; does nothing in a forked process."""
    if os.getpid() != process_id:
        return
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(scratch, ignore_errors=True)
