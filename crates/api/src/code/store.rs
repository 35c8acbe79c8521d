//! Explanations of the codes of the store and its disk: cause and remedies.

pub(super) const DISK_FULL: &str = "\
A write failed for lack of space; the message names the file. No acknowledged write is lost, and a worker that \
rejects writes still serves reads.

Free space and repeat the rejected writes: a running cluster resumes without a restart. A start needs 64 MiB per worker for a \
new log segment.";

pub(super) const STORAGE_FAILED: &str = "\
A write or flush to disk failed. After a failed flush the content of the disk is unknown, so the worker exits; \
at the next start it recovers what is on disk. Check the system log for disk errors.";

pub(super) const CORRUPT: &str = "\
A checksum of a log or snapshot does not match: data changed after it was written. Damaged data is never served. \
The message has file and position.

A torn tail after a crash is distinguished from damage and repaired without this error. Check the disk. If every partition of the \
worker has another in-sync replica (`engram list partitions`), move its directory away: the worker starts empty and is \
re-replicated. Otherwise restore a snapshot (`engram snapshot restore`).";

pub(super) const CAPACITY_EXCEEDED: &str = "\
With `capacity.policy: Refuse` a partition is full and rejects new memories; existing ones are unaffected. \
Raise `capacity.memories`, remove memories, or set `policy: Evict`.";

pub(super) const KEY_COLLISION: &str = "\
Two different keys hash to the same 64-bit id, or an id is given a second key. The later one is rejected, because it would \
mix two memories. Rename one of the keys. A chance collision is expected once in about six billion keys.";

pub(super) const WRONG_DIMENSION: &str = "\
The length of a feature vector differs from `features.dimension` of the cluster, which is immutable; a cluster \
with dimension 0 accepts none.";

pub(super) const INVALID_VALUE: &str = "\
A request has a quality, weight, delta or decay that is not a number or out of range. The message has the field, \
the index and the value. Nothing of the request was applied; values are never clamped.";

pub(super) const MEMORY_NOT_FOUND: &str = "\
No memory has that id or key. It may never have existed, or was removed or evicted.";

pub(super) const SNAPSHOT_UNUSABLE: &str = "\
The snapshot is incomplete, damaged, of another cluster, or of a cluster with another law or other features. The cluster is \
unchanged.";

pub(super) const STORAGE_UNUSABLE: &str = "\
The address is wrong, credentials are missing, or the object storage rejected the request, failed or did not respond after \
several attempts; the message has its response. Partially written objects are removed; the cluster is unchanged.

For a volume: the cluster has no volume of that name (`spec.snapshotVolumes`), its file system returned an error, or a symbolic \
link points outside of it.

Addresses have the form `s3://BUCKET/PREFIX`. Credentials come from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or from a \
directory (`--s3-credentials`); for storage other than AWS set `--s3-endpoint` or `AWS_ENDPOINT_URL`.";
