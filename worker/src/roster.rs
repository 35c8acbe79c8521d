//! Where the coordinators are: addresses, and what the names among them stand for now.
//!
//! Behind one name there may be several, which come and go: every address of it is a coordinator. A name that is not answered for keeps
//! the addresses that it had.

use crate::shared::Shared;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Between questions: at first, while a name stands for nothing, and later. A coordinator that moved is missed no longer than that.
const ASK_SOON: Duration = Duration::from_millis(200);
const ASK: Duration = Duration::from_secs(2);
/// How long an answer may take.
const DEADLINE: Duration = Duration::from_secs(2);

/// The coordinators of this moment, each as `host:port`.
pub(crate) struct Roster {
    addresses: watch::Sender<Vec<String>>,
    names: Vec<String>,
    fixed: Vec<String>,
}

impl Roster {
    /// Names are looked up where `are_looked_up`; otherwise they are taken as they are.
    pub(crate) fn new(coordinators: &[String], are_looked_up: bool) -> Self {
        let is_name = |text: &String| are_looked_up && text.parse::<SocketAddr>().is_err();
        let (names, fixed): (Vec<_>, Vec<_>) = coordinators.iter().cloned().partition(is_name);
        Self { addresses: watch::Sender::new(fixed.clone()), names, fixed }
    }

    pub(crate) fn now(&self) -> Vec<String> {
        self.addresses.borrow().clone()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Vec<String>> {
        self.addresses.subscribe()
    }

    fn tell(&self, known: &BTreeMap<&str, BTreeSet<SocketAddr>>) {
        let found: BTreeSet<_> = known.values().flatten().map(SocketAddr::to_string).collect();
        let all: Vec<_> = self.fixed.iter().cloned().chain(found).collect();
        self.addresses.send_if_modified(|addresses| {
            let news = *addresses != all;
            if news {
                tracing::info!(coordinators = ?all, "coordinators by name");
                *addresses = all;
            }
            news
        });
    }
}

/// Keeps the roster up to date. Never ends.
pub(crate) async fn follow(shared: Arc<Shared>) {
    let roster = &shared.roster;
    if roster.names.is_empty() {
        return std::future::pending().await;
    }
    let mut known: BTreeMap<&str, BTreeSet<SocketAddr>> = BTreeMap::new();
    loop {
        for name in &roster.names {
            match timeout(DEADLINE, lookup_host(name)).await {
                Ok(Ok(found)) => drop(known.insert(name, found.collect())),
                Ok(Err(error)) => tracing::debug!(name, %error, "the name of the coordinators is not known"),
                Err(_) => tracing::debug!(name, "nobody says what the name of the coordinators stands for"),
            }
        }
        roster.tell(&known);
        let is_complete =
            roster.names.iter().all(|name| known.get(name.as_str()).is_some_and(|found| !found.is_empty()));
        sleep(if is_complete { ASK } else { ASK_SOON }).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_all_its_addresses_and_an_address_for_itself() {
        let coordinators = ["10.0.0.1:7440".to_owned(), "engram:7440".to_owned()];
        let roster = Roster::new(&coordinators, true);
        assert_eq!(roster.now(), ["10.0.0.1:7440"], "what a name stands for is not known yet");
        let mut heard = roster.subscribe();
        heard.mark_unchanged();
        let found = ["10.0.0.3:7440", "10.0.0.2:7440"].map(|it| it.parse().unwrap());
        roster.tell(&BTreeMap::from([("engram:7440", found.into())]));
        assert_eq!(roster.now(), ["10.0.0.1:7440", "10.0.0.2:7440", "10.0.0.3:7440"]);
        assert!(heard.has_changed().unwrap());
        heard.mark_unchanged();
        roster.tell(&BTreeMap::from([("engram:7440", found.into())]));
        assert!(!heard.has_changed().unwrap(), "the same is no news");
        assert_eq!(Roster::new(&coordinators, false).now(), coordinators, "a simulated network knows no names");
    }
}
