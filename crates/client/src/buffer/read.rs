//! Samples and reads.

use super::spec::refused;
use super::{Batch, Buffer};
use crate::call::{Failure, Service};
use crate::client::Client;
use crate::error::Error;
use crate::map::Map;
use crate::read::{next, opened};
use engram_memory::edge::ShortNumber;
use engram_memory::{MemoryId, Ordinal};
use engram_proto::v1;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Request, Response, Status, Streaming};

/// Which fields a call returns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Fields {
    /// All.
    #[default]
    All,
    /// None: handles, priorities and versions only.
    None,
    /// The named ones.
    Named(Vec<String>),
}

impl Fields {
    /// Returns the named fields.
    pub fn named<S: Into<String>>(names: impl IntoIterator<Item = S>) -> Self {
        Self::Named(names.into_iter().map(Into::into).collect())
    }

    pub(super) fn to_wire(&self) -> (Vec<String>, bool) {
        match self {
            Self::All => (Vec::new(), false),
            Self::None => (Vec::new(), true),
            Self::Named(names) => (names.clone(), names.is_empty()),
        }
    }
}

/// How items are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum SampleBy {
    /// As the settings of the buffer say; refused if they do not.
    Default,
    /// With probability proportional to `priority ^ alpha`, with replacement; with importance weights of exponent `beta`.
    Prioritized {
        /// In [0, 1].
        alpha: f64,
        /// In [0, 1].
        beta: f64,
    },
    /// Every item alike, with replacement.
    Uniform,
    /// The oldest.
    Fifo,
    /// The newest.
    Lifo,
    /// Slices of consecutive items of one trajectory.
    Slices {
        /// Items per slice.
        length: u32,
    },
    /// The oldest complete groups of items with the same prompt.
    Groups {
        /// Items per group.
        size: u32,
    },
}

impl SampleBy {
    /// Checks the settings.
    pub(super) fn check(self) -> Result<(), Error> {
        match self {
            Self::Prioritized { alpha, beta } => {
                for (field, value) in [("sampler.alpha", alpha), ("sampler.beta", beta)] {
                    if !(0.0..=1.0).contains(&value) {
                        return Err(refused(field, ShortNumber(value), "0 to 1"));
                    }
                }
                Ok(())
            }
            Self::Slices { length: 0 } => Err(refused("sampler.length", 0, "at least 1")),
            Self::Groups { size: 0 } => Err(refused("sampler.size", 0, "at least 1")),
            _ => Ok(()),
        }
    }

    /// Encodes the sampler; `None` for that of the buffer.
    pub const fn to_request(self) -> Option<v1::sample_items_request::Sampler> {
        use v1::sample_items_request::Sampler;
        Some(match self {
            Self::Default => return None,
            Self::Prioritized { alpha, beta } => Sampler::Prioritized(v1::PrioritizedSampler { alpha, beta }),
            Self::Uniform => Sampler::Uniform(v1::UniformSampler {}),
            Self::Fifo => Sampler::Fifo(v1::FifoSampler {}),
            Self::Lifo => Sampler::Lifo(v1::LifoSampler {}),
            Self::Slices { length } => Sampler::Slices(v1::SliceSampler { length }),
            Self::Groups { size } => Sampler::Groups(v1::GroupSampler { size }),
        })
    }

    /// Encodes the sampler as a setting of a buffer; `None` for that of the buffer itself.
    pub(super) const fn to_wire(self) -> Option<v1::buffer_sampler::Sampler> {
        use v1::buffer_sampler::Sampler;
        Some(match self {
            Self::Default => return None,
            Self::Prioritized { alpha, beta } => Sampler::Prioritized(v1::PrioritizedSampler { alpha, beta }),
            Self::Uniform => Sampler::Uniform(v1::UniformSampler {}),
            Self::Fifo => Sampler::Fifo(v1::FifoSampler {}),
            Self::Lifo => Sampler::Lifo(v1::LifoSampler {}),
            Self::Slices { length } => Sampler::Slices(v1::SliceSampler { length }),
            Self::Groups { size } => Sampler::Groups(v1::GroupSampler { size }),
        })
    }

    /// Decodes a setting of a buffer.
    pub(super) const fn from_setting(sampler: v1::buffer_sampler::Sampler) -> Self {
        use v1::buffer_sampler::Sampler;
        match sampler {
            Sampler::Prioritized(it) => Self::Prioritized { alpha: it.alpha, beta: it.beta },
            Sampler::Uniform(_) => Self::Uniform,
            Sampler::Fifo(_) => Self::Fifo,
            Sampler::Lifo(_) => Self::Lifo,
            Sampler::Slices(it) => Self::Slices { length: it.length },
            Sampler::Groups(it) => Self::Groups { size: it.size },
        }
    }
}

/// A request for a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// How items are chosen.
    pub by: SampleBy,
    /// Items; of slices and groups, the number of these.
    pub count: u32,
    /// A draw is a function of seed, step and the items.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// Fields to return.
    pub fields: Fields,
    /// Policy version of the learner, for the buffer's `max_age`.
    pub version: u64,
    /// Rank among the members that draw from one plan.
    pub rank: u32,
    /// Number of members; at least 1.
    pub world: u32,
    /// Of prioritized sampling: draws `count` items, a number of this member's choice, from its own partitions, which are every world-th of the
    /// buffer's. [`Batch::scale`] makes the sum over all members unbiased.
    pub local: bool,
    /// Longest wait for items or for the limiter; by default none.
    pub wait: Duration,
}

