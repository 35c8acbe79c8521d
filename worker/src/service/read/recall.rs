//! Recall: of local partitions on the engine's thread, of all partitions through the client library.

use crate::engine::device_problem;
use crate::service::Memories;
use crate::service::read::{add_keys, client_problem};
use crate::write::batch::of_rows;
use engram_client::RecallOptions;
use engram_kernels::recall::Query;
use engram_proto::v1::{self, MemoryBatch, Problem, ProblemKind};
use engram_proto::{answers, columns};

/// Maximum number of memories in a response, which is one message.
const MAX_MEMORIES: u32 = 4_096;

impl Memories {
    pub(crate) async fn recalled(&self, request: v1::RecallRequest) -> Result<v1::RecallResponse, Problem> {
        if !(1..=MAX_MEMORIES).contains(&request.limit) {
            let text = format!("limit: {} is not allowed; allowed: 1 to 4,096", request.limit);
            return Err(Problem::of(ProblemKind::Invalid, text));
        }
        let invalid = |error: &dyn std::fmt::Display| Problem::of(ProblemKind::Invalid, error.to_string());
        let bits = columns::query(&request.query, self.shared.setup.shape.features).map_err(|error| invalid(&error))?;
        let group = request.group.map(answers::group).transpose().map_err(|error| invalid(&error))?;
        let consistency = self.consistency(request.read)?;
        if !self.is_local(request.local) {
            let options = RecallOptions { limit: request.limit, group, keys: request.with_keys };
            let recalled = self
                .peers(&consistency)
                .recall(request.query, options)
                .await
                .map_err(|error| client_problem(&error))?;
            let (rows, scores): (Vec<_>, Vec<_>) = recalled.into_iter().map(|one| (one.memory, one.score)).unzip();
            return Ok(v1::RecallResponse { memories: Some(of_rows(&rows)), scores });
        }
        let (limit, with_keys) = (request.limit as usize, request.with_keys);
        let read = self.read_all(consistency, move |partitions, versions| {
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
            Ok(v1::RecallResponse { memories: Some(batch), scores: recalled.iter().map(|one| one.score).collect() })
        });
        read.await?.map_err(|error| device_problem(&error))
    }
}
