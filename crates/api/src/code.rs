//! Error codes with title, explanation and exit code: the table from which `engram explain`, the documentation and other
//! languages' exceptions are generated.
//!
//! A code is never reused and never changes its meaning. Its first two digits name the area: 01 manifest, 02 devices,
//! 03 runs and their sources, 04 local cluster, 05 store and disk, 06 calls to a cluster.

use std::fmt;

use crate::exit::ExitCode;

/// Declares the codes: variant, code, exit code, title, explanation.
macro_rules! codes {
    ($($variant:ident = $id:literal, $exit:ident, $title:literal, $explanation:literal;)+) => {
        /// An error code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Code {
            $(#[doc = concat!("`", $id, "`: ", $title, ".")] $variant,)+
        }

        impl Code {
            /// Every code, ascending.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// Returns the printed code: `ENG-0106`.
            pub const fn id(self) -> &'static str {
                match self { $(Self::$variant => $id,)+ }
            }

            /// Returns a short title.
            pub const fn title(self) -> &'static str {
                match self { $(Self::$variant => $title,)+ }
            }

            /// Returns the cause and possible remedies.
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$variant => $explanation,)+ }
            }

            /// Returns the exit code of a command that fails with it.
            pub const fn exit_code(self) -> ExitCode {
                match self { $(Self::$variant => ExitCode::$exit,)+ }
            }
        }
    };
}

