//! Which faults there are, in which order they come, and how one is done to a cluster and undone.

use crate::campaign::{Field, Plan, Processes};
use crate::health::Gone;
use crate::network::Node;
use crate::proxy::{Condition, Flow};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::RngExt as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Shorter than a worker may be silent before it is suspected.
const HICCUP: Duration = Duration::from_millis(500);
/// Far longer than that.
const SILENCE: Duration = Duration::from_secs(3);
/// What a slow link does to each chunk.
const SLOW: Condition = Condition {
    flow: Flow::Pass,
    delay: Duration::from_millis(50),
    jitter: Duration::from_millis(50),
    bytes_per_second: None,
};

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A worker is killed; its supervisor has proof of its death.
    KillWorker,
    /// The coordinator is killed.
    KillCoordinator,
    /// Both in the same moment.
    KillBoth,
    /// A worker is killed, and its disk is an empty one when it starts again.
    EmptyDisk,
    /// A worker stops for less than it takes to suspect it.
    PauseShort,
    /// A worker stops for longer.
    PauseLong,
    /// A worker is cut off from all others and the coordinator; clients still reach it.
    Isolate,
    /// Nothing passes between two workers.
    CutLink,
    /// Nothing passes from one worker to another; the other way goes on.
    CutOneWay,
    /// Everything that a worker sends to the others takes longer.
    Delay,
    /// Connections between two workers end by a reset, several times.
    Reset,
}

/// Kinds from which the kills of a campaign are drawn in turn: every kind comes up early, the plain one most often.
const KILLS: [Kind; 5] = [Kind::KillWorker, Kind::KillCoordinator, Kind::KillBoth, Kind::KillWorker, Kind::EmptyDisk];
const PAUSES: [Kind; 2] = [Kind::PauseLong, Kind::PauseShort];
const CUTS: [Kind; 5] = [Kind::Isolate, Kind::CutLink, Kind::CutOneWay, Kind::Delay, Kind::Reset];

impl Kind {
    /// What people call it.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::KillWorker => "kill a worker",
            Self::KillCoordinator => "kill the coordinator",
            Self::KillBoth => "kill coordinator and worker",
            Self::EmptyDisk => "kill a worker, empty its disk",
            Self::PauseShort => "stop a worker for 0.5 s",
            Self::PauseLong => "stop a worker for 3 s",
            Self::Isolate => "cut a worker off for 3 s",
            Self::CutLink => "cut a link for 3 s",
            Self::CutOneWay => "cut a link one way for 3 s",
            Self::Delay => "delay a worker's links by 50-100 ms for 3 s",
            Self::Reset => "reset a link for 3 s",
        }
    }

    /// Whether a worker's process ends in it.
    const fn ends_worker(self) -> bool {
        matches!(self, Self::KillWorker | Self::KillBoth | Self::EmptyDisk)
    }

    /// Whether whatever a worker leads has no primary by it.
    const fn hits_worker(self) -> bool {
        self.ends_worker() || matches!(self, Self::PauseShort | Self::PauseLong | Self::Isolate)
    }
}

/// The faults of a campaign in the order in which they are done.
pub(crate) fn deck(plan: &Plan, draws: &mut StdRng) -> Vec<Kind> {
    // An empty disk under the only copy is the loss of that copy, which nobody promises to survive.
    let possible = |kind: &Kind| *kind != Kind::EmptyDisk || plan.copies > 1;
    let kills = KILLS.into_iter().cycle().take(plan.kills as usize * KILLS.len()).filter(possible);
    let mut deck: Vec<Kind> = kills.take(plan.kills as usize).collect();
    deck.extend(PAUSES.into_iter().cycle().take(plan.pauses as usize));
    let links = plan.workers > 1;
    deck.extend(CUTS.into_iter().cycle().filter(|kind| links || *kind == Kind::Isolate).take(plan.cuts as usize));
    deck.shuffle(draws);
    deck
}

/// What is left of a fault that has been done.
#[derive(Debug, Default)]
pub(crate) struct InjectedFault {
    /// Processes that ended, in whose places others must come.
    pub(crate) gone: Gone,
    /// A disk that was taken out.
    pub(crate) taken: Option<PathBuf>,
    /// The worker whose partitions it hit.
    pub(crate) victim: Option<u32>,
    /// In words, for the log.
    pub(crate) whom: String,
}

