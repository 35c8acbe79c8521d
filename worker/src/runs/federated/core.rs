//! The server of a run with its records and its waiting clients.

mod aggregate;
mod correction;

use crate::runs::federated::blobs::{ContentName, Contents};
use crate::runs::federated::masks::{Exchange, Masks};
use crate::runs::federated::versions::Memory;
use crate::runs::federated::{
    Caller, Interruption, PublishedModel, Request, Submission, done, failed, now_millis, patiently,
};
use engram_api::Code;
use engram_federated::job::Job;
use engram_federated::model::ClientId;
use engram_federated::model_signature::{model_key, sign_model};
use engram_federated::round::{Action, Batch, Event, Outcome, Refusal, Task};
use engram_federated::service::{Denial, Report, Service};
use engram_learn::run::Order;
use engram_proto::v1;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// Time after which a client without a task checks in again, in milliseconds.
const CHECK_IN_AGAIN_MS: u32 = 10;

/// A client that waits for a task.
struct Waiter {
    until_millis: u64,
    reply: oneshot::Sender<Result<v1::CheckInResponse, Denial>>,
}

/// A batch that became a version.
pub(in crate::runs::federated) struct Step {
    /// Client, samples and loss of each update.
    pub(in crate::runs::federated) updates: Vec<(String, Report)>,
    /// Leases that ended without an update since the version before.
    pub(in crate::runs::federated) missing: u32,
    /// Time that the aggregation took.
    pub(in crate::runs::federated) seconds: f64,
}

/// State of a driver: what one write of the record covers, and what waits for it, therefore more than a dozen fields.
pub(in crate::runs::federated) struct Core {
    job: Job,
    contents: Contents,
    service: Service,
    /// Writes of the record so far.
    version: u64,
    memory: Memory,
    is_changed: bool,
    waiters: BTreeMap<u64, Waiter>,
    /// Sent once the record is written.
    replies: Vec<Box<dyn FnOnce() + Send + Sync>>,
    batches: VecDeque<Batch>,
    /// Leases that ended without an update since the last version.
    missing: u32,
    masks: Masks,
    opened: Vec<Task>,
    /// Tasks below this number were in a state that was written, or will be.
    first_unwritten_task: u64,
    /// Contents may be unused: a task, an update or a round ended without a version.
    is_sweep_due: bool,
    published: PublishedModel,
    /// Number of charges of the budget, and epsilon after them.
    spent: Option<(u64, f64)>,
}

impl Core {
    /// Reads the records of the run, or creates them.
    pub(in crate::runs::federated) async fn open(
        job: Job,
        contents: Contents,
        orders: &watch::Receiver<Order>,
    ) -> Result<Self, Interruption> {
        let mut orders = orders.clone();
        tokio::select! {
            opened = Self::read(job, contents) => opened,
            Ok(order) = orders.wait_for(|order| *order != Order::Continue) => Err(Interruption::Ordered(*order)),
        }
    }

    async fn read(job: Job, contents: Contents) -> Result<Self, Interruption> {
        let corrupt = |what: &str| failed(Code::Corrupt, format!("the {what} of the run cannot be read"));
        let stored = patiently(|| contents.load(ContentName::Service)).await?;
        let (service, version) = match stored {
            Some(stored) => {
                let service = postcard::from_bytes(&stored.attached).map_err(|_| corrupt("state of the rounds"))?;
                (service, stored.version)
            }
            None => (Self::create(&job, &contents).await?, 0),
        };
        let service: Service = service;
        let name = ContentName::Aggregator(service.rounds().version());
        let stored = patiently(|| contents.get(name)).await?.ok_or_else(|| corrupt("model"))?;
        let memory = Memory::decode(&job, &stored).ok_or_else(|| corrupt("model"))?;
        if job.is_on_disk() {
            patiently(|| contents.items().create()).await?;
            patiently(|| contents.remove_orphans()).await?;
        }
        let masks = Masks::open(&job, &contents, &service).await?;
        let mut core = Self {
            job,
            contents,
            service,
            version,
            memory,
            is_changed: version == 0,
            waiters: BTreeMap::new(),
            replies: Vec::new(),
            batches: VecDeque::new(),
            missing: 0,
            masks,
            opened: Vec::new(),
            first_unwritten_task: 0,
            is_sweep_due: false,
            published: PublishedModel::default(),
            spent: None,
        };
        core.publish();
        core.sweep().await?;
        core.charging(|core| {
            let resumed = core.service.rounds().resume();
            core.apply(resumed);
            core.finish_masks();
        });
        core.write_state().await?;
        Ok(core)
    }

