//! Explanations of the codes of runs and their sources: cause and remedies.

pub(super) const CLUSTER_NOT_FOUND: &str = "\
A run refers to a cluster that is neither in the file nor the connected cluster. `clusterRef.name` must be its \
`metadata.name`; `engram status` shows the name of the connected cluster.";

pub(super) const SOURCE_UNREADABLE: &str = "\
The file or repository of a run's source cannot be opened, or an object in object storage does not exist. The message has its \
full path or address and the cause. Relative paths are relative to the manifest, not to the current directory.

A run that is submitted again continues with its next epoch. If the message names an epoch, the input differs in it from what the run \
has learned: restore that epoch, or learn all of the input by a run under another name, which applies its epochs again.";

pub(super) const COLUMN_NOT_FOUND: &str = "\
`columns` names a column that the file does not have, has several times, or has in a type or compression that cannot be read. \
The message lists the columns, or what is allowed. Names are case-sensitive.";

pub(super) const BAD_EVENT: &str = "\
A row of the source is invalid: epochs must not decrease, qualities must be in 0 to 1 and weight changes in -1 to 1, keys \
have 1 to 1,024 bytes, ids are integers. The message has the line (or row group and row), the column and the value.

Nothing of that epoch was applied; earlier epochs were, and the run has ended. Correct the file and submit the run again: it goes on \
at that epoch. Earlier epochs must be unchanged (they are compared by their fingerprints); a run under a new name would apply them again.";

pub(super) const REVISION_NOT_FOUND: &str = "\
`git.revision` names no commit of the repository. A shallow clone has only the newest ones: `git fetch --unshallow` \
brings the rest.";

pub(super) const GROUPS_IN_USE: &str = "\
A synthetic run creates memories in groups 0 and 1 and measures those groups; the cluster already has other memories \
in them. Use a separate cluster, or remove those memories first.";

pub(super) const RUN_UNKNOWN: &str = "\
The cluster has no run of that name. `engram list runs` shows the runs of the cluster.";

pub(super) const RUN_FAILED: &str = "\
A run ended with the error in the message. Its finished epochs stay applied. `engram describe run NAME` shows \
its progress. Submitted again, a run of kind Memory that failed or was cancelled continues with its next epoch.";
