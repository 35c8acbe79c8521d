//! Leader election by a Lease, without comparing clocks of different machines.
//!
//! A lease has expired when it was observed unchanged for its whole duration on this process's own monotonic clock. The holder
//! stops leading well before that, counted from *before* its last renewal was sent. So two operators never lead at the same
//! time, whatever their clocks show.
//!
//! Leadership gates writes of ordinary objects, not reads. Failover does not depend on it: there compare-and-swap on the map
//! decides.

/// Duration of a lease without renewal.
pub const DURATION_MS: u64 = 15_000;
/// How long a holder leads after its last renewal. The rest of [`DURATION_MS`] is for requests in flight.
pub const RENEW_DEADLINE_MS: u64 = 10_000;
/// Interval at which the lease is renewed or read.
pub const PERIOD_MS: u64 = 2_000;

/// An observed Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseView {
    /// Identity of the holder; empty or absent after a release.
    pub holder: Option<String>,
    /// Duration without renewal.
    pub duration_ms: u64,
    /// Resource version, which changes with every write.
    pub resource_version: String,
}

/// Action on the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseAction {
    /// Create it, with this operator as the holder.
    Create,
    /// Renew it, by compare-and-swap.
    Renew,
    /// Take over an expired or released lease, by compare-and-swap.
    Claim,
    /// Wait: another operator holds it.
    Wait,
}

/// Election state of one operator.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    /// The newest observed resource version, and when it was first observed.
    observed: Option<(String, u64)>,
    /// When the last successful renewal was sent.
    renewed_at_ms: Option<u64>,
}

impl Election {
    /// Creates the state of an operator with a unique identity.
    pub fn new(me: impl Into<String>) -> Self {
        Self { identity: me.into(), observed: None, renewed_at_ms: None }
    }

    /// Decides on `lease` as read at `now_ms` of the monotonic clock.
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

    /// Records a successful write that was sent at `sent_ms`.
    pub fn renewed(&mut self, sent_ms: u64) {
        self.renewed_at_ms = Some(sent_ms);
    }

    /// Records that another operator holds the lease, or that it was released.
    pub fn lost(&mut self) {
        self.renewed_at_ms = None;
    }

    /// Returns whether this operator is the leader at `now_ms`.
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
    fn a_lease_is_claimed_only_after_it_was_unchanged_for_its_whole_duration() {
        let mut b = Election::new("b");
        assert_eq!(b.decide(None, 0), LeaseAction::Create);
        assert_eq!(b.decide(Some(&lease("a", 1)), 0), LeaseAction::Wait);
        assert_eq!(b.decide(Some(&lease("a", 1)), DURATION_MS - 1), LeaseAction::Wait);
        assert_eq!(b.decide(Some(&lease("a", 2)), DURATION_MS), LeaseAction::Wait, "it was renewed");
        assert_eq!(b.decide(Some(&lease("a", 2)), 2 * DURATION_MS - 1), LeaseAction::Wait);
        assert_eq!(b.decide(Some(&lease("a", 2)), 2 * DURATION_MS), LeaseAction::Claim);
        assert_eq!(b.decide(Some(&lease("", 3)), 2 * DURATION_MS), LeaseAction::Claim, "it was released");
    }

    #[test]
    fn two_operators_never_lead_at_the_same_time() {
        // The last renewal of `a` was sent at 1,000 and observed by `b` no earlier; then `a` is partitioned.
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