impl Sample {
    /// Returns a request for `count` items with all fields.
    pub const fn new(by: SampleBy, count: u32, seed: u64, step: u64) -> Self {
        let (fields, wait) = (Fields::All, Duration::ZERO);
        Self { by, count, seed, step, fields, version: 0, rank: 0, world: 1, local: false, wait }
    }
}

impl Buffer {
    /// Draws a batch.
    ///
    /// # Errors
    /// [`BufferWait`](engram_proto::v1::ProblemKind::BufferWait) with what it waited for, if there are not enough items, or the limiter does
    /// not allow it in time.
    pub async fn sample(&self, sample: Sample) -> Result<Batch, Error> {
        let (fields, without_fields) = sample.fields.to_wire();
        let message = v1::SampleItemsRequest {
            buffer: self.name().to_owned(),
            sampler: sample.by.to_request(),
            count: sample.count,
            seed: sample.seed,
            step: sample.step,
            fields,
            without_fields,
            version: sample.version,
            rank: sample.rank,
            world: sample.world,
            local: sample.local,
            wait_ms: millis(sample.wait),
        };
        self.stream(
            sample.wait,
            message,
            |mut worker, request| async move { worker.buffers().sample_items(request).await },
        )
        .await
    }

    /// Leases up to `count` of the oldest items that a consumer has not had. They belong to this call until they are acknowledged, or until the
    /// lease ends.
    ///
    /// # Errors
    /// [`BufferWait`](engram_proto::v1::ProblemKind::BufferWait) if there is no item in time.
    pub async fn consume(
        &self,
        consumer: &str,
        count: u32,
        lease: Duration,
        wait: Duration,
        fields: Fields,
    ) -> Result<Batch, Error> {
        let (fields, without_fields) = fields.to_wire();
        let message = v1::ConsumeItemsRequest {
            buffer: self.name().to_owned(),
            consumer: consumer.to_owned(),
            count,
            lease_ms: millis(lease).into(),
            fields,
            without_fields,
            wait_ms: millis(wait),
        };
        self.stream(wait, message, |mut worker, request| async move { worker.buffers().consume_items(request).await })
            .await
    }

    /// Returns handles, priorities, versions and tags, oldest first, of the items with this tag or of all; at most `limit`, all if it is 0.
    /// Items that are appended or removed meanwhile may be missing or present.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn list(&self, tag: Option<&[u8]>, limit: u32) -> Result<Batch, Error> {
        let mut listed = Batch::default();
        let mut after = None;
        loop {
            let left = limit.saturating_sub(listed.len() as u32);
            let (page, more) = self.page(tag, after, left).await?;
            listed.extend(page);
            if more.is_none() || (limit > 0 && listed.len() >= limit as usize) {
                return Ok(listed);
            }
            after = more;
        }
    }

    /// Returns one page of [`Buffer::list`], after an item, and the item after which the next page begins: `None` at the end. A page has at most
    /// 32,768 items, and may have none where no item has the tag.
    ///
    /// # Errors
    /// As for [`Error`].
    pub async fn page(
        &self,
        tag: Option<&[u8]>,
        after: Option<MemoryId>,
        limit: u32,
    ) -> Result<(Batch, Option<MemoryId>), Error> {
        let tag = tag.map(|tag| tag.to_vec().into());
        let after = after.map(|handle| handle.0);
        let message = v1::ListItemsRequest { buffer: self.name().to_owned(), tag, limit, after };
        let call = |mut worker: Service, request| async move { worker.buffers().list_items(request).await };
        let parts = self.parts(Duration::ZERO, message, Client::any_worker, call).await?;
        let more = parts.iter().find_map(|part| part.more_after).map(MemoryId);
        Ok((self.join(parts)?, more))
    }

    fn join(&self, parts: Vec<v1::ItemBatch>) -> Result<Batch, Error> {
        Batch::join(parts, |name| self.spec().fields.iter().any(|field| field.jagged && field.name == name))
    }

    /// Calls a worker and joins its answer.
    async fn stream<M: Clone, F>(
        &self,
        wait: Duration,
        message: M,
        call: impl Fn(Service, Request<M>) -> F,
    ) -> Result<Batch, Error>
    where
        F: Future<Output = Result<Response<Streaming<v1::ItemBatch>>, Status>>,
    {
        self.join(self.parts(wait, message, Client::any_worker, call).await?)
    }

    /// Calls a worker and reads its answer, with retries until the deadline.
    pub(super) async fn parts<M: Clone, F>(
        &self,
        wait: Duration,
        message: M,
        worker: impl Fn(&Client) -> Result<(Arc<Map>, Ordinal, Service), Failure>,
        call: impl Fn(Service, Request<M>) -> F,
    ) -> Result<Vec<v1::ItemBatch>, Error>
    where
        F: Future<Output = Result<Response<Streaming<v1::ItemBatch>>, Status>>,
    {
        let client = self.client();
        let mut retry = client.read().waiting(wait);
        loop {
            let response = async {
                let (map, owner, service) = worker(client)?;
                let deadline = client.attempt(&retry);
                let read = async {
                    let mut parts = opened(deadline, call(service, client.request(message.clone(), deadline))).await?;
                    let mut read = Vec::new();
                    // A worker may stop in the middle of its answer.
                    while let Some(part) = next(&mut parts, client.attempt(&retry)).await? {
                        read.push(part);
                    }
                    Ok(read)
                };
                client.while_owner(&map, owner, read).await
            };
            match response.await {
                Ok(parts) => return Ok(parts),
                Err(failure) => retry.after(client, failure).await?,
            }
        }
    }
}

pub(super) fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