codes! {
    UnknownField = "ENG-0101", Usage, "unknown field",
    "A manifest has a field that its kind does not have at that place. Unknown fields are rejected because a misspelt field \
would otherwise silently keep its default.

Correct the name (the message shows the nearest one and all that are allowed there), or remove the line. \
`engram config schema` prints a JSON Schema with which editors complete and check manifests.";

    WrongType = "ENG-0102", Usage, "wrong type",
    "A field has a value of the wrong type: text for a number, a number for a list, or no value.

Numbers are YAML 1.2 numbers, without quotes, underscores or units: `1000000`, not `\"1000000\"`, `1_000_000` or `1M`. \
Integers have neither point nor exponent. Booleans are `true` and `false`. Durations and sizes are text with a \
unit: `500ms`, `3s`, `10m`; `64Mi`, `50Gi`. A field without a value does not mean the default: remove the line, or write \
`{}` for an object of defaults.";

    OutOfRange = "ENG-0103", Usage, "out of range",
    "A value has the right type but is outside the allowed range. NaN and infinite numbers are outside every range. Values \
are never clamped.

Weights, rates and decays are stored in units of 2^-30. A positive value of 2^-31 or less would round to 0, so it is \
rejected.";

    NotOneOf = "ENG-0104", Usage, "not one of the allowed values",
    "A field accepts a fixed set of values and has another one. Manifests write them in PascalCase: `Evict`, `SoloDurable`. \
The command line writes them in lower case: `--gpu required`.";

    Missing = "ENG-0105", Usage, "required field missing",
    "A required field, which has no default, is absent. The message names the field and shows a line to add, with an example value.";

    Conflicting = "ENG-0106", Usage, "conflicting fields",
    "Each value is valid alone, but not in combination: more replicas than workers, two sources for one run, a \
report that the source does not support. The message names both fields, both values and the rule.";

    NotSupported = "ENG-0107", Usage, "not supported by this version",
    "The manifest requests a feature that this version does not implement yet. It is rejected rather than \
silently ignored. The message says what to set instead.";

    Immutable = "ENG-0108", Conflict, "immutable field changed",
    "`partitions`, `learning.law` and `features` are immutable, because they determine how and where data is stored.

Restore the old value. To change it, export the memories, start a cluster with another name or `--state-dir`, and \
import them there.";

    NotAManifest = "ENG-0109", Usage, "not a manifest",
    "The file is not YAML, or a document in it is not one of the two kinds (`LearnerCluster`, `LearnerRun`) of \
`apiVersion: engram.dev/v1alpha1`, or documents are missing or duplicated: `up` requires exactly one `LearnerCluster`, \
`run` at least one `LearnerRun`, and names must be unique per kind.

The operator's configuration file (`--config`) is one document of `apiVersion: operator.engram.dev/v1alpha1` and `kind: OperatorConfiguration`.";

    GpuRequired = "ENG-0201", Conflict, "required GPU missing",
    "`gpu.mode: Required` is set and no usable GPU was found. Nothing was started.

Check that the driver is installed and the GPU visible (`nvidia-smi`), or set `gpu.mode: Auto`, which uses GPUs \
where available.";

    ClusterNotFound = "ENG-0301", NotFound, "cluster not found",
    "A run refers to a cluster that is neither in the file nor the connected cluster. `clusterRef.name` must be its \
`metadata.name`; `engram status` shows the name of the connected cluster.";

    SourceUnreadable = "ENG-0302", NotFound, "source cannot be read",
    "The file or repository of a run's source cannot be opened, or an object in object storage does not exist. The message has its \
full path or address and the cause. Relative paths are relative to the manifest, not to the current directory.

A run that is submitted again continues with its next epoch. If the message names an epoch, the input differs in it from what the run \
has learned: restore that epoch, or learn all of the input by a run under another name, which applies its epochs again.";

    ColumnNotFound = "ENG-0303", Usage, "column not usable",
    "`columns` names a column that the file does not have, has several times, or has in a type or compression that cannot be read. \
The message lists the columns, or what is allowed. Names are case-sensitive.";

    BadEvent = "ENG-0304", Failed, "bad event",
    "A row of the source is invalid: epochs must not decrease, qualities must be in 0 to 1 and weight changes in -1 to 1, keys \
have 1 to 1,024 bytes, ids are integers. The message has the line (or row group and row), the column and the value.

Nothing of that epoch was applied; earlier epochs were, and the run has ended. Correct the file and submit the run again: it goes on \
at that epoch. Earlier epochs must be unchanged (they are compared by their fingerprints); a run under a new name would apply them again.";

    RevisionNotFound = "ENG-0305", NotFound, "revision not found",
    "`git.revision` names no commit of the repository. A shallow clone has only the newest ones: `git fetch --unshallow` \
brings the rest.";

    GroupsInUse = "ENG-0306", Conflict, "groups hold other memories",
    "A synthetic run creates memories in groups 0 and 1 and measures those groups; the cluster already has other memories \
in them. Use a separate cluster, or remove those memories first.";

    RunUnknown = "ENG-0307", NotFound, "run not found",
    "The cluster has no run of that name. `engram list runs` shows the runs of the cluster.";

    RunFailed = "ENG-0308", Failed, "run failed",
    "A run ended with the error in the message. Its finished epochs stay applied. `engram describe run NAME` shows \
its progress. Submitted again, a run of kind Memory that failed or was cancelled continues with its next epoch.";

    StateDirectoryInUse = "ENG-0401", Conflict, "state directory in use",
    "Another process has locked the state directory; the message names it. Two clusters on one directory would destroy each \
other's data.

Stop the other cluster (`engram down`), or start this one with another `--state-dir`.";

    PortInUse = "ENG-0402", Conflict, "port in use",
    "A port that the cluster needs is in use. Nothing was started. Stop the process that listens there, move the cluster with \
`--port-base N`, or let the system choose free ports with `--port-base 0`.";

    OtherCluster = "ENG-0403", Conflict, "state directory of another cluster",
    "The state directory holds the data of a cluster with another name or identity than the one that is being started. \
Nothing was changed. Use the right `--state-dir`, or a new empty one.";

    NewerFormat = "ENG-0404", Incompatible, "state of a newer version",
    "The data was written by a newer version of Engram, in a format that this version does not support. Nothing was changed. Use \
that version or a newer one.";

    StateDirectoryUnusable = "ENG-0405", Failed, "state directory cannot be used",
    "The state directory cannot be created, read or written; the message has its path and the cause. Correct its owner and \
permissions, or use another `--state-dir`.";

    WorkerFailedToStart = "ENG-0406", Failed, "worker failed to start",
    "A worker process exited before it was ready. The other processes were stopped and the data is unchanged. The message has \
its exit status and the end of its log; `engram logs WORKER` shows the full log.";

    StartTimedOut = "ENG-0407", NotReady, "cluster not ready in time",
    "The processes run, but not all partitions were served in time. `engram logs` shows what a worker is doing: recovery of \
a large log takes a while.";

    NoLocalCluster = "ENG-0408", NotFound, "no local cluster is running",
    "The command needs a running cluster and found none. Start one with `engram up FILE`, or connect to one with `--address`.";

    MapLost = "ENG-0409", NotReady, "partition map lost",
    "The partition map is missing, damaged, or older than one that workers have seen. An empty or outdated map could discard \
acknowledged data, so nothing is served and nothing is changed.

Restore the map from a backup (`map.json` in the state directory), or rebuild it: with the cluster up, `engram partition \
rebuild-map` collects the state of every worker, shows the resulting map and whether it is proven to be complete, and writes it \
with `--yes`.";

    LossNotAccepted = "ENG-0410", Conflict, "operation would lose data",
    "The operation may lose acknowledged changes, and data loss was not accepted. Nothing was changed. The \
message has the known extent of the loss.

Restore the missing worker or disk, and nothing is lost. If that is impossible, repeat the command with \
`--accept-data-loss REASON`; the caller, time, reason and changes are recorded.";

    OrderNotNeeded = "ENG-0411", Conflict, "operation not needed",
    "The operation is for situations in which no automatic recovery is safe. Here recovery is possible: the partition is served, \
or a worker with a complete replica takes over or may still return; or the map exists. Nothing was changed. `engram status` shows \
what the cluster waits for.";

    DiskFull = "ENG-0501", Failed, "disk full",
    "A write failed for lack of space; the message names the file. No acknowledged write is lost, and a worker that \
rejects writes still serves reads.

Free space and repeat the rejected writes: a running cluster resumes without a restart. A start needs 64 MiB per worker for a \
new log segment.";

    StorageFailed = "ENG-0502", Failed, "storage failed",
    "A write or flush to disk failed. After a failed flush the content of the disk is unknown, so the worker exits; \
at the next start it recovers what is on disk. Check the system log for disk errors.";

    Corrupt = "ENG-0503", Failed, "stored data is damaged",
    "A checksum of a log or snapshot does not match: data changed after it was written. Damaged data is never served. \
The message has file and position.

A torn tail after a crash is distinguished from damage and repaired without this error. Check the disk. If every partition of the \
worker has another in-sync replica (`engram list partitions`), move its directory away: the worker starts empty and is \
re-replicated. Otherwise restore a snapshot (`engram snapshot restore`).";

    CapacityExceeded = "ENG-0504", Failed, "capacity exceeded",
    "With `capacity.policy: Refuse` a partition is full and rejects new memories; existing ones are unaffected. \
Raise `capacity.memories`, remove memories, or set `policy: Evict`.";

    KeyCollision = "ENG-0505", Conflict, "two keys with one id",
    "Two different keys hash to the same 64-bit id, or an id is given a second key. The later one is rejected, because it would \
mix two memories. Rename one of the keys. A chance collision is expected once in about six billion keys.";

    WrongDimension = "ENG-0506", Usage, "features of the wrong dimension",
    "The length of a feature vector differs from `features.dimension` of the cluster, which is immutable; a cluster \
with dimension 0 accepts none.";

    InvalidValue = "ENG-0507", Usage, "invalid value in a request",
    "A request has a quality, weight, delta or decay that is not a number or out of range. The message has the field, \
the index and the value. Nothing of the request was applied; values are never clamped.";

    MemoryNotFound = "ENG-0508", NotFound, "memory not found",
    "No memory has that id or key. It may never have existed, or was removed or evicted.";

    SnapshotUnusable = "ENG-0509", Failed, "snapshot cannot be restored",
    "The snapshot is incomplete, damaged, of another cluster, or of a cluster with another law or other features. The cluster is \
unchanged.";

    StorageUnusable = "ENG-0510", Failed, "storage not usable",
    "The address is wrong, credentials are missing, or the object storage rejected the request, failed or did not respond after \
several attempts; the message has its response. Partially written objects are removed; the cluster is unchanged.

For a volume: the cluster has no volume of that name (`spec.snapshotVolumes`), its file system returned an error, or a symbolic \
link points outside of it.

Addresses have the form `s3://BUCKET/PREFIX`. Credentials come from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or from a \
directory (`--s3-credentials`); for storage other than AWS set `--s3-endpoint` or `AWS_ENDPOINT_URL`.";

    Unreachable = "ENG-0601", Unreachable, "cluster unreachable",
    "No worker responded at the address in the message. Check that the cluster is running (`engram status`) and that the address \
is right (`--address`, `ENGRAM_ADDRESS`).";

    DeadlineExceeded = "ENG-0602", NotReady, "deadline exceeded",
    "No response arrived in time. A write may still have been applied; the message has its outcome where the client could \
determine it. Retried in the same session, a write is applied only once. `engram status` shows which workers respond.";

    MessageTooLarge = "ENG-0603", Usage, "message too large",
    "A request exceeds the maximum message size: 4 MiB and 65,536 ids. Split it; the command line and the client library do \
so automatically.";

    SessionExpired = "ENG-0604", Failed, "session expired",
    "The session that deduplicates retried writes was idle for too long and its record is gone. Whether the last \
write was applied is unknown. Open a new session and check before repeating the write.";

    WrongCluster = "ENG-0605", Conflict, "another cluster answers",
    "The address belongs to another cluster than the requested one; ports may have been reused. Nothing was read or written. Check \
the address, or select the cluster by its state directory.";

    Incompatible = "ENG-0606", Incompatible, "incompatible version",
    "Client and cluster have no common protocol version. `engram version` shows both; use a client of the cluster's \
version.";

    Denied = "ENG-0607", Denied, "permission denied",
    "The caller is not authenticated or not authorized, and nothing was done. A cluster with TLS authenticates callers by a \
certificate (`--client-certificate`) or by a ServiceAccount token (`--token-file`; `engram -n` requests one itself), and `spec.access` grants \
rights to ServiceAccounts.";

    Busy = "ENG-0608", NotReady, "cluster is overloaded",
    "A worker is at its limit of concurrent requests and rejected this one before anything was applied. Retry after a \
moment, with fewer concurrent requests.";
}

