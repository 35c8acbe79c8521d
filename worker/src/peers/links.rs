//! The open links of this worker, one per other worker, and the store's way out over them.

use super::outbox::Outbox;
use super::proposals::Proposals;
use engram_memory::{Member, Ordinal};
use engram_proto::v1::Hello;
use engram_store::peer::{Envelope, Peers, Proposal};
use prometheus_client::metrics::counter::Counter;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// An open stream to one process.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) member: Member,
    pub(super) outbox: Arc<Outbox>,
    /// Why it was cut, when it was.
    cut: watch::Sender<Option<&'static str>>,
}

impl Link {
    /// Ends it. Both sides notice, and the one that dials opens another.
    pub(super) fn cut(&self, reason: &'static str) {
        self.cut.send_if_modified(|cut| cut.is_none() && cut.replace(reason).is_none());
        self.outbox.close();
    }

    /// Completes when it was cut.
    pub(super) async fn is_cut(&self) -> &'static str {
        let mut cut = self.cut.subscribe();
        // The sender lives as long as this link.
        cut.wait_for(Option::is_some).await.map_or(None, |reason| *reason).unwrap_or("the link was dropped")
    }
}

/// What was counted on links.
#[derive(Debug, Clone, Default)]
pub(crate) struct Traffic {
    pub(crate) sent_bytes: Counter,
    pub(crate) received_bytes: Counter,
    /// Links that were opened, and those that were cut for what waited.
    pub(crate) opened: Counter,
    pub(crate) overflowed: Counter,
}

/// The open links by place.
#[derive(Debug, Default)]
pub(crate) struct Links {
    open: Mutex<BTreeMap<Ordinal, Arc<Link>>>,
    pub(crate) traffic: Traffic,
}

impl Links {
    fn open(&self) -> MutexGuard<'_, BTreeMap<Ordinal, Arc<Link>>> {
        // Every change of it is whole.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An outbox whose bytes are counted here.
    pub(super) fn outbox(&self, hello: Hello) -> Arc<Outbox> {
        Outbox::new(hello, self.traffic.sent_bytes.clone())
    }

    /// Opens a link to a process that said hello, in the place of an older one; the newer incarnation where a newer process of the
    /// same disk is there already.
    pub(super) fn install(&self, member: Member, outbox: Arc<Outbox>) -> Result<Arc<Link>, engram_memory::Incarnation> {
        let mut open = self.open();
        if let Some(known) = open.get(&member.ordinal) {
            if known.member.store == member.store && known.member.incarnation > member.incarnation {
                return Err(known.member.incarnation);
            }
            known.cut("a newer stream took its place");
        }
        let link = Arc::new(Link { member, outbox, cut: watch::Sender::new(None) });
        open.insert(member.ordinal, Arc::clone(&link));
        self.traffic.opened.inc();
        Ok(link)
    }

    /// Forgets a link that ended; whether it was the one to its place.
    pub(super) fn remove(&self, link: &Arc<Link>) -> bool {
        link.cut("the stream ended");
        let mut open = self.open();
        let is_open = open.get(&link.member.ordinal).is_some_and(|known| Arc::ptr_eq(known, link));
        if is_open {
            open.remove(&link.member.ordinal);
        }
        is_open
    }

    /// Whom the links lead to.
    pub(crate) fn members(&self) -> Vec<Member> {
        self.open().values().map(|link| link.member).collect()
    }

    /// Cuts all of them.
    pub(crate) fn cut_all(&self, reason: &'static str) {
        let links: Vec<Arc<Link>> = self.open().values().cloned().collect();
        links.iter().for_each(|link| link.cut(reason));
    }

    fn send(&self, to: Ordinal, envelopes: Vec<Envelope>) {
        // Without a link there is nobody to send to; the store hears of the next one.
        let Some(link) = self.open().get(&to).cloned() else { return };
        if let Err(error @ super::outbox::Full::Bytes { .. }) = link.outbox.push(envelopes) {
            tracing::warn!(to = %link.member, %error, "cut a link whose peer does not read");
            self.traffic.overflowed.inc();
            link.cut("too much waited to be sent");
        }
    }
}

/// The store's way out: links for what stores say to each other, the coordinators for changes of the map.
pub(crate) struct WayOut {
    pub(crate) links: Arc<Links>,
    pub(crate) proposals: Arc<Proposals>,
}

impl Peers for WayOut {
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
    fn a_newer_process_takes_the_place_of_an_older_one_and_never_the_other_way_round() {
        let links = Links::default();
        let member =
            |incarnation| Member { ordinal: Ordinal(1), store: StoreId(7), incarnation: Incarnation(incarnation) };
        let install = |incarnation| links.install(member(incarnation), links.outbox(Hello::default()));
        let first = install(4).unwrap();
        assert_eq!(install(3).unwrap_err(), Incarnation(4));
        let again = install(4).unwrap();
        assert!(first.is_cut().now_or_never().is_some(), "the stream before is of no use any more");
        let newer = install(5).unwrap();
        assert!(again.is_cut().now_or_never().is_some() && newer.is_cut().now_or_never().is_none());
        assert!(!links.remove(&first), "the end of an older stream says nothing of the newer one");
        assert_eq!(links.members(), [member(5)]);
        links.cut_all("for this test");
        assert_eq!(newer.is_cut().now_or_never(), Some("for this test"));
        assert!(links.remove(&newer) && links.members().is_empty());
    }
}
