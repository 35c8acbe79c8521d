//! Fault kinds, their order, and how each is injected and undone.

use crate::campaign::{CampaignTarget, Plan, Processes};
use crate::health::EndedProcesses;
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

/// Shorter than the silence after which a worker is suspected.
const HICCUP: Duration = Duration::from_millis(500);
/// Much longer than that.
const SILENCE: Duration = Duration::from_secs(3);
/// Condition of a slow link.
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
    /// Both at the same moment.
    KillBoth,
    /// A worker is killed and restarts with an empty disk.
    EmptyDisk,
    /// A worker is paused for less time than it takes to suspect it.
    PauseShort,
    /// A worker is paused for longer.
    PauseLong,
    /// A worker is cut off from all other members; clients still reach it.
    Isolate,
    /// Nothing passes between two workers.
    CutLink,
    /// Nothing passes from one worker to another; the opposite direction works.
    CutOneWay,
    /// Everything sent by a worker to the others takes longer.
    Delay,
    /// Connections between two workers are reset, several times.
    Reset,
}

/// Kinds of which kills are drawn in turn: every kind occurs early, the plain one most often.
const KILLS: [Kind; 5] = [Kind::KillWorker, Kind::KillCoordinator, Kind::KillBoth, Kind::KillWorker, Kind::EmptyDisk];
const PAUSES: [Kind; 2] = [Kind::PauseLong, Kind::PauseShort];
const CUTS: [Kind; 5] = [Kind::Isolate, Kind::CutLink, Kind::CutOneWay, Kind::Delay, Kind::Reset];

/// Names of all kinds, in the order of reports.
pub(crate) const NAMES: [&str; 11] = [
    Kind::KillWorker.name(),
    Kind::KillCoordinator.name(),
    Kind::KillBoth.name(),
    Kind::EmptyDisk.name(),
    Kind::PauseShort.name(),
    Kind::PauseLong.name(),
    Kind::Isolate.name(),
    Kind::CutLink.name(),
    Kind::CutOneWay.name(),
    Kind::Delay.name(),
    Kind::Reset.name(),
];

impl Kind {
    /// Returns its display name.
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

    /// Whether it ends a worker's process.
    const fn ends_worker(self) -> bool {
        matches!(self, Self::KillWorker | Self::KillBoth | Self::EmptyDisk)
    }

    /// Whether it leaves the partitions of a worker without a primary.
    const fn hits_worker(self) -> bool {
        self.ends_worker() || matches!(self, Self::PauseShort | Self::PauseLong | Self::Isolate)
    }
}

/// Returns the faults of a campaign in order.
pub(crate) fn deck(plan: &Plan, draws: &mut StdRng) -> Vec<Kind> {
    // An empty disk under the only replica loses it.
    let possible = |kind: &Kind| *kind != Kind::EmptyDisk || plan.replicas > 1;
    let kills = KILLS.into_iter().cycle().take(plan.kills as usize * KILLS.len()).filter(possible);
    let mut deck: Vec<Kind> = kills.take(plan.kills as usize).collect();
    deck.extend(PAUSES.into_iter().cycle().take(plan.pauses as usize));
    let links = plan.workers > 1;
    deck.extend(CUTS.into_iter().cycle().filter(|kind| links || *kind == Kind::Isolate).take(plan.cuts as usize));
    deck.shuffle(draws);
    deck
}

/// A fault that has been injected.
#[derive(Debug, Default)]
pub(crate) struct InjectedFault {
    /// Processes that ended and must be replaced.
    pub(crate) ended: EndedProcesses,
    /// A disk that was exchanged.
    pub(crate) exchanged: Option<PathBuf>,
    /// The worker whose partitions were affected.
    pub(crate) victim: Option<u32>,
    /// Description of the target, for the log.
    pub(crate) target: String,
}

