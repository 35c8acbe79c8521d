//! One client of one run.

use crate::masks;
use crate::{ClientKeys, Error, ModelKey, refused};
use engram_client::Client;
use engram_federated::error::InvalidInput;
use engram_federated::job::{BLOCK_PARAMETERS, MAX_PARAMETERS_IN_MEMORY};
use engram_federated::quantized;
use engram_federated::round::Digest;
use engram_federated::service::{DigestStream, Report, decode_values, digest, digest_of_chunks, encode_values};
use engram_proto::v1::{self, ModelEncoding};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of a part of a model or an update.
const PART_BYTES: usize = 4 * BLOCK_PARAMETERS;
/// Downloads of the newest model that may be overtaken by a newer one.
const MAX_DOWNLOADS: u32 = 20;
/// Longest wait of one call for a task.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Work for the client: a task with its model.
#[derive(Debug, Clone)]
pub struct Assignment {
    /// The task.
    pub task: v1::FederatedTask,
    /// Shared parameters, layer after layer.
    pub model: Arc<Vec<f32>>,
    /// SCAFFOLD: what a local step adds to its gradient.
    pub correction: Option<Vec<f32>>,
}

/// What a client reports with its update.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Training {
    /// Samples it was trained on, at least 1.
    pub samples: u64,
    /// Loss of the downloaded model on the client's data.
    pub loss: Option<f64>,
    /// SCAFFOLD: sum of the step sizes of the local steps.
    pub rate_sum: Option<f64>,
}

/// What a check-in brought.
#[derive(Debug, Clone)]
pub enum Next {
    /// Work.
    Task(Box<Assignment>),
    /// None yet.
    Nothing,
    /// The run has ended.
    Ended(String),
}

/// Digest and parameters of a model.
type CachedModel = (Vec<u8>, Arc<Vec<f32>>);

/// A client of a run.
#[derive(Debug)]
pub struct Participant {
    client: Client,
    caller: v1::FederatedCaller,
    keys: ClientKeys,
    /// Key of the run's models.
    model_key: ModelKey,
    /// The newest model by its digest: a version is downloaded once.
    cached: Mutex<Option<CachedModel>>,
}

impl Participant {
    /// Creates the client called `name` of a run.
    #[must_use]
    pub fn new(client: Client, run: &str, name: &str, keys: ClientKeys) -> Self {
        let caller =
            v1::FederatedCaller { run: run.to_owned(), client: name.to_owned(), secret: keys.secret().to_vec().into() };
        Self { client, caller, keys, model_key: ModelKey::default(), cached: Mutex::default() }
    }

    /// Checks models by this key. Without it the key of the first task is used as long as this client exists.
    #[must_use]
    pub fn with_model_key(mut self, key: ModelKey) -> Self {
        self.model_key = key;
        self
    }

    pub(crate) const fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn caller(&self) -> Option<v1::FederatedCaller> {
        Some(self.caller.clone())
    }

    pub(crate) const fn keys(&self) -> &ClientKeys {
        &self.keys
    }

