//! The next version from a batch.

use crate::runs::federated::blobs::ContentName;
use crate::runs::federated::core::{Core, Step};
use crate::runs::federated::versions::{Memory, put_next_blocks, put_version};
use crate::runs::federated::{Interruption, failed, now_millis, patiently};
use engram_api::Code;
use engram_federated::aggregation::{aggregate_sum, aggregate_updates};
use engram_federated::model::Update;
use engram_federated::round::{Batch, Contribution, Digest};
use engram_federated::service::{Report, decode_update, update_of};
use engram_federated::strategy::{Aggregator, UpdateHead};
use std::time::Instant;

/// Report of a task of which none is known.
const NO_REPORT: Report = Report { samples: 0, loss: None, rate_sum: None };

impl Core {
    /// Aggregates the next batch and stores the version. Returns `None` if there is none.
    pub(in crate::runs::federated) async fn aggregate_next(&mut self) -> Result<Option<Step>, Interruption> {
        let Some(batch) = self.batches.pop_front() else { return Ok(None) };
        let began = Instant::now();
        let (memory, model) = self.next_version(&batch).await?;
        let seconds = began.elapsed().as_secs_f64();
        self.memory = memory;
        let clients = batch.contributions.iter().map(|it| {
            let name = self.service.name_of(it.client).unwrap_or_default().to_owned();
            (name, self.service.report(it.task).copied().unwrap_or(NO_REPORT))
        });
        let updates = clients.collect();
        let missing = self.charging(|core| {
            let (_, actions) = core.service.aggregated(&batch, model, now_millis());
            let missing = std::mem::take(&mut core.missing);
            core.is_changed = true;
            core.apply(actions);
            missing
        });
        self.publish();
        self.write_state().await?;
        self.is_sweep_due = true;
        self.sweep_unused().await?;
        Ok(Some(Step { updates, missing, seconds }))
    }

    async fn next_version(&self, batch: &Batch) -> Result<(Memory, Digest), Interruption> {
        match &self.memory {
            Memory::Whole(aggregator) => {
                let aggregator = self.next_whole(batch, aggregator.clone()).await?;
                let model = put_version(&self.job, &self.contents, &aggregator).await?;
                Ok((Memory::Whole(aggregator), model))
            }
            Memory::Blocks(blocks) => {
                let mut blocks = blocks.clone();
                let named: Result<Vec<_>, _> = batch.contributions.iter().map(|it| self.named(it)).collect();
                let head = |(contribution, report, name): (&Contribution, Report, ContentName)| {
                    let Contribution { client, version, .. } = *contribution;
                    (name, UpdateHead { client, version, samples: report.samples })
                };
                let updates: Vec<(ContentName, UpdateHead)> = named?.into_iter().map(head).collect();
                let model = put_next_blocks(&self.job, &self.contents, &mut blocks, &updates).await?;
                Ok((Memory::Blocks(blocks), model))
            }
        }
    }

    async fn next_whole(&self, batch: &Batch, mut aggregator: Aggregator) -> Result<Aggregator, Interruption> {
        let (job, seed, number) = (self.job.clone(), *self.service.seed(), batch.number);
        let sum = self.masks.sum(batch.round).cloned();
        let base = batch.contributions.first().map_or(batch.version, |first| first.version);
        let updates = if job.secure.is_some() { Vec::new() } else { self.updates(batch, &aggregator).await? };
        let compute = move || {
            let result = match (&sum, job.secure.is_some()) {
                (Some(sum), true) => aggregate_sum(&job, &mut aggregator, sum, base, number, &seed),
                _ => aggregate_updates(&job, &mut aggregator, &updates, number, &seed),
            };
            result.map(|()| aggregator)
        };
        let computed = tokio::task::spawn_blocking(compute).await;
        let computed = computed.map_err(|error| failed(Code::RunFailed, error.to_string()))?;
        computed.map_err(|error| failed(Code::RunFailed, format!("failed to aggregate: {error}")))
    }

    /// Returns the report of a contribution, and the name of its content.
    fn named<'a>(
        &self,
        contribution: &'a Contribution,
    ) -> Result<(&'a Contribution, Report, ContentName), Interruption> {
        let task = contribution.task;
        let report = *self.service.report(task).ok_or_else(|| missing(task))?;
        Ok((contribution, report, ContentName::Update(task)))
    }

    /// Reads the updates of a batch.
    async fn updates(&self, batch: &Batch, aggregator: &Aggregator) -> Result<Vec<Update>, Interruption> {
        let mut updates = Vec::with_capacity(batch.contributions.len());
        for contribution in &batch.contributions {
            let (_, report, name) = self.named(contribution)?;
            let content = patiently(|| self.contents.get(name)).await?.ok_or_else(|| missing(contribution.task))?;
            let delta = decode_update(&content, self.job.parameters(), &contribution.digest)
                .map_err(|error| failed(Code::Corrupt, error.to_string()))?;
            let mut update = update_of(contribution, report.samples, delta);
            if aggregator.strategy().has_control() {
                update.control = Some(aggregator.control_change(&update.delta, report.rate_sum.unwrap_or(1.0)));
            }
            updates.push(update);
        }
        Ok(updates)
    }
}

fn missing(task: u64) -> Interruption {
    failed(Code::Corrupt, format!("the update of task {task} is missing"))
}
