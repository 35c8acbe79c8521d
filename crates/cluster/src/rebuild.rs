//! What a person may order when nothing automatic is safe: a map that is lost, made anew from what workers have seen of it, and
//! a copy that is not in sync, made to lead.
//!
//! A lost map is *proven* where nothing can have happened after what was seen last: every worker has answered, from the disks that
//! were seen, and none of them has promised a later term. Whoever leads a term has promised it on its disk before it
//! acknowledges anything of it, so a later leader would show. Everything else is a guess, and a person's to make.

use crate::map::{Entry, PartitionMap};
use engram_memory::{ClusterId, Lsn, Member, Ordinal, PartitionId, StoreId, Term};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Where the terms of what was guessed begin: far above what a worker that did not answer can have promised meanwhile, since a
/// term is raised at most ten times a second, so that it steps down when it hears of it.
pub const TERM_LEAP: u64 = 1_000_000;
/// The same for the version of a map that is made anew.
pub const VERSION_LEAP: u64 = 1_000_000;

/// What a worker knows of the past.
#[derive(Debug, Clone)]
pub struct Testimony {
    /// Who tells, as the process that runs.
    pub member: Member,
    /// Newest map that its disk has seen.
    pub seen: Option<PartitionMap>,
    /// Its copies, indexed by partition.
    pub copies: Vec<Copy>,
}

/// A copy of one partition as a disk holds it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copy {
    /// Highest term promised.
    pub promised: Term,
    /// Last record in the log; 0 = nothing.
    pub last: Lsn,
    /// Term that wrote it.
    pub last_term: Term,
    /// It is not whole, and leads nobody.
    pub damaged: bool,
}

/// A map that was made anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebuilt {
    /// The map; its version is above every one that was seen.
    pub map: PartitionMap,
    /// What was seen last of each partition.
    pub seen: Vec<Option<Entry>>,
    /// By partition: why it is a guess; absent = it is proven.
    pub doubts: BTreeMap<PartitionId, String>,
}

/// The copy to lead when none that is in sync is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chosen {
    /// Who holds it.
    pub member: Member,
    /// The copy.
    pub copy: Copy,
}

/// Makes a map anew from what workers tell. `expected` are the places that workers are known for; with nobody's word there is
/// no map.
pub fn rebuild(
    cluster: ClusterId,
    partitions: u32,
    expected: &BTreeSet<Ordinal>,
    told: &[Testimony],
) -> Option<Rebuilt> {
    let fits = |map: &&PartitionMap| map.cluster == cluster && map.partitions.len() == partitions as usize;
    let newest = told.iter().filter_map(|it| it.seen.as_ref()).filter(fits).max_by_key(|map| map.version);
    let absent = absent(newest, expected, told);
    let mut rebuilt = Rebuilt {
        map: PartitionMap {
            cluster,
            version: newest.map_or(0, |map| map.version) + VERSION_LEAP,
            partitions: Vec::with_capacity(partitions as usize),
        },
        seen: Vec::with_capacity(partitions as usize),
        doubts: BTreeMap::new(),
    };
    for partition in (0..partitions).map(PartitionId) {
        let seen = newest.map(|map| &map.partitions[partition.0 as usize]);
        let doubt = match seen {
            Some(seen) => absent.clone().or_else(|| ahead(seen, partition, told)),
            None => Some(NOTHING_SEEN.to_owned()),
        };
        let entry = match (seen, doubt) {
            (Some(seen), None) => proven(seen, partition, told),
            (_, doubt) => {
                rebuilt.doubts.insert(partition, doubt.unwrap_or_default());
                guessed(seen, partition, told)?
            }
        };
        rebuilt.map.partitions.push(entry);
        rebuilt.seen.push(seen.cloned());
    }
    Some(rebuilt)
}

const NOTHING_SEEN: &str = "no worker that answers has kept a map";

