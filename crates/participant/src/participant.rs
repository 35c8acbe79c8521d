//! One client of one run.

use crate::masks;
use crate::{ClientKeys, Error, ModelKey, refused};
use engram_client::Client;
use engram_federated::error::InvalidInput;
use engram_federated::quantized;
use engram_federated::service::{decode_values, digest, encode_values};
use engram_proto::v1::{self, ModelEncoding};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of a part of a model or an update.
const PART_BYTES: usize = 1 << 20;
/// Longest wait of one call for a task.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Work for the client: a task with its model.
#[derive(Debug, Clone)]
pub struct Assignment {
    /// The task.
    pub task: v1::FederatedTask,
    /// Shared parameters, layer after layer.
    pub model: Arc<Vec<f32>>,
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
        let model = self.model_of(&task).await?;
        Ok(Next::Task(Box::new(Assignment { task, model })))
    }

    async fn model_of(&self, task: &v1::FederatedTask) -> Result<Arc<Vec<f32>>, Error> {
        let cached = self.cached.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        if let Some((_, model)) = cached.filter(|(digest, _)| *digest == task.model_digest) {
            return Ok(model);
        }
        let content = self.download(task.version, task.model_encoding()).await?;
        if digest(&content)[..] != task.model_digest[..] {
            return Err(Error::Digest);
        }
        let values = match task.model_encoding() {
            ModelEncoding::Unspecified => decode_values(&content),
            ModelEncoding::Int8 => {
                quantized::decode(&content, task.model_bytes as usize / 4).ok_or(Error::Protocol("8-bit model"))?
            }
        };
        let model = Arc::new(values);
        let entry = Some((task.model_digest.to_vec(), Arc::clone(&model)));
        *self.cached.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = entry;
        Ok(model)
    }

    /// Returns the newest model of the run, while it runs and after it.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn newest_model(&self) -> Result<Vec<f32>, Error> {
        Ok(decode_values(&self.download(u64::MAX, ModelEncoding::Unspecified).await?))
    }

    async fn download(&self, version: u64, encoding: ModelEncoding) -> Result<Vec<u8>, Error> {
        let mut content = Vec::new();
        loop {
            let request = v1::GetModelPartRequest {
                caller: self.caller(),
                version,
                offset: content.len() as u64,
                bytes: PART_BYTES as u32,
                encoding: encoding.into(),
            };
            let part = self.client.federated_model_part(request).await?;
            refused(part.refusal)?;
            content.extend_from_slice(&part.content);
            if content.len() as u64 >= part.model_bytes {
                return Ok(content);
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
        let parameters = task.model_bytes as usize / 4;
        if update.len() != parameters {
            let (value, allowed) = (format!("{} values", update.len()), format!("{parameters} values"));
            return Err(InvalidInput::new("update", value, allowed).into());
        }
        if let Some(at) = update.iter().position(|value| !value.is_finite()) {
            return Err(InvalidInput::new("update", format!("{} at {at}", update[at]), "finite numbers").into());
        }
        if !task.cohort.is_empty() {
            masks::submit(self, task, update, loss).await?;
            return Ok(false);
        }
        self.upload(task.number, &encode_values(update), samples, loss).await
    }

    /// Sends the bytes of an update in chunks, and submits it. A part that the server has is not sent again.
    async fn upload(&self, task: u64, content: &[u8], samples: u64, loss: Option<f64>) -> Result<bool, Error> {
        let digest = digest(content);
        // The same content continues an upload that was cut; another one begins again.
        let nonce = u64::from_le_bytes(digest[..8].try_into().unwrap_or_default());
        let total = content.len().div_ceil(PART_BYTES) as u32;
        let mut next = if total > 1 { self.send_chunk(task, nonce, content, None).await? } else { 0 };
        while next < total {
            match self.send_chunk(task, nonce, content, Some(next)).await {
                Ok(after) if after > next => next = after,
                Ok(_) => return Err(Error::Protocol("number of the next chunk")),
                // It may have been counted before its answer was lost.
                Err(error) if error.is_stale() => break,
                Err(error) => return Err(error),
            }
        }
        let request = v1::CommitUpdateRequest {
            caller: self.caller(),
            task,
            nonce,
            digest: digest.to_vec().into(),
            samples,
            loss,
        };
        let answer = self.client.federated_commit(request).await?;
        refused(answer.refusal)?;
        Ok(answer.repeated)
    }

    /// Sends a chunk, or only asks which one is next. Returns the number of the first one that is missing.
    async fn send_chunk(&self, task: u64, nonce: u64, content: &[u8], index: Option<u32>) -> Result<u32, Error> {
        let chunk = index.map_or(&[][..], |index| {
            let start = index as usize * PART_BYTES;
            &content[start..content.len().min(start + PART_BYTES)]
        });
        let request = v1::UploadChunkRequest {
            caller: self.caller(),
            task,
            nonce,
            index: index.unwrap_or_default(),
            update_bytes: content.len() as u64,
            content: chunk.to_vec().into(),
            checksum: crc32c::crc32c(chunk),
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
