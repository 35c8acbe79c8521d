//! What a coordinator should do about the map, given what it observed.
//!
//! ```text
//! no map ─> create, when all its workers are here
//! map ────> failover: a dead primary's partitions get another candidate, a restarted one's go on
//!           copies:   what has too few gets more, what has too many gets rid of one, full workers give to empty ones
//!           balance:  primaryship moves to those that lead little
//! ```
//!
//! Decides nothing by itself that needs to be right for safety: every change is checked against the entry that it replaces,
//! and a wrong guess costs a hand-over. A worker that comes with another disk under an old name is *absent*: what it held is
//! on the disk that is missing, and nothing is formatted.
//!
//! Invariant: a decision that was carried out is not made again, and repeated decisions come to an end.

mod absent;
mod balance;
mod copies;
mod failover;
mod last_resort;
#[cfg(test)]
mod tests;

pub use absent::{ABSENT_MS, absent};
pub use last_resort::is_forsaken;

use crate::change::Change;
use crate::detector::{Standing, Timing};
use crate::map::{Entry, PartitionMap};
use crate::place::{Candidate, place};
use crate::replica::{Defect, is_planted};
use copies::Copies;
use engram_memory::{ClusterId, Incarnation, Member, Ordinal, PartitionId};
use std::collections::{BTreeMap, BTreeSet};

/// What a coordinator wants, and what it heard since its own start.
#[derive(Debug, Clone)]
pub struct Observed {
    /// The cluster.
    pub cluster: ClusterId,
    /// Partitions of a new map.
    pub partitions: u32,
    /// Workers that the cluster shall have: ordinals 0 to this - 1. Those above are emptied.
    pub workers: u32,
    /// Copies that each partition shall have.
    pub copies: u32,
    /// Every log write is durable before it counts.
    pub keeps_all: bool,
    /// Now, by the clock of the detector.
    pub now_ms: u64,
    /// How long the coordinator has been running.
    pub age_ms: u64,
    /// The detector's.
    pub timing: Timing,
    /// How long a lone copy waits for a partner that died with proof and is started again.
    pub restart_grace_ms: u64,
    /// Copies that a worker may be taking, and that it may be giving, at a time.
    pub copies_at_once: usize,
    /// Who was heard, one per ordinal.
    pub members: Vec<Seen>,
    /// Who was not, and is no longer waited for.
    pub absent: BTreeSet<Ordinal>,
    /// Who shall be emptied.
    pub draining: BTreeSet<Ordinal>,
    /// More is silent than one fault explains.
    pub braked: bool,
    /// When partitions were last failed over.
    pub failed_over_ms: Option<u64>,
}

/// A worker as the coordinator sees it.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The process that was heard last.
    pub member: Member,
    /// Its word: nothing that this incarnation or a later one wrote has been lost.
    pub lossless_since: Incarnation,
    /// What fails together with it.
    pub domain: String,
    /// What is thought of it.
    pub standing: Standing,
    /// It was heard a moment ago: what is not urgent rests on such alone.
    pub fresh: bool,
    /// Somebody starts it again when it ends.
    pub supervised: bool,
    /// It failed over too often to lead.
    pub damped: bool,
    /// Since when it has been about to be stopped, by its own word: it gets no copies, and those that it leaves come back with it.
    pub leaving_since_ms: Option<u64>,
    /// Since when this very process has been heard.
    pub heard_since_ms: u64,
    /// Whom it takes for dead.
    pub suspects: BTreeSet<Ordinal>,
}

/// How long a process that was started again may have to wait before it serves: for the end of the read leases that the process before
/// it may have granted.
pub const LEASES_END_MS: u64 = 1_200;

impl Seen {
    /// Whether it serves what it is given as soon as it has promised to.
    fn serves_at_once(&self, now_ms: u64) -> bool {
        self.member.incarnation == Incarnation(1) || now_ms >= self.heard_since_ms + LEASES_END_MS
    }
}

/// What to do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Write this map, the first, if there is none.
    pub first: Option<PartitionMap>,
    /// Change these entries; at most one change each.
    pub changes: Vec<(PartitionId, Change)>,
    /// Planned moves of primaryship: all that are wanted now, whether new or not.
    pub hand_overs: Vec<HandOver>,
    /// What keeps the cluster from serving everything with all its copies, in words.
    pub conditions: Vec<String>,
}

/// The primary of a partition shall give it to a member in sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HandOver {
    /// Partition.
    pub partition: PartitionId,
    /// Who shall lead it.
    pub to: Ordinal,
}

/// Decides.
pub fn decide(map: Option<&PartitionMap>, observed: &Observed) -> Plan {
    let Some(map) = map else { return create(observed) };
    let scene = Scene { map, observed };
    let mut plan = Plan::default();
    let mut primaries = scene.primaries();
    let settled = failover::plan(&scene, &mut primaries, &mut plan);
    let mut copies = Copies::of(&scene, &settled);
    copies.heal(&mut plan);
    copies.release(&primaries, &mut plan);
    // Comfort comes after need.
    if plan.changes.is_empty() && !copies.lacks() && !observed.braked {
        copies.spread(&mut plan);
        if !copies.moves() {
            balance::plan(&scene, &settled, &mut primaries, &mut plan);
        }
    }
    copies.report(&mut plan);
    if observed.braked {
        plan.conditions.push(
            "more workers are silent than one fault explains: nothing is copied, and a partition moves only on its backup's word"
                .to_owned(),
        );
    }
    plan
}

