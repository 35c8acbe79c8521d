//! Recall over all workers: each finds the most alike of its own, the client merges.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::read::broken;
use crate::rows::{Memory, memories};
use engram_memory::Group;
use engram_proto::v1;

/// What to recall.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecallOptions {
    /// How many at most, 1 to 4,096.
    pub limit: u32,
    /// Of this group only.
    pub group: Option<Group>,
    /// With keys and groups.
    pub keys: bool,
}

/// A memory that is like the query.
#[derive(Debug, Clone, PartialEq)]
pub struct Recalled {
    /// The memory, without features and payload.
    pub memory: Memory,
    /// Cosine of features and query, times weight.
    pub score: f32,
}

impl Client {
    /// The memories most alike `query`, as many numbers as the cluster's dimension: by score descending, then id ascending. Each
    /// worker answers as of one moment.
    ///
    /// # Errors
    /// As [`Error`] says; the cluster has no features of f16, or the query has another dimension.
    pub async fn recall(&self, query: Vec<f32>, options: RecallOptions) -> Result<Vec<Recalled>, Error> {
        let query = &query;
        let replies = self
            .everywhere(|mut service, read, deadline| async move {
                let message = v1::RecallRequest {
                    local: true,
                    query: query.clone(),
                    limit: options.limit,
                    group: options.group.map(|group| u32::from(group.0)),
                    with_keys: options.keys,
                    read,
                };
                let reply = service.recall(self.request(message, deadline)).await?.into_inner();
                let batch = reply.memories.unwrap_or_default();
                let rows = memories(&batch).map_err(|error| broken(&error))?;
                if rows.len() != reply.scores.len() {
                    return Err(Failure::unavailable("a worker told scores of other memories"));
                }
                let recalled = rows.into_iter().zip(reply.scores).map(|(memory, score)| Recalled { memory, score });
                Ok((batch.versions, recalled.collect::<Vec<_>>()))
            })
            .await?;
        let mut recalled: Vec<Recalled> = replies.into_iter().flatten().collect();
        recalled.sort_unstable_by(|a, b| b.score.total_cmp(&a.score).then(a.memory.id.cmp(&b.memory.id)));
        recalled.truncate(options.limit as usize);
        Ok(recalled)
    }
}
