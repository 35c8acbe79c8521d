//! Recall over all workers: each finds its most similar memories, the client merges.

use crate::call::Failure;
use crate::client::Client;
use crate::error::Error;
use crate::read::protocol_violation;
use crate::rows::{Memory, memories};
use engram_memory::Group;
use engram_proto::v1;

/// Options of a recall query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecallOptions {
    /// Maximum number of matches, 1 to 4,096.
    pub limit: u32,
    /// Only this group.
    pub group: Option<Group>,
    /// Include keys and groups.
    pub keys: bool,
}

/// A memory similar to the query.
#[derive(Debug, Clone, PartialEq)]
pub struct RecallMatch {
    /// The memory, without features and payload.
    pub memory: Memory,
    /// Cosine of features and query, times weight.
    pub score: f32,
}

impl Client {
    /// Returns the memories most similar to `query`, whose length is the cluster's dimension: by score descending, then
    /// id ascending. Each worker responds from one snapshot.
    ///
    /// # Errors
    /// As for [`Error`]; the cluster has no f16 features, or the query has another dimension.
    pub async fn recall(&self, query: Vec<f32>, options: RecallOptions) -> Result<Vec<RecallMatch>, Error> {
        let query = &query;
        let replies = self
            .fan_out(|mut service, read, deadline| async move {
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
                let rows = memories(&batch).map_err(|error| protocol_violation(&error))?;
                if rows.len() != reply.scores.len() {
                    return Err(Failure::unavailable("a worker returned scores of other memories"));
                }
                let matches = rows.into_iter().zip(reply.scores).map(|(memory, score)| RecallMatch { memory, score });
                Ok((batch.versions, matches.collect::<Vec<_>>()))
            })
            .await?;
        let mut matches: Vec<RecallMatch> = replies.into_iter().flatten().collect();
        matches.sort_unstable_by(|a, b| b.score.total_cmp(&a.score).then(a.memory.id.cmp(&b.memory.id)));
        matches.truncate(options.limit as usize);
        Ok(matches)
    }
}
