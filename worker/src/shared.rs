//! State shared by the services, the heartbeat and the HTTP pages of one worker.

use crate::buffers::Catalog;
use crate::engine::Engine;
use crate::engine::device::Device;
use crate::groups::Groups;
use crate::lifecycle::phase::Lifecycle;
use crate::membership::Membership;
use crate::membership::failovers::Failovers;
use crate::observability::metrics::Metrics;
use crate::options::Options;
use crate::peers::{HelloContext, Links, MIN_AGE_MS, Peers, Proposals};
use crate::runs::Runs;
use crate::service::connections::accept::ConnectionCounters;
use crate::service::edge::limits::Limits;
use crate::setup::Setup;
use crate::training::Trainings;
use engram_client::{Client, Network};
use engram_identity::Keys;
use engram_memory::{Incarnation, Ordinal, PartitionId};
use engram_proto::v1::{Problem, ProblemKind};
use engram_store::Clock;
use engram_store::leases::GRANT_MS;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Shared state of one worker: one handle per subject.
pub(crate) struct Shared {
    pub(crate) setup: Arc<Setup>,
    pub(crate) lifecycle: Lifecycle,
    pub(crate) engine: Engine,
    pub(crate) membership: Membership,
    pub(crate) peers: Peers,
    /// Client of all workers, including this one for requests to all.
    pub(crate) client: Client,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    /// Definitions of buffers.
    pub(crate) buffers: Catalog,
    /// Learning runs driven by this worker.
    pub(crate) runs: Runs,
    /// Members of training groups on this worker.
    pub(crate) trainings: Trainings,
    /// Groups of processes outside of the cluster hosted by this worker.
    pub(crate) groups: Groups,
}

/// Components of a worker before it runs.
pub(crate) struct SharedParts {
    pub(crate) options: Options,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) network: Network,
    pub(crate) keys: Option<Arc<Keys>>,
    pub(crate) hello: HelloContext,
    pub(crate) links: Arc<Links>,
    pub(crate) proposals: Arc<Proposals>,
    pub(crate) engine: Engine,
    pub(crate) client: Client,
    pub(crate) recovery: String,
    pub(crate) device: Device,
    pub(crate) connections: ConnectionCounters,
}

impl Shared {
    pub(crate) fn new(parts: SharedParts, this: Weak<Self>) -> Self {
        let SharedParts { options, clock, network, keys, hello, links, proposals, .. } = parts;
        let accounts = Setup::open_accounts(&options);
        let (shape, member) = (options.shape(), hello.member);
        let (device, recovery) = (parts.device, parts.recovery);
        let setup = Setup { options, shape, member, hello, clock, network, keys, accounts, device, recovery };
        let (setup, connections) = (Arc::new(setup), &parts.connections);
        let (failovers, name) = (Failovers::new(this), &setup.options.cluster_name);
        Self {
            lifecycle: Lifecycle::new(Arc::clone(&setup.clock)),
            membership: Membership::new(Arc::clone(&setup), parts.engine.clone(), parts.client.clone(), failovers),
            metrics: Metrics::new(name, setup.options.ordinal, &links.traffic, connections, setup.keys.is_some()),
            limits: Limits::new(!setup.network.is_simulated()),
            peers: Peers::new(&setup, links, proposals),
            engine: parts.engine,
            client: parts.client,
            buffers: Catalog::default(),
            runs: Runs::default(),
            trainings: Trainings::default(),
            groups: Groups::default(),
            setup,
        }
    }

    /// Returns the time by the clock of heartbeats and leases.
    pub(crate) fn elapsed_ms(&self) -> u64 {
        self.setup.clock.elapsed_ms()
    }

    pub(crate) fn ordinal(&self) -> Ordinal {
        self.setup.member.ordinal
    }

    pub(crate) fn partitions(&self) -> u32 {
        self.setup.shape.partitions
    }

    /// Returns the partitions served here.
    pub(crate) fn served(&self) -> Vec<PartitionId> {
        self.engine.served(self.partitions())
    }

    /// Returns whether it has a map, serves all partitions assigned to it, and could take over from a partner.
    pub(crate) fn is_ready(&self) -> bool {
        !self.lifecycle.is_stopping() && self.settles_in().is_none() && self.is_complete()
    }

    /// Returns when this process will be old enough to take over; `None` if it is: until the leases that its predecessor may have granted
    /// have expired it serves nothing, and until its minimum age it suspects no partner. A rolling restart waits for it.
    pub(crate) fn settles_in(&self) -> Option<Duration> {
        let is_first_process =
            self.setup.options.spec.replication_factor == 1 || self.setup.member.incarnation == Incarnation(1);
        let remaining_ms = MIN_AGE_MS.max(GRANT_MS).saturating_sub(self.lifecycle.age_ms());
        (!is_first_process && remaining_ms > 0).then(|| Duration::from_millis(remaining_ms))
    }

    /// Returns whether it serves every partition whose primary is this ordinal. A partition still assigned to the previous process
    /// is not served until it is assigned to this one, or another.
    fn is_complete(&self) -> bool {
        let Some(map) = self.membership.view().map.clone() else { return false };
        let own_entries = map.entries().filter(|(_, entry)| entry.primary == self.ordinal());
        let mut served = own_entries
            .map(|(partition, entry)| entry.served_by(&self.setup.member) && self.engine.position(partition).is_some());
        served.all(|served| served)
    }

    /// Returns the fault of the store, if any.
    pub(crate) fn fault(&self) -> Option<String> {
        self.engine.stats().fault
    }

    /// Returns the problem for a partition that is not served here.
    pub(crate) fn not_primary(&self, partition: PartitionId) -> Problem {
        let view = self.membership.view();
        let primary = view.primary(partition);
        let text = match primary {
            Some(primary) if primary == self.ordinal() => {
                format!("partition {partition} is being activated on this worker")
            }
            Some(primary) => format!("partition {partition} is served by worker {primary}"),
            None => "the partition map is not known yet".to_owned(),
        };
        let mut problem = Problem::of(ProblemKind::NotPrimary, text).at(partition);
        problem.map_version = view.version();
        problem.primary = primary.map(|primary| primary.0);
        problem
    }

    /// Checks a partition number.
    pub(crate) fn check_partition(&self, partition: u32) -> Result<PartitionId, Problem> {
        if partition < self.partitions() {
            return Ok(PartitionId(partition));
        }
        let text = format!("partition: {partition} is not allowed; allowed: 0 to {}", self.partitions() - 1);
        Err(Problem::of(ProblemKind::Invalid, text))
    }
}