    /// Waits up to `wait`, at most 30 s, for a task, and downloads its model.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn next(&self, wait: Duration) -> Result<Next, Error> {
        let request = v1::CheckInRequest {
            caller: self.caller(),
            wait_ms: wait.min(MAX_WAIT).as_millis() as u32,
            identity_key: self.keys.identity_key().to_vec().into(),
        };
        let answer = self.client.federated_check_in(request).await?;
        refused(answer.refusal)?;
        if !answer.ended.is_empty() {
            return Ok(Next::Ended(answer.ended));
        }
        let Some(task) = answer.task else { return Ok(Next::Nothing) };
        self.model_key.check(&self.caller.run, &task)?;
        match self.assignment_of(task).await {
            // The round has ended without this client, and its version is not kept any more.
            Err(error) if error.is_stale() => Ok(Next::Nothing),
            assignment => Ok(Next::Task(Box::new(assignment?))),
        }
    }

    async fn assignment_of(&self, task: v1::FederatedTask) -> Result<Assignment, Error> {
        let model = self.model_of(&task).await?;
        let correction = match task.correction_digest.is_empty() {
            true => None,
            false => Some(self.correction_of(&task).await?),
        };
        Ok(Assignment { task, model, correction })
    }

    async fn model_of(&self, task: &v1::FederatedTask) -> Result<Arc<Vec<f32>>, Error> {
        let cached = self.cached.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        if let Some((_, model)) = cached.filter(|(digest, _)| *digest == task.model_digest) {
            return Ok(model);
        }
        let (values, digest) = match task.model_encoding() {
            ModelEncoding::Unspecified => self.download_values(task.version, false).await?,
            ModelEncoding::Int8 => {
                let mut content = Vec::new();
                self.download(task.version, ModelEncoding::Int8, false, |part| content.extend_from_slice(part)).await?;
                let values = quantized::decode(&content, task.model_bytes as usize / 4);
                (values.ok_or(Error::Protocol("8-bit model"))?, digest(&content))
            }
        };
        if digest[..] != task.model_digest[..] {
            return Err(Error::Digest);
        }
        let model = Arc::new(values);
        let entry = Some((task.model_digest.to_vec(), Arc::clone(&model)));
        *self.cached.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = entry;
        Ok(model)
    }

    async fn correction_of(&self, task: &v1::FederatedTask) -> Result<Vec<f32>, Error> {
        self.model_key.check_correction((&self.caller.run, &self.caller.client), task)?;
        let (values, digest) = self.download_values(task.version, true).await?;
        if digest[..] != task.correction_digest[..] || values.len() as u64 * 4 != task.model_bytes {
            return Err(Error::Digest);
        }
        Ok(values)
    }

    /// Returns the newest model of the run, while it runs and after it. All parts are of one version, whose signature and digest are checked.
    ///
    /// # Errors
    /// See [`Error`]; the caller has no right to read the cluster.
    pub async fn newest_model(&self) -> Result<Vec<f32>, Error> {
        let mut attempts = 1;
        loop {
            match self.download_published().await {
                // A newer version took its place during the download.
                Err(Error::Refused { reason: v1::FederatedRefusalReason::Stale, .. }) if attempts < MAX_DOWNLOADS => {
                    attempts += 1;
                }
                downloaded => return downloaded,
            }
        }
    }

    async fn download_published(&self) -> Result<Vec<f32>, Error> {
        let (mut values, mut digest) = (Vec::new(), DigestStream::default());
        let (mut version, mut signed) = (None, None);
        let mut offset = 0;
        loop {
            let request = v1::GetPublishedModelRequest {
                run: self.caller.run.clone(),
                version,
                offset,
                bytes: PART_BYTES as u32,
            };
            let part = self.client.federated_published(request).await?;
            refused(part.refusal)?;
            if version.is_none() {
                let key = [&part.model_key[..], &part.model_digest[..], &part.model_signature[..]];
                self.model_key.check_signed(&self.caller.run, part.version, key)?;
                (version, signed) = (Some(part.version), Some(part.model_digest));
            }
            digest.add(&part.content);
            values.extend(decode_values(&part.content));
            offset += part.content.len() as u64;
            if offset >= part.model_bytes {
                break;
            }
            if part.content.is_empty() {
                return Err(Error::Protocol("part of the model"));
            }
        }
        if signed.is_none_or(|signed| signed[..] != digest.finish()[..]) {
            return Err(Error::Digest);
        }
        Ok(values)
    }

    /// Downloads 32-bit values. Returns them with the digest of their bytes; memory holds the values and one part.
    async fn download_values(&self, version: u64, correction: bool) -> Result<(Vec<f32>, Digest), Error> {
        let (mut values, mut digest) = (Vec::new(), DigestStream::default());
        // Parts but the last end with a value.
        self.download(version, ModelEncoding::Unspecified, correction, |part| {
            digest.add(part);
            values.extend(decode_values(part));
        })
        .await?;
        Ok((values, digest.finish()))
    }

    async fn download(
        &self,
        version: u64,
        encoding: ModelEncoding,
        correction: bool,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), Error> {
        let mut offset = 0;
        loop {
            let request = v1::GetModelPartRequest {
                caller: self.caller(),
                version,
                offset,
                bytes: PART_BYTES as u32,
                encoding: encoding.into(),
                correction,
            };
            let part = self.client.federated_model_part(request).await?;
            refused(part.refusal)?;
            take(&part.content);
            offset += part.content.len() as u64;
            if offset >= part.model_bytes {
                return Ok(());
            }
            if part.content.is_empty() {
                return Err(Error::Protocol("part of the model"));
            }
        }
    }

    /// Sends the update of a task: the trained parameters minus those of its model. `loss` is that of the downloaded model on the client's
    /// data. Returns whether it was acknowledged before.
    ///
    /// # Errors
    /// See [`Error`]; after [`Error::is_stale`] the client checks in again.
    pub async fn submit(
        &self,
        task: &v1::FederatedTask,
        update: &[f32],
        samples: u64,
        loss: Option<f64>,
    ) -> Result<bool, Error> {
        self.submit_training(task, update, Training { samples, loss, rate_sum: None }).await
    }

    /// As [`Self::submit`], with all that a client reports.
    ///
    /// # Errors
    /// As [`Self::submit`].
    pub async fn submit_training(
        &self,
        task: &v1::FederatedTask,
        update: &[f32],
        training: Training,
    ) -> Result<bool, Error> {
        let parameters = task.model_bytes as usize / 4;
        if update.len() != parameters {
            let (value, allowed) = (format!("{} values", update.len()), format!("{parameters} values"));
            return Err(InvalidInput::new("update", value, allowed).into());
        }
        if let Some(at) = update.iter().position(|value| !value.is_finite()) {
            return Err(InvalidInput::new("update", format!("{} at {at}", update[at]), "finite numbers").into());
        }
        let Training { samples, loss, rate_sum } = training;
        Report { samples, loss, rate_sum }.check()?;
        if !task.cohort.is_empty() {
            masks::submit(self, task, update, training.loss).await?;
            return Ok(false);
        }
        self.upload(task.number, update, training).await
    }

    /// Sends an update in chunks, and submits it. A part that the server has is not sent again. A task of which the server has another upload, as of
    /// a client that trained it before a restart, is given up.
    async fn upload(&self, task: u64, update: &[f32], training: Training) -> Result<bool, Error> {
        let digest = update_digest(update);
        // The same content continues an upload that was cut; another one begins again.
        let nonce = u64::from_le_bytes(digest[..8].try_into().unwrap_or_default());
        match self.send_chunks(task, nonce, update).await {
            Err(error @ Error::Refused { reason: v1::FederatedRefusalReason::Conflict, .. }) => {
                self.give_up(task).await?;
                return Err(error);
            }
            // It may have been counted before its answer was lost.
            Err(error) if error.is_stale() => {}
            sent => sent?,
        }
        let request = v1::CommitUpdateRequest {
            caller: self.caller(),
            task,
            nonce,
            digest: digest.to_vec().into(),
            samples: training.samples,
            loss: training.loss,
            rate_sum: training.rate_sum,
        };
        let answer = self.client.federated_commit(request).await?;
        refused(answer.refusal)?;
        Ok(answer.repeated)
    }

    async fn send_chunks(&self, task: u64, nonce: u64, update: &[f32]) -> Result<(), Error> {
        let total = update.len().div_ceil(BLOCK_PARAMETERS) as u32;
        let mut next = if total > 1 { self.send_chunk(task, nonce, update, None).await? } else { 0 };
        while next < total {
            match self.send_chunk(task, nonce, update, Some(next)).await? {
                after if after > next => next = after,
                _ => return Err(Error::Protocol("number of the next chunk")),
            }
        }
        Ok(())
    }

    /// Sends a chunk, or only asks which one is next. Returns the number of the first one that is missing.
    async fn send_chunk(&self, task: u64, nonce: u64, update: &[f32], index: Option<u32>) -> Result<u32, Error> {
        let block = index.and_then(|index| update.chunks(BLOCK_PARAMETERS).nth(index as usize));
        let chunk = encode_values(block.unwrap_or_default());
        let request = v1::UploadChunkRequest {
            caller: self.caller(),
            task,
            nonce,
            index: index.unwrap_or_default(),
            update_bytes: 4 * update.len() as u64,
            checksum: crc32c::crc32c(&chunk),
            content: chunk.into(),
        };
        let answer = self.client.federated_upload_chunk(request).await?;
        refused(answer.refusal)?;
        Ok(answer.next)
    }

    /// Gives a task up, so that another client can have it.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn give_up(&self, task: u64) -> Result<(), Error> {
        let answer = self.client.federated_give_up(v1::GiveUpTaskRequest { caller: self.caller(), task }).await?;
        refused(answer.refusal)
    }
}

/// Returns the digest by which an update is submitted: of a large one that of the digests of its chunks.
fn update_digest(update: &[f32]) -> Digest {
    let chunks = || update.chunks(BLOCK_PARAMETERS).map(encode_values);
    if update.len() > MAX_PARAMETERS_IN_MEMORY {
        return digest_of_chunks(&chunks().map(|chunk| digest(&chunk)).collect::<Vec<_>>());
    }
    let mut whole = DigestStream::default();
    chunks().for_each(|chunk| whole.add(&chunk));
    whole.finish()
}