fn create(observed: &Observed) -> Plan {
    let wait = |why: String| Plan { conditions: vec![why], ..Plan::default() };
    let heard = |ordinal: u32| observed.members.iter().find(|seen| seen.member.ordinal == Ordinal(ordinal));
    let missing: Vec<_> =
        (0..observed.workers).filter(|&ordinal| heard(ordinal).is_none_or(|seen| !seen.standing.is_alive())).collect();
    if !missing.is_empty() {
        return wait(format!("waiting for workers {missing:?} to form the cluster"));
    }
    let candidates: Vec<_> = (0..observed.workers)
        .filter_map(heard)
        .map(|seen| Candidate { ordinal: seen.member.ordinal, domain: seen.domain.clone() })
        .collect();
    let placed = match place(observed.partitions, &candidates, observed.copies as usize) {
        Ok(placed) => placed,
        Err(error) => return wait(error.to_string()),
    };
    let member = |ordinal: &Ordinal| heard(ordinal.0).expect("placed on a worker that was heard").member;
    let partitions = placed.iter().map(|chosen| Entry::first(chosen.iter().map(member).collect())).collect();
    Plan { first: Some(PartitionMap { cluster: observed.cluster, version: 1, partitions }), ..Plan::default() }
}

/// What became of a process that the map names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Its disk is here and somebody runs on it, perhaps a newer process.
    Living,
    /// Nobody knows yet.
    Doubtful,
    /// It, or its disk, is gone; for how long that has been known.
    Lost { for_ms: u64 },
}

/// The map beside what was observed.
struct Scene<'a> {
    map: &'a PartitionMap,
    observed: &'a Observed,
}

impl<'a> Scene<'a> {
    fn seen(&self, ordinal: Ordinal) -> Option<&'a Seen> {
        self.observed.members.iter().find(|seen| seen.member.ordinal == ordinal)
    }

    /// Whether a place shall be emptied.
    fn is_draining(&self, ordinal: Ordinal) -> bool {
        ordinal.0 >= self.observed.workers || self.observed.draining.contains(&ordinal)
    }

    /// The workers that may hold copies.
    fn holders(&self) -> impl Iterator<Item = &'a Seen> {
        self.observed.members.iter().filter(|seen| seen.standing.is_alive() && !self.is_draining(seen.member.ordinal))
    }

    /// Whether a worker is about to be stopped.
    fn is_leaving(&self, ordinal: Ordinal) -> bool {
        self.seen(ordinal).is_some_and(|seen| seen.leaving_since_ms.is_some())
    }

    fn domain(&self, ordinal: Ordinal) -> Option<&'a str> {
        self.seen(ordinal).map(|seen| seen.domain.as_str())
    }

    fn shares_domain(&self, ordinal: Ordinal, others: impl IntoIterator<Item = Ordinal>) -> bool {
        others.into_iter().any(|other| other != ordinal && self.domain(other) == self.domain(ordinal))
    }

    /// What became of a member of `entry`, which the second witnesses are the copies of.
    fn fate(&self, entry: &Entry, member: &Member) -> Fate {
        let observed = self.observed;
        let Some(seen) = self.seen(member.ordinal) else {
            let lost = observed.absent.contains(&member.ordinal);
            return if lost { Fate::Lost { for_ms: observed.age_ms } } else { Fate::Doubtful };
        };
        if seen.member.store != member.store && !is_planted(Defect::EligibleByOrdinal) {
            return Fate::Lost { for_ms: observed.age_ms };
        }
        if seen.member.incarnation < member.incarnation {
            // What was heard is older than the map.
            return Fate::Doubtful;
        }
        let witness = || {
            let says_so = |seen: &Seen| seen.standing.is_alive() && seen.suspects.contains(&member.ordinal);
            entry.candidates().filter_map(|other| self.seen(other.ordinal)).any(says_so)
        };
        match seen.standing {
            Standing::Alive => Fate::Living,
            standing if standing.is_confirmed(witness(), observed.braked, observed.now_ms, &observed.timing) => {
                let since_ms = standing.since_ms().expect("it is not alive");
                Fate::Lost { for_ms: observed.now_ms.saturating_sub(since_ms) }
            }
            _ => Fate::Doubtful,
        }
    }

    /// The process that runs on a member's disk, if it lives and holds all that was acknowledged.
    fn eligible(&self, entry: &Entry, member: &Member) -> Option<&'a Seen> {
        let seen = self.seen(member.ordinal).filter(|_| self.fate(entry, member) == Fate::Living)?;
        entry.holds_all(&seen.member, seen.lossless_since, self.observed.keeps_all).then_some(seen)
    }

    /// Whether a worker can be given something to lead without a pause.
    fn serves_at_once(&self, ordinal: Ordinal) -> bool {
        self.seen(ordinal).is_some_and(|seen| seen.standing.is_alive() && seen.serves_at_once(self.observed.now_ms))
    }

    /// How many partitions each worker leads.
    fn primaries(&self) -> BTreeMap<Ordinal, usize> {
        let mut primaries = BTreeMap::new();
        self.map.partitions.iter().for_each(|entry| *primaries.entry(entry.primary).or_default() += 1);
        primaries
    }
}

/// A list of workers in words.
fn workers(ordinals: impl IntoIterator<Item = Ordinal>) -> String {
    let names: Vec<_> = ordinals.into_iter().map(|ordinal| ordinal.to_string()).collect();
    format!("worker{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

/// "1 partition", "2 partitions".
fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}