    /// Stores the first version.
    async fn create(job: &Job, contents: &Contents) -> Result<Service, Interruption> {
        let invalid = |error: engram_federated::error::InvalidInput| failed(Code::InvalidValue, error.to_string());
        let (_, model) = Memory::create(job, contents).await?;
        Service::new(job, rand::random(), model).map_err(invalid)
    }

    pub(in crate::runs::federated) const fn job(&self) -> &Job {
        &self.job
    }

    pub(in crate::runs::federated) const fn service(&self) -> &Service {
        &self.service
    }

    /// The newest model, as a reader checks it.
    pub(in crate::runs::federated) const fn published(&self) -> &PublishedModel {
        &self.published
    }

    /// Signs the newest model.
    fn publish(&mut self) {
        let (seed, rounds) = (self.service.seed(), self.service.rounds());
        // That of a task is of the 8-bit model then.
        let exact = self.memory.exact_digest().filter(|_| self.job.is_quantized());
        let digest = exact.unwrap_or_else(|| rounds.model());
        let signature = sign_model(seed, &self.job.rounds.run, rounds.version(), &digest);
        let (version, key) = (rounds.version(), model_key(seed).to_vec());
        self.published = PublishedModel { version, digest: digest.to_vec(), key, signature };
    }

    /// Epsilon that was spent; `None` without privacy.
    pub(in crate::runs::federated) fn epsilon(&self) -> Option<f64> {
        self.spent.map(|(_, epsilon)| epsilon)
    }

    /// Executes what may start a round. With privacy it is charged by transforms over up to two million cells, during which other tasks go on.
    fn charging<T>(&mut self, step: impl FnOnce(&mut Self) -> T) -> T {
        if self.job.privacy.is_none() {
            return step(self);
        }
        tokio::task::block_in_place(|| {
            let result = step(self);
            if let Some(budget) = self.service.rounds().budget()
                && self.spent.is_none_or(|(steps, _)| steps != budget.steps())
            {
                self.spent = Some((budget.steps(), budget.spent().epsilon));
            }
            result
        })
    }

    /// The clipping norm of the next aggregation.
    pub(in crate::runs::federated) fn clip(&self) -> Option<f64> {
        let privacy = self.job.privacy?;
        Some(self.memory.adaptive_clip().map_or(privacy.clip, |clip| clip.norm))
    }

    /// How the run ended, once nothing is left to aggregate.
    pub(in crate::runs::federated) fn outcome(&self) -> Option<Outcome> {
        self.service.rounds().outcome().filter(|_| self.batches.is_empty())
    }

    /// Time until a deadline of the rounds, of the masks, or of a wait.
    pub(in crate::runs::federated) fn time_to_deadline(&self) -> Duration {
        if !self.batches.is_empty() {
            return Duration::ZERO;
        }
        let waits = self.waiters.values().map(|waiter| waiter.until_millis).min();
        let deadlines = [self.service.rounds().next_deadline(), self.masks.deadline_millis(), waits];
        let next = deadlines.into_iter().flatten().min();
        next.map_or(Duration::MAX, |next| Duration::from_millis(next.saturating_sub(now_millis())))
    }

    /// Handles requests and deadlines. Answers wait for [`Self::write_state`].
    pub(in crate::runs::federated) fn handle(&mut self, requests: Vec<Request>) {
        self.charging(|core| {
            for request in requests {
                core.request(request);
            }
            let now = now_millis();
            core.masks.end_late_stages(now);
            core.finish_masks();
            let actions = core.service.step(Event::Tick, now);
            core.apply(actions);
            core.end_late_waits(now);
        });
    }

