//! SCAFFOLD: what a client adds to its gradients, and what the server needs to follow its control variate.
//!
//! The control variates of all clients are part of what the strategy remembers: they change with a version, exactly once, and a client that lost its
//! state goes on with its own.

use crate::runs::federated::Caller;
use crate::runs::federated::core::Core;
use engram_federated::error::InvalidInput;
use engram_federated::model_signature::{correction_name, sign_model};
use engram_federated::round::{Refusal, Task};
use engram_federated::service::{Denial, digest, encode_values};

impl Core {
    /// Returns digest and signature of the correction of a task's client; empty without SCAFFOLD.
    pub(in crate::runs::federated::core) fn signed_correction(&self, task: &Task) -> (Vec<u8>, Vec<u8>) {
        let Some((_, correction)) = self.memory.correction(task.client) else { return Default::default() };
        let client = self.service.name_of(task.client).unwrap_or_default();
        let digest = digest(&encode_values(&correction));
        let name = correction_name(&self.job.rounds.run, client);
        (digest.to_vec(), sign_model(self.service.seed(), &name, task.version, &digest))
    }

    /// Returns a part of the caller's correction, and the length of the whole.
    pub(in crate::runs::federated::core) fn correction_part(
        &self,
        caller: &Caller,
        version: u64,
        offset: u64,
        bytes: usize,
    ) -> Result<(Vec<u8>, u64), Denial> {
        let client = self.service.authenticate(&caller.client, &caller.secret)?;
        let found = self.memory.correction(client);
        let (current, correction) = found
            .ok_or_else(|| InvalidInput::new("correction", true, "false: the strategy has no control variates"))?;
        if current != version {
            return Err(Refusal::LeaseExpired.into());
        }
        let content = encode_values(&correction);
        let start = content.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let end = content.len().min(start.saturating_add(bytes));
        Ok((content[start..end].to_vec(), content.len() as u64))
    }

    /// Checks the sum of the local step sizes of an update: required with SCAFFOLD, and not used without.
    pub(in crate::runs::federated::core) fn required_rate_sum(
        &self,
        rate_sum: Option<f64>,
    ) -> Result<Option<f64>, InvalidInput> {
        if !self.job.strategy.has_control() {
            return Ok(None);
        }
        let allowed = "the sum of the local step sizes: the strategy is Scaffold";
        rate_sum.map(Some).ok_or_else(|| InvalidInput::new("rate_sum", "none", allowed))
    }
}
