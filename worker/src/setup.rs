//! What a worker was started with: its options, its identity and its certificates. Nothing of it changes while the process runs.

use crate::engine::device::Device;
use crate::options::Options;
use crate::peers::HelloContext;
use crate::service::edge::authorization::AccountAuthorizer;
use engram_client::Network;
use engram_identity::{ExpectedPeer, Keys, Reason, Role};
use engram_memory::{Member, Ordinal, Shape};
use engram_store::Clock;
use std::sync::Arc;

/// Facts of one worker process.
pub(crate) struct Setup {
    pub(crate) options: Options,
    pub(crate) shape: Shape,
    pub(crate) member: Member,
    /// Identity of this worker in hellos.
    pub(crate) hello: HelloContext,
    /// The store uses the same clock.
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) network: Network,
    /// Certificate of this process, under TLS.
    pub(crate) keys: Option<Arc<Keys>>,
    /// Authorization of client tokens.
    pub(crate) accounts: Option<Arc<AccountAuthorizer>>,
    /// Devices that execute passes.
    pub(crate) device: Device,
    /// What was recovered from the disk, for people.
    pub(crate) recovery: String,
}

impl Setup {
    /// Reads the files of client tokens, if the options name some, and watches them.
    pub(crate) fn open_accounts(options: &Options) -> Option<Arc<AccountAuthorizer>> {
        let files = options.tls.as_ref().and_then(|tls| tls.tokens.as_ref())?;
        let accounts = Arc::new(AccountAuthorizer::open(files, options.cluster));
        accounts.watch_files();
        Some(accounts)
    }

    pub(crate) const fn ordinal(&self) -> Ordinal {
        self.member.ordinal
    }

    /// Returns the network for connections to coordinators, which verifies their role under TLS.
    pub(crate) fn to_coordinators(&self) -> Network {
        self.network.for_peer(ExpectedPeer::any(Role::Coordinator))
    }

    /// Counts an authentication or authorization failure.
    pub(crate) fn count_refusal(&self, reason: Reason) {
        if let Some(keys) = &self.keys {
            keys.refusals().count(reason);
        }
    }
}
