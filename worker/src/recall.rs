//! Recall: of this worker's partitions on the engine's thread, of all through the client library.

use crate::batch::of_rows;
use crate::engine::device_problem;
use crate::read::{add_keys, passed_on};
use crate::service::Memories;
use engram_client::RecallOptions;
use engram_kernels::recall::Query;
use engram_proto::v1::{self, MemoryBatch, Problem, ProblemKind};
use engram_proto::{answers, columns};

/// Most memories of an answer: it is one message.
const MOST: u32 = 4_096;

impl Memories {
    pub(crate) async fn recalled(&self, asked: v1::RecallRequest) -> Result<v1::RecallReply, Problem> {
        if !(1..=MOST).contains(&asked.limit) {
            let text = format!("limit: {} is not allowed; allowed: 1 to 4,096", asked.limit);
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let invalid = |error: &dyn std::fmt::Display| Problem::of(ProblemKind::Invalid, error.to_string());
        let bits = columns::query(&asked.query, self.shared.shape.features).map_err(|error| invalid(&error))?;
        let group = asked.group.map(answers::group).transpose().map_err(|error| invalid(&error))?;
        let how = self.how(asked.read)?;
        if !self.is_local(asked.local) {
            let options = RecallOptions { limit: asked.limit, group, keys: asked.with_keys };
            let recalled = self.peers(&how).recall(asked.query, options).await.map_err(|error| passed_on(&error))?;
            let (rows, scores): (Vec<_>, Vec<_>) = recalled.into_iter().map(|one| (one.memory, one.score)).unzip();
            return Ok(v1::RecallReply { memories: Some(of_rows(&rows)), scores });
        }
        let (limit, with_keys) = (asked.limit as usize, asked.with_keys);
        let read = self.read_all(how, move |partitions, versions| {
            let recalled = partitions.recall(&Query::new(&bits), limit, group)?;
            let mut batch = MemoryBatch {
                ids: recalled.iter().map(|one| one.id.0).collect(),
                weight_units: recalled.iter().map(|one| one.weight.units()).collect(),
                versions,
                ..Default::default()
            };
            if with_keys {
                add_keys(partitions, &mut batch)?;
            }
            Ok(v1::RecallReply { memories: Some(batch), scores: recalled.iter().map(|one| one.score).collect() })
        });
        read.await?.map_err(|error| device_problem(&error))
    }
}
