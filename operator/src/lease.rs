//! Who of several operators writes: a Lease, judged without comparing the clocks of two machines.
//!
//! A lease has run out when it was seen unchanged for its whole duration on this process's own monotonic clock. Whoever
//! holds it stops to lead well before that, counted from *before* its last renewal was sent. Two operators that both
//! believe to lead can so exist for no moment, whatever their clocks say.
//!
//! Leading gates writes of ordinary objects, not reads: every operator keeps its view warm. Failover does not ask who
//! leads; there compare-and-swap on the map decides.

/// How long a lease holds that nobody renews.
pub const DURATION_MS: u64 = 15_000;
/// How long after its last renewal a holder still leads. The rest of [`DURATION_MS`] is for requests on their way.
pub const RENEW_DEADLINE_MS: u64 = 10_000;
/// How often the lease is renewed, or looked at.
pub const PERIOD_MS: u64 = 2_000;

/// A Lease as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseView {
    /// Who holds it; empty or absent after it was given back.
    pub holder: Option<String>,
    /// How long it holds without renewal.
    pub duration_ms: u64,
    /// What changes with every write.
    pub resource_version: String,
}

/// What is done about the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseAction {
    /// There is none: make it, with this operator as its holder.
    Create,
    /// It is ours: renew it, comparing with what was seen.
    Renew,
    /// It is nobody's any more: take it, comparing with what was seen.
    Claim,
    /// It is another's: look again.
    Wait,
}

/// One operator's part in the election.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    /// The newest write that was seen, and when it was seen first.
    observed: Option<(String, u64)>,
    /// When the last renewal that succeeded was sent.
    renewed_at_ms: Option<u64>,
}

impl Election {
    /// Takes part as `me`, a name that no other process has: that of its pod.
    pub fn new(me: impl Into<String>) -> Self {
        Self { identity: me.into(), observed: None, renewed_at_ms: None }
    }

    /// Judges `lease` as it was read at `now_ms` of the monotonic clock.
    pub fn decide(&mut self, lease: Option<&LeaseView>, now_ms: u64) -> LeaseAction {
        let Some(lease) = lease else { return LeaseAction::Create };
        let since = match &self.observed {
            Some((version, since)) if *version == lease.resource_version => *since,
            _ => now_ms,
        };
        self.observed = Some((lease.resource_version.clone(), since));
        match lease.holder.as_deref() {
            Some(holder) if holder == self.identity => LeaseAction::Renew,
            None | Some("") => LeaseAction::Claim,
            Some(_) if now_ms.saturating_sub(since) >= lease.duration_ms => LeaseAction::Claim,
            Some(_) => LeaseAction::Wait,
        }
    }

    /// Notes that a write of the lease succeeded that was sent at `sent_ms`.
    pub fn renewed(&mut self, sent_ms: u64) {
        self.renewed_at_ms = Some(sent_ms);
    }

    /// Notes that another holds the lease, or that it was given back.
    pub fn lost(&mut self) {
        self.renewed_at_ms = None;
    }

    /// Whether this operator may write at `now_ms`.
    pub fn is_leader(&self, now_ms: u64) -> bool {
        self.renewed_at_ms.is_some_and(|renewed| now_ms.saturating_sub(renewed) < RENEW_DEADLINE_MS)
    }
}

#[cfg(test)]
mod tests {
    use super::{DURATION_MS, Election, LeaseAction, LeaseView, RENEW_DEADLINE_MS};

    fn lease(holder: &str, version: u64) -> LeaseView {
        LeaseView { holder: Some(holder.into()), duration_ms: DURATION_MS, resource_version: version.to_string() }
    }

    #[test]
    fn a_lease_is_taken_only_after_it_was_seen_unchanged_for_its_whole_duration() {
        let mut b = Election::new("b");
        assert_eq!(b.decide(None, 0), LeaseAction::Create);
        assert_eq!(b.decide(Some(&lease("a", 1)), 0), LeaseAction::Wait);
        assert_eq!(b.decide(Some(&lease("a", 1)), DURATION_MS - 1), LeaseAction::Wait);
        assert_eq!(b.decide(Some(&lease("a", 2)), DURATION_MS), LeaseAction::Wait, "it was renewed");
        assert_eq!(b.decide(Some(&lease("a", 2)), 2 * DURATION_MS - 1), LeaseAction::Wait);
        assert_eq!(b.decide(Some(&lease("a", 2)), 2 * DURATION_MS), LeaseAction::Claim);
        assert_eq!(b.decide(Some(&lease("", 3)), 2 * DURATION_MS), LeaseAction::Claim, "it was given back");
    }

    #[test]
    fn no_two_lead_at_any_moment() {
        // The last renewal of `a` was sent at 1,000 and seen by `b` no earlier; then `a` is cut off.
        let (mut a, mut b) = (Election::new("a"), Election::new("b"));
        a.decide(Some(&lease("a", 1)), 900);
        a.renewed(1_000);
        assert!(a.is_leader(1_000 + RENEW_DEADLINE_MS - 1));
        for now in (1_000..40_000).step_by(100) {
            if b.decide(Some(&lease("a", 2)), now) == LeaseAction::Claim {
                b.renewed(now);
            }
            assert!(!(a.is_leader(now) && b.is_leader(now)), "both lead at {now}");
        }
        assert!(b.is_leader(39_900) || b.decide(Some(&lease("a", 2)), 40_000) == LeaseAction::Claim);
        b.lost();
        assert!(!b.is_leader(39_900));
    }
}
