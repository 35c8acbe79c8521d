//! `FederatedService`: the client listener forwards calls of runs that another worker drives, the peer listener rejects them.

use crate::runs::federated::blobs::{CHUNK_BYTES, ContentName, Contents, Upload, Written};
use crate::runs::federated::{Caller, PublishedModel, Request as Order, Submission};
use crate::runs::record;
use crate::service::Plane;
use crate::shared::Shared;
use engram_federated::job::{MAX_PARAMETERS_IN_MEMORY, MAX_WAIT_MILLIS};
use engram_federated::round::{Digest, Refusal};
use engram_federated::service::{Denial, check_chunk, decode_update, digest_of_chunks};
use engram_learn::run::RunState;
use engram_memory::RunId;
use engram_proto::v1::federated_service_server::FederatedService;
use engram_proto::v1::{self, FederatedRefusal, FederatedRefusalReason, Problem, ProblemKind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

/// Retry hint while a run has no driver, in milliseconds: another worker takes over within about as long.
const NO_DRIVER_RETRY_MS: u64 = 100;

/// `FederatedService` of one worker.
#[derive(Clone)]
pub(crate) struct FederatedEndpoint {
    pub(crate) shared: Arc<Shared>,
    pub(crate) plane: Plane,
}

/// Where a call goes.
enum Route {
    Here(RunId),
    Elsewhere,
}

/// The run of a call, on the worker that has its record.
struct Recorded {
    state: RunState,
    contents: Contents,
}

fn invalid(text: impl Into<String>) -> Problem {
    Problem::of(ProblemKind::Invalid, text)
}

fn refusal(denial: &Denial) -> FederatedRefusal {
    use FederatedRefusalReason as Reason;
    let reason = match denial {
        Denial::NotEnrolled { .. } | Denial::Round(Refusal::NotEnrolled) => Reason::NotEnrolled,
        Denial::WrongSecret(_) => Reason::WrongSecret,
        Denial::Invalid(_) | Denial::Round(Refusal::OtherRun) => Reason::Invalid,
        Denial::Round(Refusal::OtherClient) => Reason::OtherClient,
        Denial::Round(Refusal::LeaseExpired) => Reason::LeaseExpired,
        Denial::Round(Refusal::Conflict) => Reason::Conflict,
        Denial::Round(Refusal::Stale { .. }) => Reason::Stale,
        Denial::Round(Refusal::Busy) => Reason::Busy,
        Denial::Round(Refusal::Ended) => Reason::Ended,
    };
    FederatedRefusal { reason: reason.into(), message: denial.to_string() }
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that `map_err` wants")]
fn client_status(error: engram_client::Error) -> Status {
    match error.problem() {
        Some(problem) => problem.clone().into_status(),
        None => Problem::of(ProblemKind::Unavailable, error.to_string()).into_status(),
    }
}

fn digest_of(bytes: &[u8]) -> Result<Digest, Problem> {
    let text = || invalid(format!("digest: {} bytes are not allowed; allowed: 32", bytes.len()));
    Digest::try_from(bytes).map_err(|_| text())
}

impl FederatedEndpoint {
    fn route(&self, caller: Option<&v1::FederatedCaller>) -> Result<Route, Problem> {
        self.route_of(caller.map(|caller| caller.run.as_str()).unwrap_or_default())
    }

    fn route_of(&self, name: &str) -> Result<Route, Problem> {
        if !engram_api::is_name(name) {
            return Err(invalid(format!("run: {name:?} is not allowed; allowed: the name of a run")));
        }
        let run = RunState::run_id(self.shared.setup.options.cluster, name);
        let partition = crate::runs::partition(&self.shared, run);
        match (self.shared.engine.position(partition).is_some(), self.plane) {
            (true, _) => Ok(Route::Here(run)),
            (false, Plane::Client) => Ok(Route::Elsewhere),
            (false, Plane::Peer) => Err(self.shared.not_primary(partition)),
        }
    }

    async fn recorded(&self, run: RunId) -> Result<Recorded, Problem> {
        let unknown =
            || Problem::of(ProblemKind::RunUnknown, "caller.run: no run of this name; allowed: a Federated run");
        let partition = crate::runs::partition(&self.shared, run);
        let entry = record::load(&self.shared, partition, run).await?.ok_or_else(unknown)?;
        let state =
            RunState::of(&entry).map_err(|error| Problem::of(ProblemKind::DataCorruption, error.to_string()))?;
        if state.spec["kind"] != "Federated" {
            let text =
                format!("caller.run: run {:?} is of kind {}; allowed: Federated", state.name, state.spec["kind"]);
            return Err(invalid(text));
        }
        let contents = Contents::new(&self.shared, run, state.identity(run));
        Ok(Recorded { state, contents })
    }

    /// Lets the driver of a run answer.
    async fn ask<T>(
        &self,
        run: RunId,
        order: impl FnOnce(oneshot::Sender<Result<T, Denial>>) -> Order,
    ) -> Result<Result<T, Denial>, Problem> {
        let Some(driver) = self.shared.runs.federated.get(run) else { return self.without_driver(run).await };
        let (reply, answer) = oneshot::channel();
        driver.try_send(order(reply)).map_err(|_| {
            Problem::of(ProblemKind::Overloaded, "the driver of the run has too many requests")
                .retry_after(NO_DRIVER_RETRY_MS)
        })?;
        match answer.await {
            Ok(answer) => Ok(answer),
            // A driver that ends drops the requests that it has not answered.
            Err(_) => self.without_driver(run).await,
        }
    }

    /// Denies a request to a run that has ended; one to another run is to be repeated.
    async fn without_driver<T>(&self, run: RunId) -> Result<Result<T, Denial>, Problem> {
        if self.recorded(run).await?.state.phase.is_final() {
            return Ok(Err(Denial::Round(Refusal::Ended)));
        }
        let text = "the run has no driver on this worker yet";
        Err(Problem::of(ProblemKind::Unavailable, text).retry_after(NO_DRIVER_RETRY_MS))
    }

    async fn local_check_in(&self, run: RunId, request: v1::CheckInRequest) -> Result<v1::CheckInResponse, Problem> {
        let identity_key =
            match &request.identity_key[..] {
                [] => None,
                bytes => Some(<[u8; 32]>::try_from(bytes).map_err(|_| {
                    invalid(format!("identity_key: {} bytes are not allowed; allowed: 32", bytes.len()))
                })?),
            };
        let wait = u64::from(request.wait_ms);
        if wait > MAX_WAIT_MILLIS {
            return Err(invalid(format!("wait_ms: {wait} is not allowed; allowed: 0 to {MAX_WAIT_MILLIS}")));
        }
        let recorded = self.recorded(run).await?;
        if recorded.state.phase.is_final() {
            let ended = format!("{:?}", recorded.state.phase);
            return Ok(v1::CheckInResponse { ended, ..v1::CheckInResponse::default() });
        }
        let caller = caller(request.caller);
        let wait = Duration::from_millis(wait);
        let answer = self.ask(run, |reply| Order::CheckIn { caller, identity_key, wait, reply }).await?;
        Ok(answer.unwrap_or_else(|denial| match denial {
            Denial::Round(Refusal::Ended) => {
                v1::CheckInResponse { ended: "Ended".to_owned(), ..v1::CheckInResponse::default() }
            }
            denial => v1::CheckInResponse { refusal: Some(refusal(&denial)), ..v1::CheckInResponse::default() },
        }))
    }

    async fn local_part(
        &self,
        run: RunId,
        request: v1::GetModelPartRequest,
    ) -> Result<v1::GetModelPartResponse, Problem> {
        let recorded = self.recorded(run).await?;
        let bytes = part_bytes(request.bytes)?;
        if request.correction {
            return self.local_correction(run, &recorded, request).await;
        }
        let version = request.version;
        let name = match request.encoding() {
            v1::ModelEncoding::Unspecified => ContentName::Model(version),
            v1::ModelEncoding::Int8 => ContentName::Quantized(version),
        };
        let owner = caller(request.caller);
        let refused =
            |refusal| v1::GetModelPartResponse { refusal: Some(refusal), ..v1::GetModelPartResponse::default() };
        if let Err(denial) = self.ask(run, |reply| Order::Admit { caller: owner, task: None, reply }).await? {
            return Ok(refused(refusal(&denial)));
        }
        let part = recorded.contents.part(name, request.offset, bytes).await?;
        Ok(match part {
            Some((content, model_bytes)) => {
                self.shared.metrics.federated.sent(&recorded.state.name, content.len());
                v1::GetModelPartResponse { content: content.into(), model_bytes, refusal: None }
            }
            None => refused(not_kept(version, "that of a task")),
        })
    }

    /// Reads a part of a version of the model for an account that may read the cluster, during the run and after it.
    async fn local_published(
        &self,
        run: RunId,
        request: v1::GetPublishedModelRequest,
    ) -> Result<v1::GetPublishedModelResponse, Problem> {
        let recorded = self.recorded(run).await?;
        let bytes = part_bytes(request.bytes)?;
        let published = match request.version {
            None => Some(self.published(run, &recorded.state).await?),
            Some(_) => None,
        };
        let version = published.as_ref().map(|model| model.version).or(request.version).unwrap_or_default();
        let part = recorded.contents.part(ContentName::Model(version), request.offset, bytes).await?;
        let Some((content, model_bytes)) = part else {
            let refusal = Some(not_kept(version, "the newest one"));
            return Ok(v1::GetPublishedModelResponse { refusal, ..v1::GetPublishedModelResponse::default() });
        };
        self.shared.metrics.federated.sent(&recorded.state.name, content.len());
        let PublishedModel { digest, key, signature, .. } = published.unwrap_or_default();
        Ok(v1::GetPublishedModelResponse {
            content: content.into(),
            model_bytes,
            version,
            model_digest: digest.into(),
            model_key: key.into(),
            model_signature: signature.into(),
            refusal: None,
        })
    }

    /// Returns what is known of the newest model: by the driver of the run, or by its record if it has none.
    async fn published(&self, run: RunId, state: &RunState) -> Result<PublishedModel, Problem> {
        if !state.phase.is_final() && !state.suspended {
            let answer = self.ask(run, |reply| Order::Publish { reply }).await?;
            // The run has ended in the meantime: its record is read again.
            return answer.map_err(|denial| {
                Problem::of(ProblemKind::Unavailable, denial.to_string()).retry_after(NO_DRIVER_RETRY_MS)
            });
        }
        let federated = state.federated.clone().unwrap_or_default();
        let bytes = |digits: &str| {
            let pairs =
                digits.as_bytes().chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
            pairs.collect::<Option<Vec<u8>>>().unwrap_or_default()
        };
        Ok(PublishedModel {
            version: federated.version,
            digest: bytes(&federated.model),
            key: bytes(&federated.model_key),
            signature: bytes(&federated.signature),
        })
    }

    async fn local_correction(
        &self,
        run: RunId,
        recorded: &Recorded,
        request: v1::GetModelPartRequest,
    ) -> Result<v1::GetModelPartResponse, Problem> {
        let v1::GetModelPartRequest { caller: owner, version, offset, bytes, .. } = request;
        let (caller, bytes) = (caller(owner), bytes as usize);
        let answer = self.ask(run, |reply| Order::Correction { caller, version, offset, bytes, reply }).await?;
        Ok(match answer {
            Ok((content, model_bytes)) => {
                self.shared.metrics.federated.sent(&recorded.state.name, content.len());
                v1::GetModelPartResponse { content: content.into(), model_bytes, refusal: None }
            }
            Err(denial) => {
                v1::GetModelPartResponse { refusal: Some(refusal(&denial)), ..v1::GetModelPartResponse::default() }
            }
        })
    }

    async fn local_chunk(
        &self,
        run: RunId,
        request: v1::UploadChunkRequest,
    ) -> Result<v1::UploadChunkResponse, Problem> {
        let recorded = self.recorded(run).await?;
        let refused = |denial: &Denial| v1::UploadChunkResponse { next: 0, refusal: Some(refusal(denial)) };
        let fault = |field, value: String, allowed: String| {
            refused(&engram_federated::error::InvalidInput::new(field, value, allowed).into())
        };
        let (owner, task) = (caller(request.caller), Some(request.task));
        if let Err(denial) = self.ask(run, |reply| Order::Admit { caller: owner, task, reply }).await? {
            return Ok(refused(&denial));
        }
        let parameters = parameters(&recorded.state)?;
        let expected = 4 * parameters as u64;
        if request.update_bytes != expected {
            return Ok(fault("update_bytes", request.update_bytes.to_string(), expected.to_string()));
        }
        let (task, nonce) = (request.task, request.nonce);
        let next = match recorded.contents.upload(task).await? {
            None => 0,
            Some(upload) if upload.nonce == nonce => upload.chunks,
            Some(_) => return Ok(other_upload()),
        };
        let index = u64::from(request.index);
        if request.content.is_empty() || index < next {
            return Ok(v1::UploadChunkResponse { next: next as u32, refusal: None });
        }
        let length = (expected - index.saturating_mul(CHUNK_BYTES as u64).min(expected)).min(CHUNK_BYTES as u64);
        if index > next || request.content.len() as u64 != length {
            let value = format!("chunk {index} of {} bytes", request.content.len());
            return Ok(fault("content", value, format!("chunk {next}, of at most {CHUNK_BYTES} bytes")));
        }
        if crc32c::crc32c(&request.content) != request.checksum {
            return Ok(fault(
                "checksum",
                format!("{:08x}", request.checksum),
                "the CRC-32C of the content: send it again".into(),
            ));
        }
        // Of a content on disk no later step sees the whole.
        if parameters > MAX_PARAMETERS_IN_MEMORY
            && let Err(error) = check_chunk(&request.content)
        {
            return Ok(refused(&error.into()));
        }
        match recorded.contents.append_update((task, nonce), expected, index, &request.content).await? {
            Written::Done => {
                self.shared.metrics.federated.received(&recorded.state.name, request.content.len());
                Ok(v1::UploadChunkResponse { next: (index + 1) as u32, refusal: None })
            }
            Written::Conflict => match recorded.contents.upload(task).await? {
                Some(upload) if upload.nonce != nonce => Ok(other_upload()),
                Some(upload) => Ok(v1::UploadChunkResponse { next: upload.chunks as u32, refusal: None }),
                // The task has ended in the meantime.
                None => Ok(refused(&Refusal::LeaseExpired.into())),
            },
            Written::Full => Ok(refused(&Refusal::Busy.into())),
        }
    }

    async fn local_commit(
        &self,
        run: RunId,
        request: v1::CommitUpdateRequest,
    ) -> Result<v1::CommitUpdateResponse, Problem> {
        let recorded = self.recorded(run).await?;
        let refused = |denial: &Denial| v1::CommitUpdateResponse { repeated: false, refusal: Some(refusal(denial)) };
        let digest = digest_of(&request.digest)?;
        let owner = || caller(request.caller.clone());
        if let Err(denial) = self.ask(run, |reply| Order::Admit { caller: owner(), task: None, reply }).await? {
            return Ok(refused(&denial));
        }
        let v1::CommitUpdateRequest { task, nonce, samples, loss, rate_sum, .. } = request;
        let fault = update_fault(&recorded.contents, (task, nonce), parameters(&recorded.state)?, digest).await?;
        let submission = Submission { task, digest, samples, loss, rate_sum, fault };
        let answer = self.ask(run, |reply| Order::Commit { caller: owner(), submission, reply }).await?;
        Ok(answer.unwrap_or_else(|denial| refused(&denial)))
    }
}

/// Checks the length of a part that a client asks for.
fn part_bytes(bytes: u32) -> Result<usize, Problem> {
    let bytes = bytes as usize;
    if (1..=CHUNK_BYTES).contains(&bytes) {
        return Ok(bytes);
    }
    Err(invalid(format!("bytes: {bytes} is not allowed; allowed: 1 to {CHUNK_BYTES}")))
}

fn not_kept(version: u64, allowed: &str) -> FederatedRefusal {
    let message = format!("version {version} of the model is not kept any more, or does not exist; allowed: {allowed}");
    FederatedRefusal { reason: FederatedRefusalReason::Stale.into(), message }
}

/// Refuses a second upload of a task: each would be a record of the partition, which other runs share.
fn other_upload() -> v1::UploadChunkResponse {
    let message = "another upload of this task has begun: continue it, or give the task up".to_owned();
    let refusal = FederatedRefusal { reason: FederatedRefusalReason::Conflict.into(), message };
    v1::UploadChunkResponse { next: 0, refusal: Some(refusal) }
}

/// Returns why an uploaded content is no update; nothing if it is one.
async fn update_fault(
    contents: &Contents,
    (task, nonce): (u64, u64),
    parameters: usize,
    digest: Digest,
) -> Result<Option<String>, Problem> {
    let incomplete = || Some("not uploaded completely".to_owned());
    if !matches!(contents.upload(task).await?, Some(Upload { nonce: stored, .. }) if stored == nonce) {
        return Ok(incomplete());
    }
    let name = ContentName::Update(task);
    if parameters > MAX_PARAMETERS_IN_MEMORY {
        return Ok(match contents.chunk_digests(name).await? {
            None => incomplete(),
            Some(chunks) if digest_of_chunks(&chunks) == digest => None,
            Some(_) => Some("another digest than that of the uploaded chunks".to_owned()),
        });
    }
    let Some(content) = contents.get(name).await? else { return Ok(incomplete()) };
    let checked = tokio::task::spawn_blocking(move || decode_update(&content, parameters, &digest)).await;
    let checked = checked.map_err(|error| Problem::of(ProblemKind::Unavailable, error.to_string()))?;
    Ok(checked.err().map(|error| error.to_string()))
}

/// Number of shared parameters of a recorded run.
fn parameters(state: &RunState) -> Result<usize, Problem> {
    let spec: engram_api::LearnerRunSpec = serde_json::from_value(state.spec.clone())
        .map_err(|error| Problem::of(ProblemKind::DataCorruption, error.to_string()))?;
    let layers = spec.federated.map(|federated| federated.model.layers).unwrap_or_default();
    let shared = layers.iter().filter(|layer| !layer.local);
    Ok(shared.map(|layer| layer.shape.iter().product::<u64>() as usize).sum())
}

fn caller(caller: Option<v1::FederatedCaller>) -> Caller {
    let v1::FederatedCaller { client, secret, .. } = caller.unwrap_or_default();
    Caller { client, secret: secret.to_vec() }
}

fn response_of<T>(answer: Result<T, Problem>) -> Result<Response<T>, Status> {
    answer.map(Response::new).map_err(Problem::into_status)
}

#[tonic::async_trait]
impl FederatedService for FederatedEndpoint {
    async fn check_in(&self, request: Request<v1::CheckInRequest>) -> Result<Response<v1::CheckInResponse>, Status> {
        let request = request.into_inner();
        match self.route(request.caller.as_ref()).map_err(Problem::into_status)? {
            Route::Here(run) => response_of(self.local_check_in(run, request).await),
            Route::Elsewhere => {
                self.shared.client.federated_check_in(request).await.map(Response::new).map_err(client_status)
            }
        }
    }

    async fn get_model_part(
        &self,
        request: Request<v1::GetModelPartRequest>,
    ) -> Result<Response<v1::GetModelPartResponse>, Status> {
        let request = request.into_inner();
        match self.route(request.caller.as_ref()).map_err(Problem::into_status)? {
            Route::Here(run) => response_of(self.local_part(run, request).await),
            Route::Elsewhere => {
                self.shared.client.federated_model_part(request).await.map(Response::new).map_err(client_status)
            }
        }
    }

    async fn get_published_model(
        &self,
        request: Request<v1::GetPublishedModelRequest>,
    ) -> Result<Response<v1::GetPublishedModelResponse>, Status> {
        let request = request.into_inner();
        match self.route_of(&request.run).map_err(Problem::into_status)? {
            Route::Here(run) => response_of(self.local_published(run, request).await),
            Route::Elsewhere => {
                self.shared.client.federated_published(request).await.map(Response::new).map_err(client_status)
            }
        }
    }

    async fn upload_chunk(
        &self,
        request: Request<v1::UploadChunkRequest>,
    ) -> Result<Response<v1::UploadChunkResponse>, Status> {
        let request = request.into_inner();
        match self.route(request.caller.as_ref()).map_err(Problem::into_status)? {
            Route::Here(run) => response_of(self.local_chunk(run, request).await),
            Route::Elsewhere => {
                self.shared.client.federated_upload_chunk(request).await.map(Response::new).map_err(client_status)
            }
        }
    }

    async fn commit_update(
        &self,
        request: Request<v1::CommitUpdateRequest>,
    ) -> Result<Response<v1::CommitUpdateResponse>, Status> {
        let request = request.into_inner();
        match self.route(request.caller.as_ref()).map_err(Problem::into_status)? {
            Route::Here(run) => response_of(self.local_commit(run, request).await),
            Route::Elsewhere => {
                self.shared.client.federated_commit(request).await.map(Response::new).map_err(client_status)
            }
        }
    }

    async fn give_up_task(
        &self,
        request: Request<v1::GiveUpTaskRequest>,
    ) -> Result<Response<v1::GiveUpTaskResponse>, Status> {
        let request = request.into_inner();
        let run = match self.route(request.caller.as_ref()).map_err(Problem::into_status)? {
            Route::Here(run) => run,
            Route::Elsewhere => {
                return self.shared.client.federated_give_up(request).await.map(Response::new).map_err(client_status);
            }
        };
        let (owner, task) = (caller(request.caller), request.task);
        let answer = self.ask(run, |reply| Order::GiveUp { caller: owner, task, reply }).await;
        response_of(
            answer.map(|answer| v1::GiveUpTaskResponse { refusal: answer.err().map(|denial| refusal(&denial)) }),
        )
    }

    async fn revoke_client(
        &self,
        request: Request<v1::RevokeClientRequest>,
    ) -> Result<Response<v1::RevokeClientResponse>, Status> {
        let request = request.into_inner();
        let run = match self.route_of(&request.run).map_err(Problem::into_status)? {
            Route::Here(run) => run,
            Route::Elsewhere => {
                return self.shared.client.federated_revoke(request).await.map(Response::new).map_err(client_status);
            }
        };
        let recorded = self.recorded(run).await.map_err(Problem::into_status)?;
        if recorded.state.phase.is_final() {
            return Err(invalid("run: it has ended; allowed: a run in progress").into_status());
        }
        let answer = self.ask(run, |reply| Order::Revoke { client: request.client, reply }).await;
        response_of(answer.and_then(|answer| match answer {
            Ok(is_new) => Ok(v1::RevokeClientResponse { repeated: !is_new }),
            Err(denial) => Err(invalid(denial.to_string())),
        }))
    }

    async fn exchange_masks(
        &self,
        request: Request<v1::ExchangeMasksRequest>,
    ) -> Result<Response<v1::ExchangeMasksResponse>, Status> {
        let request = request.into_inner();
        let run = match self.route(request.caller.as_ref()).map_err(Problem::into_status)? {
            Route::Here(run) => run,
            Route::Elsewhere => {
                return self.shared.client.federated_exchange(request).await.map(Response::new).map_err(client_status);
            }
        };
        let owner = caller(request.caller.clone());
        let answer = self.ask(run, |reply| Order::Exchange { caller: owner, message: request, reply }).await;
        response_of(answer.map(|answer| {
            answer.unwrap_or_else(|denial| v1::ExchangeMasksResponse {
                refusal: Some(refusal(&denial)),
                ..v1::ExchangeMasksResponse::default()
            })
        }))
    }
}