/// Which worker, or which disk, has not been heard: it may have been given a partition, and have led it, since the map was seen.
fn absent(newest: Option<&PartitionMap>, expected: &BTreeSet<Ordinal>, told: &[Testimony]) -> Option<String> {
    let members = newest.iter().flat_map(|map| &map.partitions).flat_map(Entry::candidates);
    let known: BTreeSet<(Ordinal, StoreId)> = members.map(|member| (member.ordinal, member.store)).collect();
    let heard = |ordinal: Ordinal| told.iter().find(|it| it.member.ordinal == ordinal).map(|it| it.member.store);
    let mut missing = expected.clone();
    missing.extend(known.iter().map(|(ordinal, _)| *ordinal));
    missing.retain(|ordinal| heard(*ordinal).is_none());
    if !missing.is_empty() {
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        return Some(format!("worker{} {} did not answer", if names.len() == 1 { "" } else { "s" }, names.join(", ")));
    }
    known.into_iter().find_map(|(ordinal, store)| {
        let found = heard(ordinal).filter(|found| *found != store)?;
        Some(format!("worker {ordinal} came with store {found}, and had store {store} before"))
    })
}

/// Who has promised more than was seen.
fn ahead(seen: &Entry, partition: PartitionId, told: &[Testimony]) -> Option<String> {
    let ahead = told.iter().find(|it| copy(it, partition).promised > seen.term)?;
    let (ordinal, promised) = (ahead.member.ordinal, copy(ahead, partition).promised);
    Some(format!("worker {ordinal} has promised term {promised}, and what was seen last is of term {}", seen.term))
}

/// What was seen last, which is what was there. Its primary may have acknowledged although the mark was not seen: all in its
/// in-sync set hold everything either way, those before it may not.
fn proven(seen: &Entry, partition: PartitionId, told: &[Testimony]) -> Entry {
    let primary = told.iter().find(|it| it.member.ordinal == seen.primary);
    let took_over = primary.is_some_and(|it| copy(it, partition).promised >= seen.term);
    let prev = if took_over { Vec::new() } else { seen.prev.clone() };
    Entry { prev, ..seen.clone() }
}

fn guessed(seen: Option<&Entry>, partition: PartitionId, told: &[Testimony]) -> Option<Entry> {
    let here = |member: &&Member| {
        let on_its_disk = |it: &&Testimony| (it.member.ordinal, it.member.store) == (member.ordinal, member.store);
        told.iter().find(on_its_disk).is_some_and(|it| !copy(it, partition).damaged)
    };
    let moved_on = seen.is_none_or(|seen| told.iter().any(|it| copy(it, partition).promised > seen.term));
    let in_sync: Vec<Member> = seen.iter().filter(|_| !moved_on).flat_map(|it| &it.isr).filter(here).copied().collect();
    let among = |ordinal: Ordinal| in_sync.is_empty() || in_sync.iter().any(|member| member.ordinal == ordinal);
    let chosen = most_advanced(partition, told.iter().filter(|it| among(it.member.ordinal)))
        .or_else(|| told.first().map(|it| Chosen { member: it.member, copy: Copy::default() }))?;
    let mut entry = forced(seen, &chosen.member, highest_promise(partition, told));
    entry.term.0 += TERM_LEAP;
    entry.isr.extend(in_sync.into_iter().filter(|member| member.ordinal != chosen.member.ordinal));
    Some(entry)
}

/// The copy that knows most: of the latest term, and of those the longest. A damaged one knows nothing.
pub fn most_advanced<'a>(partition: PartitionId, told: impl IntoIterator<Item = &'a Testimony>) -> Option<Chosen> {
    let chosen = |it: &Testimony| Chosen { member: it.member, copy: copy(it, partition) };
    let whole = told.into_iter().map(chosen).filter(|it| !it.copy.damaged);
    whole.max_by_key(|it| (it.copy.last_term, it.copy.last, Reverse(it.member.ordinal)))
}

/// The copy of a partition that a worker tells of.
pub fn copy(told: &Testimony, partition: PartitionId) -> Copy {
    told.copies.get(partition.0 as usize).copied().unwrap_or_default()
}

/// The highest term that any of them has promised.
pub fn highest_promise(partition: PartitionId, told: &[Testimony]) -> Term {
    told.iter().map(|it| copy(it, partition).promised).max().unwrap_or(Term(0))
}

