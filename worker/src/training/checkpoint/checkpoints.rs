//! The thread that writes the checkpoints of a member, one at a time.

use crate::training::checkpoint::files::{CheckpointFolder, ModelFiles};
use crate::training::transport::remote::RemoteCheckpoints;
use engram_train::Checkpoint;

/// Checkpoints of a member, written by a thread of their own.
pub(in crate::training) struct Checkpoints {
    pub(in crate::training) folder: CheckpointFolder,
    pub(in crate::training) remote: Option<RemoteCheckpoints>,
    pub(in crate::training) every: u64,
    pub(in crate::training) model: ModelFiles,
    pub(in crate::training) writer: Option<std::thread::JoinHandle<anyhow::Result<()>>>,
    /// Step of the newest checkpoint, and of the one being written.
    pub(in crate::training) written: u64,
    pub(in crate::training) writing: u64,
}

impl Checkpoints {
    /// Starts to write a checkpoint, unless the last one is still being written. The first rank (`is_first`) also writes its copy.
    pub(in crate::training) fn start(&mut self, step: u64, checkpoint: Checkpoint, is_first: bool) {
        if self.writer.as_ref().is_some_and(|writer| !writer.is_finished()) {
            tracing::warn!(
                step,
                writing = self.writing,
                "skipped a checkpoint: the disk is still writing the last one"
            );
            return;
        }
        self.wait();
        self.writing = step;
        let (folder, model) = (self.folder.clone(), self.model.clone());
        let remote = self.remote.clone().filter(|_| is_first);
        self.writer = Some(std::thread::spawn(move || {
            folder.write(step, &checkpoint, &model)?;
            remote.map_or(Ok(()), |remote| remote.write(step, &checkpoint, &model))
        }));
    }

    /// Waits for the checkpoint being written.
    pub(in crate::training) fn wait(&mut self) {
        let Some(writer) = self.writer.take() else { return };
        match writer.join() {
            Ok(Ok(())) => self.written = self.writing,
            Ok(Err(error)) => tracing::error!(error = format!("{error:#}"), "failed to write a checkpoint"),
            Err(_) => tracing::error!("the thread that writes checkpoints panicked"),
        }
    }
}
