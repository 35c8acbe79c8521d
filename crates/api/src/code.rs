//! Every error code with its title, its long text and its exit code: the one table that `engram explain`, the
//! documentation and other languages' exceptions are made from.
//!
//! A code is never reused and never changes its meaning. The first digit says where to look: 01 manifest, 02 devices,
//! 03 runs and their sources, 04 local cluster, 05 store and disk, 06 talking to a cluster.

use std::fmt;

use crate::exit::ExitCode;

/// Declares the codes: variant, code, exit code, title, long text.
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

            /// Returns the code as people see it: `ENG-0106`.
            pub const fn id(self) -> &'static str {
                match self { $(Self::$variant => $id,)+ }
            }

            /// Returns what happened, in a few words.
            pub const fn title(self) -> &'static str {
                match self { $(Self::$variant => $title,)+ }
            }

            /// Returns why it happens and what can be done about it.
            pub const fn explanation(self) -> &'static str {
                match self { $(Self::$variant => $explanation,)+ }
            }

            /// Returns how a command ends that fails with it.
            pub const fn exit_code(self) -> ExitCode {
                match self { $(Self::$variant => ExitCode::$exit,)+ }
            }
        }
    };
}

codes! {
    UnknownField = "ENG-0101", Usage, "unknown field",
    "A manifest names a field that its kind does not have at that place. Nothing is ignored in silence: a misspelt field \
would otherwise leave its default in force.

Correct the name (the message shows the nearest one and all that are allowed there), or remove the line. \
`engram config schema` prints a JSON Schema with which editors complete and check manifests.";

    WrongType = "ENG-0102", Usage, "wrong type",
    "A field has a value of another type: text for a number, a number for a list, nothing at all.

Numbers are YAML 1.2 numbers, without quotes, underscores or units: `1000000`, not `\"1000000\"`, `1_000_000` or `1M`. \
Whole numbers have neither point nor exponent. Truth values are `true` and `false`. Durations and sizes are text with a \
unit: `500ms`, `3s`, `10m`; `64Mi`, `50Gi`. A field without a value is no default: remove the line for that, or write \
`{}` for an object of defaults.";

    OutOfRange = "ENG-0103", Usage, "out of range",
    "A value is of the right type, but outside what is allowed. NaN and infinite numbers are outside every range. Values \
are never clamped: what runs is what the manifest says.

Weights, rates and decays are kept in units of 2^-30. A positive one of 2^-31 or less would round to nothing, so it is \
refused.";

    NotOneOf = "ENG-0104", Usage, "not one of the words allowed",
    "A field takes one of a few words, and got another. Words are written in PascalCase in manifests: `Evict`, `SoloDurable`. \
On the command line the same words are lower case: `--gpu required`.";

    Missing = "ENG-0105", Usage, "required field missing",
    "A field that has no default is absent. The message shows a line that could be added.";

    Conflicting = "ENG-0106", Usage, "fields that do not go together",
    "Each value may be right by itself, but not beside the other: more copies than workers, two sources for one run, a \
report that the source cannot give. The message names both fields, both values and the rule.";

    NotSupported = "ENG-0107", Usage, "not supported by this version",
    "The manifest asks for something that Engram knows of and this version does not do yet. It is refused rather than \
ignored, since a cluster that silently did less would be worse. The message says what to set instead.";

    Immutable = "ENG-0108", Conflict, "immutable field changed",
    "`partitions`, `learning.law` and `features` are fixed when a cluster is created, because they decide how and where \
everything is stored.

Set the old value again. To change it, export the memories, start a cluster with another name or `--state-dir`, and \
import them there.";

    NotAManifest = "ENG-0109", Usage, "not a manifest",
    "The file is not YAML, or a document in it is not one of the two kinds (`LearnerCluster`, `LearnerRun`) of \
`apiVersion: engram.dev/v1alpha1`, or the documents do not make a whole: `up` wants exactly one `LearnerCluster`, \
`run` at least one `LearnerRun`, and a name may be used once per kind.

The file of an operator (`--config`) is one document of `apiVersion: operator.engram.dev/v1alpha1` and `kind: OperatorConfiguration`.";

    GpuRequired = "ENG-0201", Conflict, "required GPU missing",
    "`gpu.mode: Required` was asked for and no usable device was found. Nothing was started.

Check that the driver is installed and the device visible (`nvidia-smi`), or set `gpu.mode: Auto`, which uses a device \
where there is one.";

    ClusterNotFound = "ENG-0301", NotFound, "cluster not found",
    "A run names a cluster that is neither in the file nor known to the context. `engram list clusters` shows those that \
are known; `clusterRef.name` must be the `metadata.name` of one of them.";

    SourceUnreadable = "ENG-0302", NotFound, "source cannot be read",
    "The file or repository of a run's source cannot be opened, or a file in a storage is not there. The message has its full path \
or address and the cause. Relative paths are relative to the manifest, not to the current directory.";

    ColumnNotFound = "ENG-0303", Usage, "column not in the file",
    "`columns` names a column that the file does not have. The message lists those that it has. Names are compared exactly, \
upper and lower case told apart.";

    BadEvent = "ENG-0304", Failed, "bad event",
    "A row of the source breaks a rule: epochs never fall, qualities lie in 0 to 1 and changes of weight in -1 to 1, keys \
have 1 to 1,024 bytes, ids are whole numbers. The message has the line (or row group and row), the column and the value.

Nothing of that epoch was applied; the epochs before it were. Correct the file and run again: the run goes on at that \
epoch.";

    RevisionNotFound = "ENG-0305", NotFound, "revision not found",
    "`git.revision` names no commit of the repository. A shallow clone has only the newest ones: `git fetch --unshallow` \
brings the rest.";

    GroupsInUse = "ENG-0306", Conflict, "groups hold other memories",
    "A synthetic run makes memories in groups 0 and 1 and measures those groups, so it wants them to itself; the cluster \
already has other memories in them. Run it on a cluster of its own, or remove those memories first.";

    RunUnknown = "ENG-0307", NotFound, "run not found",
    "No run of that name is on the cluster: it may have another name, or be on another cluster. `engram list runs` shows \
those that are there.";

    RunFailed = "ENG-0308", Failed, "run failed",
    "A run ended with an error, which the message has. Its finished epochs stay applied. `engram describe run NAME` shows \
how far it came.";

    StateDirectoryInUse = "ENG-0401", Conflict, "state directory in use",
    "Another process holds the state directory; the message names it. Two clusters on one directory would destroy each \
other's data, so the second is refused.

Stop the other one (`engram down`), or give this one `--state-dir`.";

    PortInUse = "ENG-0402", Conflict, "port in use",
    "A port that the cluster needs is taken. Nothing was started. Stop what listens there, move the cluster with \
`--port-base N`, or let the system choose free ports with `--port-base 0`.";

    OtherCluster = "ENG-0403", Conflict, "state directory of another cluster",
    "The state directory holds the data of a cluster with another name or identity than the one that is being started. \
Nothing was changed. Give the right `--state-dir`, or a new empty one.";

    NewerFormat = "ENG-0404", Incompatible, "state of a newer version",
    "The data was written by a newer version of Engram, in a format that this one does not know. Nothing was changed. Use \
that version or a newer one.";

    StateDirectoryUnusable = "ENG-0405", Failed, "state directory cannot be used",
    "The state directory cannot be created, read or written; the message has its path and the cause. Correct its owner and \
permissions, or give another with `--state-dir`.";

    WorkerFailedToStart = "ENG-0406", Failed, "worker failed to start",
    "A worker process ended before it was ready, for a reason that has no code of its own. The other processes were stopped and \
the data is as it was. The message has its exit status and the end of its log; `engram logs WORKER` shows all of it.";

    StartTimedOut = "ENG-0407", NotReady, "cluster not ready in time",
    "The processes run, but not all partitions were served in time. `engram logs` tells what a worker is doing: recovery of \
a large log takes a while.";

    NoLocalCluster = "ENG-0408", NotFound, "no local cluster runs",
    "The command needs a running cluster and found none. Start one with `engram up FILE`, or name one with `--address`.";

    MapLost = "ENG-0409", NotReady, "partition map lost",
    "The map that says which worker holds what is gone, damaged, or an older one was put in its place, and workers have seen a \
newer one. An empty or an older map would give up what they hold, so nothing is served and nothing is changed.

Put the map back from a copy (`map.json` in the state directory), or let it be made anew: with the cluster up, `engram partition \
rebuild-map` collects what every worker has seen, shows the map that follows and whether it is proven, and writes it with \
`--yes`.";

    LossNotAccepted = "ENG-0410", Conflict, "order would lose data",
    "The order may lose changes that were acknowledged, and does not say that this is accepted. Nothing was changed. The \
message has what would be lost, as far as anybody knows.

Bring the missing worker or disk back, and nothing is lost. Where it will not come back, repeat the order with \
`--accept-data-loss REASON`; who ordered it, when, why and what it changed stays on record.";

    OrderNotNeeded = "ENG-0411", Conflict, "order not needed",
    "The order is for when nothing automatic is safe, and here something is: the partition is served, or a worker that holds all \
of it takes over by itself, or may still come back; or the map is there. Nothing was changed. `engram status` shows what the \
cluster waits for.";

    DiskFull = "ENG-0501", Failed, "disk full",
    "A write failed for lack of space; the message names the file. Nothing that was acknowledged is lost, and a worker that \
refuses writes still answers reads.

Make room and repeat what was refused: a running cluster goes on without a restart. A start needs 64 MiB per worker for a \
new part of its log.";

    StorageFailed = "ENG-0502", Failed, "storage failed",
    "The disk refused a write or a flush. After a failed flush nobody knows what is on the disk, so the worker ends rather \
than go on; at the next start it recovers what is really there. Look at the system's log for the disk's own errors.";

    Corrupt = "ENG-0503", Failed, "stored data is damaged",
    "A checksum of a log or snapshot does not match: bytes changed after they were written. Damaged data is never served. \
The message has file and position.

A torn end after a crash is told apart from damage and repaired without this error. Check the disk. A worker that does not start \
is made anew from the others where each of its partitions has another copy in sync (`engram partition list`): move its folder \
away, and it begins with an empty one. Otherwise restore a snapshot (`engram snapshot restore`).";

    CapacityExceeded = "ENG-0504", Failed, "capacity exceeded",
    "With `capacity.policy: Refuse` a partition is full, and new memories of it are refused; what is there is untouched. \
Raise `capacity.memories`, remove memories, or set `policy: Evict`.";

    KeyCollision = "ENG-0505", Conflict, "two keys with one id",
    "Two different keys hash to the same 64-bit id, or an id is given a second key. The later one is refused: taking it would \
mix two memories. Rename one of the keys. By chance it happens about once among six billion keys.";

    WrongDimension = "ENG-0506", Usage, "features of the wrong dimension",
    "A feature vector has not as many numbers as `features.dimension` of the cluster, which is fixed at creation; a cluster \
with dimension 0 takes none.";

    InvalidValue = "ENG-0507", Usage, "invalid value in a request",
    "A request holds a quality, weight, change or decay that is not a number or outside its range. The message has the field, \
the index and the value. Nothing of the request was applied; values are never clamped.";

    MemoryNotFound = "ENG-0508", NotFound, "memory not found",
    "No memory has that id or key. It may never have been there, have been removed, or have been evicted to make room.";

    SnapshotUnusable = "ENG-0509", Failed, "snapshot cannot be restored",
    "The snapshot is incomplete, damaged, of another cluster, or of one with another law or other features. The cluster is as it was.";

    StorageUnusable = "ENG-0510", Failed, "storage not usable",
    "The address of a place in a storage is wrong, nobody said who asks, or the storage refused, failed or did not answer after \
several tries; the message has what it said. What was half written there is removed, and nothing here was changed.

Of a volume: the cluster has none of that name (`spec.snapshotVolumes`), its file system refused, or a symbolic link leads out of it.

A place is `s3://BUCKET/PREFIX`. Credentials come from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or from a folder \
(`--s3-credentials`); another storage than AWS is named by `--s3-endpoint` or `AWS_ENDPOINT_URL`.";

    Unreachable = "ENG-0601", Unreachable, "cluster unreachable",
    "No worker answered at the address in the message. Is the cluster running (`engram status`), is the address right \
(`--address`, `ENGRAM_ADDRESS`)?";

    DeadlineExceeded = "ENG-0602", NotReady, "out of time",
    "No answer came in time. A write may still have been applied; the client asked what became of it and the message says. \
Repeat it with the same session and it is applied once. `engram status` shows which workers answer.";

    MessageTooLarge = "ENG-0603", Usage, "message too large",
    "A request is larger than a message may be: 4 MiB and 65,536 ids. Split it; the command line and the client library do \
so by themselves.";

    SessionExpired = "ENG-0604", Failed, "session expired",
    "The session that makes a repeated write count once was not used for too long and its record is gone. Whether the last \
write was applied is no longer known. Open a new session and look before repeating.";

    WrongCluster = "ENG-0605", Conflict, "another cluster answers",
    "The address belongs to another cluster than the one asked for: ports are reused. Nothing was read or written. Check the \
address, or name the cluster by its state directory.";

    Incompatible = "ENG-0606", Incompatible, "incompatible version",
    "Client and cluster have no protocol version in common. `engram version` shows both; use a client of the cluster's \
version.";

    Denied = "ENG-0607", Denied, "denied",
    "The caller may not do this, or does not say who it is, and nothing was done. A cluster with TLS knows its callers by a \
certificate (`--cert`) or by the token of a service account (`--token-file`; `engram -n` asks for one itself), and `spec.access` says \
which service account may do what.";

    Busy = "ENG-0608", NotReady, "cluster is busy",
    "A worker has as much to do as it accepts and refused the request at once, before anything was applied. Try again in a \
moment, with fewer requests at a time.";
}

impl Code {
    /// Finds a code by what people type: `ENG-0106`, `eng-0106` or `0106`.
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

/// Returns the long text of a code as `engram explain` prints it; `None` for a code that does not exist.
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
    fn a_code_is_found_as_people_type_it() {
        for text in ["ENG-0106", "eng-0106", "0106"] {
            let text = explain(text).expect("ENG-0106 exists");
            assert!(text.starts_with("ENG-0106: fields that do not go together\n\n"));
            assert!(text.ends_with("exit code 2: usage; a manifest that does not validate\n"));
        }
        assert_eq!(explain("ENG-9999"), None);
    }
}