    fn request(&mut self, request: Request) {
        match request {
            Request::CheckIn { caller, identity_key, wait, reply } => self.check_in(&caller, identity_key, wait, reply),
            Request::Admit { caller, task, reply } => {
                let admitted =
                    self.service.authenticate(&caller.client, &caller.secret).and_then(|client| match task {
                        Some(task) => Ok(self.service.leased(client, task, now_millis()).map(drop)?),
                        None => Ok(()),
                    });
                self.later(reply, admitted);
            }
            Request::Commit { caller, submission, reply } => {
                let answer = self.commit(&caller, submission);
                self.later(reply, answer);
            }
            Request::Revoke { client, reply } => {
                if let Some(waiter) = self.service.number_of(&client).and_then(|number| self.waiters.remove(&number)) {
                    self.later(waiter.reply, Err(Refusal::NotEnrolled.into()));
                }
                let answer = self.service.revoke(&client, now_millis()).map(|(actions, is_new)| {
                    self.is_changed |= is_new;
                    self.apply(actions);
                    is_new
                });
                self.later(reply, answer.map_err(Denial::from));
            }
            Request::Publish { reply } => self.later(reply, Ok(self.published.clone())),
            Request::Correction { caller, version, offset, bytes, reply } => {
                let answer = self.correction_part(&caller, version, offset, bytes);
                self.later(reply, answer);
            }
            Request::GiveUp { caller, task, reply } => {
                let answer = self.service.authenticate(&caller.client, &caller.secret);
                let answer = answer.map(|client| self.end_task(client, task));
                self.later(reply, answer);
            }
            Request::Exchange { caller, message, reply } => {
                match self.service.authenticate(&caller.client, &caller.secret) {
                    Ok(client)
                        if !self.masks.knows(client, message.task)
                            && self.service.rounds().has_receipt(client, message.task) =>
                    {
                        let answer =
                            v1::ExchangeMasksResponse { complete: true, ..v1::ExchangeMasksResponse::default() };
                        self.later(reply, Ok(answer));
                    }
                    Ok(client) => {
                        if self.masks.exchange(client, &message, reply, now_millis()) == Exchange::TaskLost {
                            // Otherwise the next check-in would return the task, to be refused again.
                            self.end_task(client, message.task);
                        }
                    }
                    Err(denial) => self.later(reply, Err(denial)),
                }
            }
        }
    }

    /// Ends a task without an update. One whose masked update was received ends with its round: the update is in the sum.
    fn end_task(&mut self, client: ClientId, task: u64) {
        if self.masks.has_input(client, task) {
            return;
        }
        let actions = self.service.step(Event::GiveUp { client, task }, now_millis());
        self.apply(actions);
    }