impl Code {
    /// Parses a code as `ENG-0106`, `eng-0106` or `0106`.
    pub fn find(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|code| {
            code.id().eq_ignore_ascii_case(text) || code.id().strip_prefix("ENG-").is_some_and(|digits| digits == text)
        })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.id())
    }
}

/// Returns the explanation of a code as `engram explain` prints it; `None` for an unknown code.
pub fn explain(text: &str) -> Option<String> {
    let code = Code::find(text)?;
    let exit = code.exit_code();
    Some(format!(
        "{code}: {}\n\n{}\n\nexit code {}: {}\n",
        code.title(),
        code.explanation(),
        exit.number(),
        exit.meaning()
    ))
}

#[cfg(test)]
mod tests {
    use super::{Code, explain};

    #[test]
    fn codes_are_distinct_and_ascending() {
        assert!(Code::ALL.windows(2).all(|pair| pair[0].id() < pair[1].id()));
        for code in Code::ALL {
            assert_eq!(Code::find(code.id()), Some(*code));
            assert!(code.explanation().len() > 80, "{code} needs an explanation");
        }
    }

    #[test]
    fn codes_are_found_with_and_without_prefix() {
        for text in ["ENG-0106", "eng-0106", "0106"] {
            let text = explain(text).expect("ENG-0106 exists");
            assert!(text.starts_with("ENG-0106: conflicting fields\n\n"));
            assert!(text.ends_with("exit code 2: invalid usage or manifest\n"));
        }
        assert_eq!(explain("ENG-9999"), None);
    }
}
