//! Explanations of the codes of calls to a cluster: cause and remedies.

pub(super) const UNREACHABLE: &str = "\
No worker responded at the address in the message. Check that the cluster is running (`engram status`) and that the address \
is right (`--address`, `ENGRAM_ADDRESS`).";

pub(super) const DEADLINE_EXCEEDED: &str = "\
No response arrived in time. A write may still have been applied; the message has its outcome where the client could \
determine it. Retried in the same session, a write is applied only once. `engram status` shows which workers respond.";

pub(super) const MESSAGE_TOO_LARGE: &str = "\
A request exceeds the maximum message size: 4 MiB and 65,536 ids. Split it; the command line and the client library do \
so automatically.";

pub(super) const SESSION_EXPIRED: &str = "\
The session that deduplicates retried writes was idle for too long and its record is gone. Whether the last \
write was applied is unknown. Open a new session and check before repeating the write.";

pub(super) const WRONG_CLUSTER: &str = "\
The address belongs to another cluster than the requested one; ports may have been reused. Nothing was read or written. Check \
the address, or select the cluster by its state directory.";

pub(super) const INCOMPATIBLE: &str = "\
Client and cluster have no common protocol version. `engram version` shows both; use a client of the cluster's \
version.";

pub(super) const DENIED: &str = "\
The caller is not authenticated or not authorized, and nothing was done. A cluster with TLS authenticates callers by a \
certificate (`--client-certificate`) or by a ServiceAccount token (`--token-file`; `engram -n` requests one itself), and `spec.access` grants \
rights to ServiceAccounts.";

pub(super) const BUSY: &str = "\
A worker is at its limit of concurrent requests and rejected this one before anything was applied. Retry after a \
moment, with fewer concurrent requests.";
