//! A learning run whose drivers die, and the same run without faults on the reference implementation.

use crate::draw::Draw;
use crate::ledger::kind;
use crate::node::CLUSTER;
use crate::world::Common;
use engram_client::{Client, EpochUpdates, Rows, Signals, Updates, run_id};
use engram_memory::reference::Partition;
use engram_memory::{
    Command, Digest, FeatureShape, Law, LearningEpoch, MemoryId, OnMissing, PartitionId, Record, RunId, Settings,
    Shape, Upsert, edge, law, partition_of,
};
use engram_proto::answers;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Name of the run, and its specification: it is recorded and suspended, since the drivers are part of the simulation.
const NAME: &str = "driven";
/// Identity of the submission, the same in every simulation of a seed.
const UID: &str = "simulated";
const SPECIFICATION: &str = r#"{"clusterRef":{"name":"simulated"},"kind":"Memory","suspend":true,
    "memory":{"source":{"example":{"name":"StateOfTheUnion"}}}}"#;
/// Memories of the run.
const MEMORIES: u64 = 60;

/// The learning run: every epoch is a function of the seed and its number.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) epochs: u32,
    pub(crate) decay: f64,
    pub(crate) partitions: u32,
    pub(crate) rate: f64,
    pub(crate) initial_weight: f64,
}

impl Plan {
    pub(crate) fn ids(&self) -> Vec<MemoryId> {
        let mut draw = Draw::new(self.seed ^ 0x1d5);
        (0..MEMORIES).map(|_| MemoryId(draw.next())).collect()
    }

    fn updates(&self, n: u32) -> (Vec<MemoryId>, Vec<f32>) {
        let mut draw = Draw::new(self.seed ^ (u64::from(n) << 32));
        let ids = self.ids();
        let chosen: Vec<MemoryId> = (0..40).map(|_| ids[draw.within(0, MEMORIES - 1) as usize]).collect();
        let qualities = chosen.iter().map(|_| draw.within(0, 1_000) as f32 / 1_000.0).collect();
        (chosen, qualities)
    }

    /// Returns the expected digest of the cluster after the run, including other memories that no epoch touches.
    pub(crate) fn expected_digest(&self, others: &BTreeMap<MemoryId, u32>) -> Digest {
        let shape = Shape { partitions: self.partitions, law: Law::Linear, features: FeatureShape::NONE };
        let weight = edge::setting(self.initial_weight).expect("a setting that the cluster took");
        let rate = edge::rate(self.rate).expect("a setting that the cluster took");
        let settings = Settings {
            rate,
            initial_weight: engram_memory::Weight::from_units(weight).expect("at most 1"),
            ..Settings::default()
        };
        let mut digest = Digest::default();
        for partition in (0..self.partitions).map(PartitionId) {
            let here = |id: &MemoryId| partition_of(*id, self.partitions) == partition;
            let mut state = Partition::new(shape, settings);
            let mut apply = |command| {
                state.apply(&Record::bare(command));
            };
            let ids = self.ids().into_iter().filter(here).collect();
            apply(Command::Upsert(Upsert { ids, ..Upsert::default() }));
            for n in 1..=self.epochs {
                let (ids, qualities) = self.updates(n);
                let (ids, deltas) = ids
                    .into_iter()
                    .zip(qualities)
                    .filter(|(id, _)| here(id))
                    .map(|(id, quality)| (id, law::delta(rate, edge::quality(quality).expect("in [0, 1]"))))
                    .unzip();
                let updates = engram_memory::Updates::ById { ids, deltas, on_missing: OnMissing::Report, keys: None };
                let decay = edge::setting(self.decay).expect("a setting");
                apply(Command::Epoch { run: run_id(CLUSTER, NAME), n: LearningEpoch(n.into()), decay, updates });
            }
            let (ids, weights) = others.iter().filter(|(id, _)| here(id)).unzip();
            apply(Command::Upsert(Upsert { ids, weights, ..Upsert::default() }));
            digest.merge(state.digest());
        }
        digest
    }
}

/// Drives the run to its end, with drivers that die.
pub(crate) async fn run(common: Common, plan: Plan, mut draw: Draw) {
    let mut client = common.client().await;
    let rows = || Rows { ids: plan.ids(), ..Rows::default() };
    while let Err(error) = client.session().upsert(rows()).await {
        common.trace.note(format!("driver: memories not created: {}", kind(&error)));
    }
    let run = submit(&client, &common).await;
    let mut n = 1;
    while n <= plan.epochs {
        sleep(Duration::from_millis(draw.within(0, 600))).await;
        let dies_ms = if draw.chance(40) { draw.within(1, 120) } else { 60_000 };
        match timeout(Duration::from_millis(dies_ms), learn(&client, &plan, run, n)).await {
            Ok(Ok(())) => {
                common.trace.note(format!("driver: epoch {n} is applied"));
                common.learned();
                // The next driver may not know of it.
                if !draw.chance(20) {
                    n += 1;
                }
            }
            Ok(Err(error)) => common.trace.note(format!("driver: epoch {n}: {}", kind(&error))),
            Err(_) => {
                common.trace.note(format!("driver dies in epoch {n}"));
                common.driver_died();
                client = common.client().await;
            }
        }
    }
}

/// Records the run, and returns the id of its epochs.
async fn submit(client: &Client, common: &Common) -> RunId {
    loop {
        let submitted = client.submit_run_as(NAME, UID, SPECIFICATION, None, None).await;
        let run = submitted.map(|response| response.status.and_then(|status| answers::run_id(&status.run).ok()));
        match run {
            Ok(Some(run)) => return run,
            Ok(None) => common.trace.note("driver: the answer has no run"),
            Err(error) => common.trace.note(format!("driver: run not recorded: {}", kind(&error))),
        }
    }
}

async fn learn(client: &Client, plan: &Plan, run: RunId, n: u32) -> Result<(), engram_client::Error> {
    let (ids, qualities) = plan.updates(n);
    let updates = Updates { ids, signals: Signals::Qualities(qualities), on_missing: OnMissing::Report, keys: None };
    client.learn_epoch(run, LearningEpoch(n.into()), plan.decay, EpochUpdates::ById(updates)).await.map(|_| ())
}
