//! Open links of this worker, one per other worker, through which the store sends.

use super::outbox::Outbox;
use super::proposals::Proposals;
use engram_memory::{Member, Ordinal};
use engram_proto::v1::Hello;
use engram_store::peer::{Envelope, Peers, Proposal};
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// An open stream to one process.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) member: Member,
    pub(super) outbox: Arc<Outbox>,
    /// Reason why the link was closed.
    close_reason: watch::Sender<Option<&'static str>>,
}

impl Link {
    /// Closes the link. Both sides notice, and the one that dials opens another.
    pub(super) fn close(&self, reason: &'static str) {
        self.close_reason
            .send_if_modified(|close_reason| close_reason.is_none() && close_reason.replace(reason).is_none());
        self.outbox.close();
    }

    /// Completes when the link is closed.
    pub(super) async fn closed(&self) -> &'static str {
        let mut close_reason = self.close_reason.subscribe();
        // The sender lives as long as this link.
        close_reason.wait_for(Option::is_some).await.map_or(None, |reason| *reason).unwrap_or("the link was dropped")
    }
}

/// Traffic counters of links.
#[derive(Debug, Clone, Default)]
pub(crate) struct Traffic {
    pub(crate) sent_bytes: Counter,
    pub(crate) received_bytes: Counter,
    /// Links that were opened, and those that were closed because their queue overflowed.
    pub(crate) opened: Counter,
    pub(crate) overflowed: Counter,
}

/// Open links by ordinal.
#[derive(Debug, Default)]
pub(crate) struct Links {
    open: Mutex<BTreeMap<Ordinal, Arc<Link>>>,
    pub(crate) traffic: Traffic,
}

impl Links {
    fn open(&self) -> MutexGuard<'_, BTreeMap<Ordinal, Arc<Link>>> {
        self.open.lock()
    }

    /// Creates an outbox whose bytes are counted here.
    pub(super) fn outbox(&self, hello: Hello) -> Arc<Outbox> {
        Outbox::new(hello, self.traffic.sent_bytes.clone())
    }

    /// Opens a link to a process and closes an older one. Fails with the newer incarnation if a newer process of the same store has
    /// a link.
    pub(super) fn install(&self, member: Member, outbox: Arc<Outbox>) -> Result<Arc<Link>, engram_memory::Incarnation> {
        let mut open = self.open();
        if let Some(existing) = open.get(&member.ordinal) {
            if existing.member.store == member.store && existing.member.incarnation > member.incarnation {
                return Err(existing.member.incarnation);
            }
            existing.close("replaced by a newer stream");
        }
        let link = Arc::new(Link { member, outbox, close_reason: watch::Sender::new(None) });
        open.insert(member.ordinal, Arc::clone(&link));
        self.traffic.opened.inc();
        Ok(link)
    }

    /// Removes a link that ended; returns whether it was the current one.
    pub(super) fn remove(&self, link: &Arc<Link>) -> bool {
        link.close("the stream ended");
        let mut open = self.open();
        let is_open = open.get(&link.member.ordinal).is_some_and(|existing| Arc::ptr_eq(existing, link));
        if is_open {
            open.remove(&link.member.ordinal);
        }
        is_open
    }

    /// Returns the members with an open link.
    pub(crate) fn members(&self) -> Vec<Member> {
        self.open().values().map(|link| link.member).collect()
    }

    /// Closes all links.
    pub(crate) fn close_all(&self, reason: &'static str) {
        let links: Vec<Arc<Link>> = self.open().values().cloned().collect();
        links.iter().for_each(|link| link.close(reason));
    }

    fn send(&self, to: Ordinal, envelopes: Vec<Envelope>) {
        // Without a link the envelopes are dropped; the store learns when the next one opens.
        let Some(link) = self.open().get(&to).cloned() else { return };
        if let Err(error @ super::outbox::OutboxError::Bytes { .. }) = link.outbox.push(envelopes) {
            tracing::warn!(to = %link.member, %error, "closed peer link: peer does not read");
            self.traffic.overflowed.inc();
            link.close("send queue overflowed");
        }
    }
}

/// The store's outgoing channels: links to other stores, coordinators for map changes.
pub(crate) struct StorePeers {
    pub(crate) links: Arc<Links>,
    pub(crate) proposals: Arc<Proposals>,
}

impl Peers for StorePeers {
    fn send(&mut self, to: Ordinal, envelopes: Vec<Envelope>) {
        self.links.send(to, envelopes);
    }

    fn propose(&mut self, proposals: Vec<Proposal>) {
        self.proposals.add(proposals);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_memory::{Incarnation, StoreId};
    use futures::FutureExt as _;

    #[test]
    fn a_link_of_a_newer_process_replaces_an_older_one_and_never_the_reverse() {
        let links = Links::default();
        let member =
            |incarnation| Member { ordinal: Ordinal(1), store: StoreId(7), incarnation: Incarnation(incarnation) };
        let install = |incarnation| links.install(member(incarnation), links.outbox(Hello::default()));
        let first = install(4).unwrap();
        assert_eq!(install(3).unwrap_err(), Incarnation(4));
        let again = install(4).unwrap();
        assert!(first.closed().now_or_never().is_some(), "the previous stream is closed");
        let newer = install(5).unwrap();
        assert!(again.closed().now_or_never().is_some() && newer.closed().now_or_never().is_none());
        assert!(!links.remove(&first), "the end of an older stream does not affect the newer one");
        assert_eq!(links.members(), [member(5)]);
        links.close_all("for this test");
        assert_eq!(newer.closed().now_or_never(), Some("for this test"));
        assert!(links.remove(&newer) && links.members().is_empty());
    }
}