/// Why a fault could not be done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InjectError {
    /// A process does not run, though the cluster was whole a moment ago.
    #[error("{0} does not run")]
    NoProcess(String),
    /// A signal.
    #[error("failed to send a signal")]
    Signal(#[from] nix::Error),
    /// A disk.
    #[error("failed to exchange a disk")]
    Disk(#[from] io::Error),
}

/// Does a fault, waits as long as it lasts, and takes it back as far as that is not the cluster's own work. It hits one of those who
/// lead a partition.
pub(crate) async fn inject<P: Processes>(
    kind: Kind,
    field: &Field<'_, P>,
    leaders: &[u32],
    draws: &mut StdRng,
) -> Result<InjectedFault, InjectError> {
    let workers = field.plan.workers;
    let victim = leaders[draws.random_range(0..leaders.len())];
    let other = (victim + draws.random_range(1..workers.max(2))) % workers;
    let [a, b] = [victim, other].map(Node::Worker);
    let hit = kind.hits_worker().then_some(victim);
    let mut done = InjectedFault { whom: format!("worker {victim}"), victim: hit, ..InjectedFault::default() };
    if kind.ends_worker() {
        done.gone = field.health.process(victim).await;
    }
    let worker = || field.processes.worker(victim).ok_or_else(|| InjectError::NoProcess(format!("worker {victim}")));
    let coordinator = || field.processes.coordinator().ok_or_else(|| InjectError::NoProcess("the coordinator".into()));
    match kind {
        Kind::KillWorker => send(worker()?, Signal::SIGKILL)?,
        Kind::KillCoordinator => {
            done.whom = "the coordinator".into();
            send(coordinator()?, Signal::SIGKILL)?;
        }
        Kind::KillBoth => {
            let (worker, coordinator) = (worker()?, coordinator()?);
            send(coordinator, Signal::SIGKILL)?;
            send(worker, Signal::SIGKILL)?;
        }
        Kind::EmptyDisk => {
            let worker = worker()?;
            // A process that stands still writes nothing while its disk goes, and sees none of it.
            send(worker, Signal::SIGSTOP)?;
            done.taken = Some(exchange(&field.processes.disk(victim))?);
            send(worker, Signal::SIGKILL)?;
        }
        Kind::PauseShort | Kind::PauseLong => {
            let worker = worker()?;
            send(worker, Signal::SIGSTOP)?;
            tokio::time::sleep(if kind == Kind::PauseLong { SILENCE } else { HICCUP }).await;
            send(worker, Signal::SIGCONT)?;
        }
        Kind::Isolate => {
            field.network.isolate(a);
            tokio::time::sleep(SILENCE).await;
        }
        Kind::CutLink => {
            done.whom = format!("workers {victim} and {other}");
            field.network.cut(a, b);
            field.network.cut(b, a);
            tokio::time::sleep(SILENCE).await;
        }
        Kind::CutOneWay => {
            done.whom = format!("worker {victim} to {other}");
            field.network.cut(a, b);
            tokio::time::sleep(SILENCE).await;
        }
        Kind::Delay => {
            for to in (0..workers).filter(|to| *to != victim) {
                field.network.set(a, Node::Worker(to), SLOW);
            }
            tokio::time::sleep(SILENCE).await;
        }
        Kind::Reset => {
            done.whom = format!("workers {victim} and {other}");
            for _ in 0..6 {
                field.network.reset(a, b);
                tokio::time::sleep(HICCUP).await;
            }
        }
    }
    field.network.restore();
    Ok(done)
}

pub(crate) fn send(process: u32, signal: Signal) -> Result<(), InjectError> {
    let pid = i32::try_from(process).map_err(|_| nix::Error::ESRCH)?;
    Ok(kill(Pid::from_raw(pid), signal)?)
}

/// Puts an empty folder in the place of `disk`; where the old one lies now.
fn exchange(disk: &Path) -> io::Result<PathBuf> {
    let taken = disk.with_extension("taken");
    std::fs::rename(disk, &taken)?;
    std::fs::create_dir(disk)?;
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;

    #[test]
    fn a_deck_holds_what_was_asked_for_and_every_kind_that_is_possible() {
        let plan = Plan { kills: 20, pauses: 5, cuts: 5, workers: 5, copies: 2, ..Plan::default() };
        let mut cards = deck(&plan, &mut StdRng::seed_from_u64(1));
        assert_eq!(cards.len(), 30);
        let count = |cards: &[Kind], kind| cards.iter().filter(|card| **card == kind).count();
        assert_eq!([Kind::KillWorker, Kind::EmptyDisk, Kind::PauseLong].map(|kind| count(&cards, kind)), [8, 4, 3]);
        assert_ne!(cards, deck(&plan, &mut StdRng::seed_from_u64(2)), "the order comes from the seed");
        cards.sort_unstable();
        cards.dedup();
        assert_eq!(cards.len(), 11);
        let lone = deck(&Plan { copies: 1, ..plan }, &mut StdRng::seed_from_u64(1));
        assert_eq!((lone.len(), count(&lone, Kind::EmptyDisk)), (30, 0));
    }
}