/// Reason why a fault could not be injected.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InjectError {
    /// A process does not run, although the cluster was just healthy.
    #[error("{0} is not running")]
    NoProcess(String),
    /// Failure of a signal.
    #[error("failed to send a signal")]
    Signal(#[from] nix::Error),
    /// A disk.
    #[error("failed to exchange a disk")]
    Disk(#[from] io::Error),
}

/// Injects a fault into one of the current primaries, waits for its duration, and undoes what the cluster does not
/// repair itself.
pub(crate) async fn inject<P: Processes>(
    kind: Kind,
    cluster: &CampaignTarget<'_, P>,
    leaders: &[u32],
    draws: &mut StdRng,
) -> Result<InjectedFault, InjectError> {
    let workers = cluster.plan.workers;
    let victim = leaders[draws.random_range(0..leaders.len())];
    let other = (victim + draws.random_range(1..workers.max(2))) % workers;
    let [a, b] = [victim, other].map(Node::Worker);
    let hit = kind.hits_worker().then_some(victim);
    let mut done = InjectedFault { target: format!("worker {victim}"), victim: hit, ..InjectedFault::default() };
    if kind.ends_worker() {
        done.ended = cluster.health.process(victim).await;
    }
    let worker = || cluster.processes.worker(victim).ok_or_else(|| InjectError::NoProcess(format!("worker {victim}")));
    let coordinator =
        || cluster.processes.coordinator().ok_or_else(|| InjectError::NoProcess("the coordinator".into()));
    match kind {
        Kind::KillWorker => send(worker()?, Signal::SIGKILL)?,
        Kind::KillCoordinator => {
            done.target = "the coordinator".into();
            send(coordinator()?, Signal::SIGKILL)?;
        }
        Kind::KillBoth => {
            let (worker, coordinator) = (worker()?, coordinator()?);
            send(coordinator, Signal::SIGKILL)?;
            send(worker, Signal::SIGKILL)?;
        }
        Kind::EmptyDisk => {
            let worker = worker()?;
            // A stopped process writes nothing while its disk is exchanged.
            send(worker, Signal::SIGSTOP)?;
            done.exchanged = Some(exchange(&cluster.processes.disk(victim))?);
            send(worker, Signal::SIGKILL)?;
        }
        Kind::PauseShort | Kind::PauseLong => {
            let worker = worker()?;
            send(worker, Signal::SIGSTOP)?;
            tokio::time::sleep(if kind == Kind::PauseLong { SILENCE } else { HICCUP }).await;
            send(worker, Signal::SIGCONT)?;
        }
        Kind::Isolate => {
            cluster.network.isolate(a);
            tokio::time::sleep(SILENCE).await;
        }
        Kind::CutLink => {
            done.target = format!("workers {victim} and {other}");
            cluster.network.cut(a, b);
            cluster.network.cut(b, a);
            tokio::time::sleep(SILENCE).await;
        }
        Kind::CutOneWay => {
            done.target = format!("worker {victim} to {other}");
            cluster.network.cut(a, b);
            tokio::time::sleep(SILENCE).await;
        }
        Kind::Delay => {
            for to in (0..workers).filter(|to| *to != victim) {
                cluster.network.set(a, Node::Worker(to), SLOW);
            }
            tokio::time::sleep(SILENCE).await;
        }
        Kind::Reset => {
            done.target = format!("workers {victim} and {other}");
            for _ in 0..6 {
                cluster.network.reset(a, b);
                tokio::time::sleep(HICCUP).await;
            }
        }
    }
    cluster.network.restore();
    Ok(done)
}

pub(crate) fn send(process: u32, signal: Signal) -> Result<(), InjectError> {
    let pid = i32::try_from(process).map_err(|_| nix::Error::ESRCH)?;
    Ok(kill(Pid::from_raw(pid), signal)?)
}

/// Replaces `disk` with an empty folder; returns the new location of the old one.
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
    fn a_deck_has_the_planned_counts_and_every_possible_kind() {
        let plan = Plan { kills: 20, pauses: 5, cuts: 5, workers: 5, replicas: 2, ..Plan::default() };
        let mut cards = deck(&plan, &mut StdRng::seed_from_u64(1));
        assert_eq!(cards.len(), 30);
        let count = |cards: &[Kind], kind| cards.iter().filter(|card| **card == kind).count();
        assert_eq!([Kind::KillWorker, Kind::EmptyDisk, Kind::PauseLong].map(|kind| count(&cards, kind)), [8, 4, 3]);
        assert_ne!(cards, deck(&plan, &mut StdRng::seed_from_u64(2)), "the seed determines the order");
        cards.sort_unstable();
        cards.dedup();
        assert_eq!(cards.len(), 11);
        let lone = deck(&Plan { replicas: 1, ..plan }, &mut StdRng::seed_from_u64(1));
        assert_eq!((lone.len(), count(&lone, Kind::EmptyDisk)), (30, 0));
    }
}
