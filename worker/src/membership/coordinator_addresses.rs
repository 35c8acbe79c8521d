//! Addresses of the coordinators, resolved from names.
//!
//! A name may resolve to several addresses, which change; each is a coordinator. A name that fails to resolve keeps its last
//! addresses.

use crate::shared::Shared;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Lookup interval while a name has no address, and afterwards. A coordinator that moved is found within that time.
const FAST_LOOKUP_INTERVAL: Duration = Duration::from_millis(200);
const LOOKUP_INTERVAL: Duration = Duration::from_secs(2);
/// Deadline of one lookup.
const DEADLINE: Duration = Duration::from_secs(2);

/// Current coordinators, each as `host:port`.
pub(crate) struct CoordinatorAddresses {
    addresses: watch::Sender<Vec<String>>,
    names: Vec<String>,
    fixed: Vec<String>,
}

impl CoordinatorAddresses {
    /// Resolves names if `resolve` is set; otherwise uses them as addresses.
    pub(crate) fn new(coordinators: &[String], resolve: bool) -> Self {
        let is_name = |text: &String| resolve && text.parse::<SocketAddr>().is_err();
        let (names, fixed): (Vec<_>, Vec<_>) = coordinators.iter().cloned().partition(is_name);
        Self { addresses: watch::Sender::new(fixed.clone()), names, fixed }
    }

    pub(crate) fn current(&self) -> Vec<String> {
        self.addresses.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Vec<String>> {
        self.addresses.subscribe()
    }

    fn publish(&self, resolved: &BTreeMap<&str, BTreeSet<SocketAddr>>) {
        let resolved_addresses: BTreeSet<_> = resolved.values().flatten().map(SocketAddr::to_string).collect();
        let all: Vec<_> = self.fixed.iter().cloned().chain(resolved_addresses).collect();
        self.addresses.send_if_modified(|addresses| {
            let news = *addresses != all;
            if news {
                tracing::info!(coordinators = ?all, "coordinator addresses changed");
                *addresses = all;
            }
            news
        });
    }
}

/// Resolves the names periodically. Never returns.
pub(crate) async fn watch_names(shared: Arc<Shared>) {
    let addresses = &shared.membership.coordinators().addresses();
    if addresses.names.is_empty() {
        return std::future::pending().await;
    }
    let mut resolved: BTreeMap<&str, BTreeSet<SocketAddr>> = BTreeMap::new();
    loop {
        for name in &addresses.names {
            match timeout(DEADLINE, lookup_host(name)).await {
                Ok(Ok(resolved_addresses)) => drop(resolved.insert(name, resolved_addresses.collect())),
                Ok(Err(error)) => tracing::debug!(name, %error, "failed to resolve coordinator name"),
                Err(_) => tracing::debug!(name, "timed out resolving coordinator name"),
            }
        }
        addresses.publish(&resolved);
        let is_complete = addresses
            .names
            .iter()
            .all(|name| resolved.get(name.as_str()).is_some_and(|resolved_addresses| !resolved_addresses.is_empty()));
        sleep(if is_complete { LOOKUP_INTERVAL } else { FAST_LOOKUP_INTERVAL }).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_resolve_to_all_their_addresses() {
        let coordinators = ["10.0.0.1:7440".to_owned(), "engram:7440".to_owned()];
        let addresses = CoordinatorAddresses::new(&coordinators, true);
        assert_eq!(addresses.current(), ["10.0.0.1:7440"], "names are not resolved yet");
        let mut receiver = addresses.subscribe();
        receiver.mark_unchanged();
        let resolved_addresses = ["10.0.0.3:7440", "10.0.0.2:7440"].map(|it| it.parse().unwrap());
        addresses.publish(&BTreeMap::from([("engram:7440", resolved_addresses.into())]));
        assert_eq!(addresses.current(), ["10.0.0.1:7440", "10.0.0.2:7440", "10.0.0.3:7440"]);
        assert!(receiver.has_changed().unwrap());
        receiver.mark_unchanged();
        addresses.publish(&BTreeMap::from([("engram:7440", resolved_addresses.into())]));
        assert!(!receiver.has_changed().unwrap(), "equal addresses are not published again");
        assert_eq!(
            CoordinatorAddresses::new(&coordinators, false).current(),
            coordinators,
            "names are not resolved on a simulated network"
        );
    }
}