/// The entry under which `member` leads, alone and whatever it holds, at a term above `before` and above every promise.
pub fn forced(before: Option<&Entry>, member: &Member, promised: Term) -> Entry {
    let term = before.map_or(Term(0), |before| before.term).max(promised);
    Entry {
        term: Term(term.0 + 1),
        primary: member.ordinal,
        isr: vec![*member],
        // It says so itself, when it has all of its log on disk.
        solo_safe: false,
        activated: false,
        prev: Vec::new(),
        learners: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::change::Change;
    use engram_memory::Incarnation;

    fn member(ordinal: u32, incarnation: u64) -> Member {
        let store = StoreId(u128::from(ordinal) + 100);
        Member { ordinal: Ordinal(ordinal), store, incarnation: Incarnation(incarnation) }
    }

    fn copy_at(promised: u64, last: u64, last_term: u64) -> Copy {
        Copy { promised: Term(promised), last: Lsn(last), last_term: Term(last_term), damaged: false }
    }

    /// Three workers, one partition on workers 0 and 1, all of them started again; worker 2 saw an older map.
    fn told() -> Vec<Testimony> {
        let first = Entry::first(vec![member(0, 1), member(1, 1)]);
        let second = first.changed(&Change::Promote { primary: member(1, 1), isr: vec![Ordinal(0), Ordinal(1)] });
        let second = second.unwrap().changed(&Change::Activate).unwrap();
        let map = |version, entry: &Entry| {
            Some(PartitionMap { cluster: ClusterId(7), version, partitions: vec![entry.clone()] })
        };
        vec![
            Testimony { member: member(0, 2), seen: map(3, &second), copies: vec![copy_at(2, 9, 2)] },
            Testimony { member: member(1, 2), seen: map(3, &second), copies: vec![copy_at(2, 10, 2)] },
            Testimony { member: member(2, 2), seen: map(1, &first), copies: vec![copy_at(1, 4, 1)] },
        ]
    }

    fn rebuilt(told: &[Testimony]) -> Rebuilt {
        rebuild(ClusterId(7), 1, &(0..3).map(Ordinal).collect(), told).unwrap()
    }

    #[test]
    fn what_everybody_vouches_for_is_proven_and_exactly_what_was_there() {
        let told = told();
        let rebuilt = rebuilt(&told);
        assert_eq!(rebuilt.doubts, BTreeMap::new());
        assert_eq!(rebuilt.map.partitions[..], told[0].seen.as_ref().unwrap().partitions[..]);
        assert!(rebuilt.map.version > 3, "workers take newer maps only");
    }

    #[test]
    fn whoever_may_have_gone_on_makes_it_a_guess_above_every_promise() {
        let whole = told();
        let doubt = |told: &[Testimony]| {
            let rebuilt = rebuilt(told);
            let entry = rebuilt.map.partitions[0].clone();
            assert!(entry.term.0 > TERM_LEAP && !entry.activated && entry.prev.is_empty());
            (rebuilt.doubts[&PartitionId(0)].clone(), entry.isr)
        };
        // Also one that the partition was never on: it may have been added, and have led, since.
        let (why, isr) = doubt(&whole[..2]);
        assert_eq!((why.as_str(), isr), ("worker 2 did not answer", vec![member(1, 2), member(0, 1)]));
        let mut replaced = whole.clone();
        replaced[1].member.store = StoreId(5);
        replaced[1].copies = vec![Copy::default()];
        let (why, isr) = doubt(&replaced);
        assert!(why.contains("worker 1 came with store"), "{why}");
        assert_eq!(isr, [member(0, 2)]);
        let mut ahead = whole.clone();
        ahead[2].copies = vec![copy_at(3, 11, 3)];
        let (why, isr) = doubt(&ahead);
        assert_eq!(why, "worker 2 has promised term 3, and what was seen last is of term 2");
        assert_eq!(isr, [member(2, 2)], "the copy that knows most");
        let mut blind = whole;
        blind.iter_mut().for_each(|it| it.seen = None);
        let (why, isr) = doubt(&blind);
        assert_eq!((why.as_str(), isr), (NOTHING_SEEN, vec![member(1, 2)]));
    }

    #[test]
    fn a_leader_that_promised_may_have_acknowledged_though_nobody_saw_the_mark() {
        let mut told = told();
        for it in &mut told[..2] {
            let entry = &mut it.seen.as_mut().unwrap().partitions[0];
            (entry.activated, entry.prev) = (false, vec![member(0, 1), member(1, 1), member(2, 1)]);
        }
        assert_eq!(rebuilt(&told).map.partitions[0].prev, []);
        for it in &mut told {
            it.copies[0].promised = Term(1);
        }
        assert_eq!(rebuilt(&told).map.partitions[0].prev.len(), 3, "it led nobody: others may still");
    }
}