    fn later<T: Send + Sync + 'static>(&mut self, reply: oneshot::Sender<T>, answer: T) {
        // A caller that is gone asks again.
        self.replies.push(Box::new(move || drop(reply.send(answer))));
    }

    fn check_in(
        &mut self,
        caller: &Caller,
        identity_key: Option<[u8; 32]>,
        wait: Duration,
        reply: oneshot::Sender<Result<v1::CheckInResponse, Denial>>,
    ) {
        let now = now_millis();
        let client = match self.service.enrol(&self.job, &caller.client, &caller.secret, identity_key) {
            Ok((client, is_new)) => {
                self.is_changed |= is_new;
                client
            }
            Err(denial) => return self.later(reply, Err(denial)),
        };
        let until_millis = now.saturating_add(wait.as_millis() as u64);
        if let Some(earlier) = self.waiters.insert(client, Waiter { until_millis, reply }) {
            self.later(earlier.reply, Ok(again()));
        }
        let actions = self.service.step(Event::CheckIn(client), now);
        self.apply(actions);
    }

    fn commit(&mut self, caller: &Caller, submission: Submission) -> Result<v1::CommitUpdateResponse, Denial> {
        let client = self.service.authenticate(&caller.client, &caller.secret)?;
        let now = now_millis();
        let is_leased = self.service.leased(client, submission.task, now);
        if let (Ok(_), Some(fault)) = (is_leased, submission.fault) {
            return Err(engram_federated::error::InvalidInput::new("update", fault, "an update of this model").into());
        }
        if self.job.secure.is_some() {
            let text = "masked updates, by ExchangeMasks: the run aggregates securely";
            return Err(engram_federated::error::InvalidInput::new("update", "not masked", text).into());
        }
        let Submission { task, digest, samples, loss, rate_sum, .. } = submission;
        let rate_sum = self.required_rate_sum(rate_sum)?;
        let report = Report { samples, loss, rate_sum };
        let run = self.job.rounds.run.clone();
        let actions = self.service.commit(&run, (client, task, digest), report, now)?;
        let mut answer = Err(Denial::Round(Refusal::LeaseExpired));
        for action in &actions {
            match action {
                Action::Acknowledge { task: it, repeated, .. } if *it == task => {
                    answer = Ok(v1::CommitUpdateResponse { repeated: *repeated, refusal: None });
                }
                Action::Refuse(it, refusal) if *it == client => {
                    if matches!(refusal, Refusal::LeaseExpired | Refusal::Stale { .. }) {
                        self.contents.metrics().update_late(&run);
                    }
                    answer = Err((*refusal).into());
                }
                _ => {}
            }
        }
        self.apply(actions);
        answer
    }

    /// Executes actions of the rounds.
    fn apply(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Assign(task) => {
                    // A client that checks in again with its task changes nothing.
                    self.is_changed |= task.number >= self.first_unwritten_task;
                    self.first_unwritten_task = self.first_unwritten_task.max(task.number + 1);
                    self.opened.push(task);
                }
                Action::Wait(_) => {}
                Action::Refuse(client, refusal) => {
                    if let Some(waiter) = self.waiters.remove(&client) {
                        self.later(waiter.reply, Err(refusal.into()));
                    }
                }
                Action::Acknowledge { repeated, .. } => self.is_changed |= !repeated,
                Action::Revoke { .. } => {
                    (self.is_changed, self.is_sweep_due) = (true, true);
                    self.contents.metrics().task_missed(&self.job.rounds.run);
                    self.missing += 1;
                }
                Action::Discard(_) => (self.is_changed, self.is_sweep_due) = (true, true),
                Action::Aggregate(batch) => {
                    self.is_changed = true;
                    self.batches.push_back(batch);
                }
                Action::Abort { round, updates } => {
                    (self.is_changed, self.is_sweep_due) = (true, true);
                    self.contents.metrics().round_aborted(&self.job.rounds.run);
                    tracing::warn!(
                        run = self.job.rounds.run,
                        round,
                        updates,
                        "federated round ended without enough updates"
                    );
                }
                Action::End(_) => self.is_changed = true,
            }
        }
        self.send_tasks();
    }

    /// Sends assigned tasks to the clients that wait for them.
    fn send_tasks(&mut self) {
        let tasks = std::mem::take(&mut self.opened);
        if self.job.secure.is_some() {
            self.masks.begin(&self.job, &self.service, &tasks, now_millis());
        }
        for task in tasks {
            let cohort = match self.masks.settings_for(&self.job, task) {
                Ok(cohort) => cohort,
                // The client waits for the next round.
                Err(()) => continue,
            };
            if let Some(waiter) = self.waiters.remove(&task.client) {
                let task = self.task_to_wire(task, cohort);
                self.later(
                    waiter.reply,
                    Ok(v1::CheckInResponse { task: Some(task), ..v1::CheckInResponse::default() }),
                );
            }
        }
    }

    fn task_to_wire(&self, task: Task, cohort: Vec<u8>) -> v1::FederatedTask {
        let run = self.job.run();
        let layer = |layer: &engram_api::FederatedLayer| v1::FederatedLayer {
            name: layer.name.clone(),
            shape: layer.shape.clone(),
            local: layer.local,
        };
        let (correction_digest, correction_signature) = self.signed_correction(&task);
        let encoding = if self.job.is_quantized() { v1::ModelEncoding::Int8 } else { v1::ModelEncoding::Unspecified };
        v1::FederatedTask {
            number: task.number,
            round: task.round,
            version: task.version,
            model_digest: task.model.to_vec().into(),
            model_bytes: self.job.update_bytes(),
            lease_ms: task.expires_millis.saturating_sub(now_millis()),
            layers: run.model.layers.iter().map(layer).collect(),
            settings: run.settings.clone().into_iter().collect(),
            proximal_weight: self.job.proximal_weight(),
            cohort: cohort.into(),
            clip: self.job.client_clip().unwrap_or_default(),
            model_encoding: encoding.into(),
            model_key: model_key(self.service.seed()).to_vec().into(),
            model_signature: sign_model(self.service.seed(), &self.job.rounds.run, task.version, &task.model).into(),
            correction_digest: correction_digest.into(),
            correction_signature: correction_signature.into(),
        }
    }

    fn end_late_waits(&mut self, now: u64) {
        let late: Vec<u64> =
            self.waiters.iter().filter(|(_, waiter)| waiter.until_millis <= now).map(|(client, _)| *client).collect();
        for client in late {
            if let Some(waiter) = self.waiters.remove(&client) {
                self.later(waiter.reply, Ok(again()));
            }
        }
    }

    /// Answers all clients that wait: the run has ended.
    pub(in crate::runs::federated) fn end_waits(&mut self) {
        for (_, waiter) in std::mem::take(&mut self.waiters) {
            self.later(waiter.reply, Err(Refusal::Ended.into()));
        }
        self.send_answers();
    }

    /// Writes what changed. Nothing that depends on it was answered before.
    pub(in crate::runs::federated) async fn write_state(&mut self) -> Result<(), Interruption> {
        self.masks.write_messages(&self.contents).await?;
        if !std::mem::take(&mut self.is_changed) {
            return Ok(());
        }
        let state = postcard::to_stdvec(&self.service).expect("the state has no type that the encoding lacks");
        let (contents, version) = (&self.contents, self.version);
        let written = patiently(|| contents.attach(ContentName::Service, version, &state, None)).await?;
        if !done(&written)? {
            return Err(Interruption::Superseded);
        }
        self.version += 1;
        Ok(())
    }

    /// Sends the answers.
    pub(in crate::runs::federated) fn send_answers(&mut self) {
        self.replies.drain(..).for_each(|reply| reply());
        self.masks.send_messages();
    }

    /// Ends the rounds whose masked sums are known, or cannot become known.
    fn finish_masks(&mut self) {
        let (run, now) = (self.job.rounds.run.clone(), now_millis());
        for (round, updates) in self.masks.take_ended() {
            let actions = self.service.end_aggregation(&run, round, &updates, now);
            self.apply(actions);
        }
    }

    /// Removes what tasks and rounds left that ended without a version, once the record says so.
    pub(in crate::runs::federated) async fn sweep_unused(&mut self) -> Result<(), Interruption> {
        if !std::mem::take(&mut self.is_sweep_due) {
            return Ok(());
        }
        self.masks.retain(&self.service.rounds().open_rounds());
        self.sweep().await
    }

    /// Removes contents that are not used any more.
    async fn sweep(&self) -> Result<(), Interruption> {
        let rounds = self.service.rounds();
        let (version, versions) = (rounds.version(), rounds.versions_in_use());
        let tasks: std::collections::BTreeSet<u64> =
            rounds.kept_tasks().chain(rounds.tasks().map(|task| task.number)).collect();
        let is_kept = |name: ContentName| match name {
            ContentName::Service => true,
            ContentName::Model(it) | ContentName::Quantized(it) => versions.contains(&it) || it > version,
            ContentName::Aggregator(it) => it >= version,
            ContentName::Update(task) => tasks.contains(&task),
            ContentName::Masks(round) => self.masks.has(round),
        };
        patiently(|| self.contents.sweep(is_kept)).await
    }
}

fn again() -> v1::CheckInResponse {
    v1::CheckInResponse { retry_ms: CHECK_IN_AGAIN_MS, ..v1::CheckInResponse::default() }
}
