//! Explanations of the codes of the local cluster: cause and remedies.

pub(super) const STATE_DIRECTORY_IN_USE: &str = "\
Another process has locked the state directory; the message names it. Two clusters on one directory would destroy each \
other's data.

Stop the other cluster (`engram down`), or start this one with another `--state-dir`.";

pub(super) const PORT_IN_USE: &str = "\
A port that the cluster needs is in use. Nothing was started. Stop the process that listens there, move the cluster with \
`--port-base N`, or let the system choose free ports with `--port-base 0`.";

pub(super) const OTHER_CLUSTER: &str = "\
The state directory holds the data of a cluster with another name or identity than the one that is being started. \
Nothing was changed. Use the right `--state-dir`, or a new empty one.";

pub(super) const NEWER_FORMAT: &str = "\
The data was written by a newer version of Engram, in a format that this version does not support. Nothing was changed. Use \
that version or a newer one.";

pub(super) const STATE_DIRECTORY_UNUSABLE: &str = "\
The state directory cannot be created, read or written; the message has its path and the cause. Correct its owner and \
permissions, or use another `--state-dir`.";

pub(super) const WORKER_FAILED_TO_START: &str = "\
A worker process exited before it was ready. The other processes were stopped and the data is unchanged. The message has \
its exit status and the end of its log; `engram logs WORKER` shows the full log.";

pub(super) const START_TIMED_OUT: &str = "\
The processes run, but not all partitions were served in time. `engram logs` shows what a worker is doing: recovery of \
a large log takes a while.";

pub(super) const NO_LOCAL_CLUSTER: &str = "\
The command needs a running cluster and found none. Start one with `engram up FILE`, or connect to one with `--address`.";

pub(super) const MAP_LOST: &str = "\
The partition map is missing, damaged, or older than one that workers have seen. An empty or outdated map could discard \
acknowledged data, so nothing is served and nothing is changed.

Restore the map from a backup (`map.json` in the state directory), or rebuild it: with the cluster up, `engram partition \
rebuild-map` collects the state of every worker, shows the resulting map and whether it is proven to be complete, and writes it \
with `--yes`.";

pub(super) const LOSS_NOT_ACCEPTED: &str = "\
The operation may lose acknowledged changes, and data loss was not accepted. Nothing was changed. The \
message has the known extent of the loss.

Restore the missing worker or disk, and nothing is lost. If that is impossible, repeat the command with \
`--accept-data-loss REASON`; the caller, time, reason and changes are recorded.";

pub(super) const ORDER_NOT_NEEDED: &str = "\
The operation is for situations in which no automatic recovery is safe. Here recovery is possible: the partition is served, \
or a worker with a complete replica takes over or may still return; or the map exists. Nothing was changed. `engram status` shows \
what the cluster waits for.";
