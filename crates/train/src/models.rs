//! The models of a run: one, or the members of an ensemble, on the logical devices of a worker.

use std::collections::BTreeMap;

use engram_api::ReplayRun;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::ensemble::{Ensemble, MAX_MEMBERS, member_seed, member_specs};
use crate::job::{Job, JobError, MAX_PARAMETERS, field};

impl Job {
    /// All models at step 0.
    ///
    /// # Errors
    /// As [`Self::trainer`].
    pub fn models(&self) -> Result<Ensemble, JobError> {
        let mut ensemble = Ensemble::new(&member_specs(&self.spec, self.ensemble))?;
        ensemble.members_mut().iter_mut().try_for_each(|trainer| self.freeze(trainer))?;
        self.share(&mut ensemble);
        Ok(ensemble)
    }

    /// All models as a checkpoint has them, and the positions of the data.
    ///
    /// # Errors
    /// As [`Ensemble::restore`].
    pub fn restore(&self, checkpoint: &Checkpoint) -> Result<(Ensemble, BTreeMap<String, u64>), CheckpointError> {
        let (mut ensemble, cursors) = Ensemble::restore(&self.spec, self.ensemble, checkpoint)?;
        self.share(&mut ensemble);
        Ok((ensemble, cursors))
    }

    fn share(&self, ensemble: &mut Ensemble) {
        if let Some(parallelism) = self.parallelism {
            ensemble.members_mut().iter_mut().for_each(|trainer| trainer.set_parallelism(parallelism));
        }
        if let Some(secret) = self.noise_secret {
            ensemble.members_mut().iter_mut().for_each(|trainer| trainer.set_noise_secret(secret));
        }
    }

    /// Seed of a model, from which its batches follow.
    pub fn member_seed(&self, member: usize) -> u64 {
        member_seed(self.spec.seed, member)
    }

    /// Checks the number of models.
    pub(crate) fn check_ensemble(&self, run: &ReplayRun, parameters: usize) -> Result<(), JobError> {
        const FIELD: &str = "spec.replay.ensemble";
        if !(1..=MAX_MEMBERS).contains(&self.ensemble) {
            return Err(field(FIELD, self.ensemble, format!("1 to {MAX_MEMBERS}")));
        }
        if self.ensemble > 1 && run.compression.is_some() {
            return Err(field(FIELD, self.ensemble, "1 with compression"));
        }
        let most = MAX_PARAMETERS / parameters.max(1);
        if self.ensemble > most {
            let allowed = format!("1 to {most}: all models together have at most {MAX_PARAMETERS} parameters");
            return Err(field(FIELD, self.ensemble, allowed));
        }
        Ok(())
    }
}
