//! The server of a run as a value: clients with their proofs of identity, rounds, and what is known of accepted updates.
//!
//! The caller stores the state after each step that changes it, before it answers the client. Then a repeated request has the same answer,
//! whatever process answers it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use crate::content::{
    DigestStream, check_chunk, decode_update, decode_values, digest, digest_of_chunks, encode_values,
};
use crate::error::{InvalidInput, require};
use crate::job::Job;
use crate::model::{ClientId, Update};
use crate::privacy::budget::Budget;
use crate::random::{Seed, derive};
use crate::round::{Action, Batch, Contribution, Digest, Event, Mode, Refusal, Rounds, Task, UploadedUpdate};
use crate::secure::keys::verifying_key;
use crate::secure::relay::{Relay, SummedUpdate};
use crate::secure::{CohortSettings, PublicKeyBytes, SecureError};

/// Most names that a run revokes: as many clients as it may have.
const MAX_REVOKED: usize = 10_000;

fn require_client_name(name: &str) -> Result<(), InvalidInput> {
    let is_letter = |letter: u8| letter.is_ascii_lowercase() || letter.is_ascii_digit() || b"-.".contains(&letter);
    let holds = (1..=64).contains(&name.len()) && name.bytes().all(is_letter);
    require(holds, "client", format!("{name:?}"), "1 to 64 characters of a-z, 0-9, - and .")
}

/// An enrolled client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Client {
    id: ClientId,
    secret: Digest,
    identity_key: Option<PublicKeyBytes>,
}

/// What a client states with its update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Samples it was trained on.
    pub samples: u64,
    /// Loss of the downloaded model on the client's data.
    pub loss: Option<f64>,
    /// Sum of the local step sizes: SCAFFOLD only.
    pub rate_sum: Option<f64>,
}

impl Report {
    /// Checks what a client reports, before it sends its update and again on arrival.
    ///
    /// # Errors
    /// No samples are claimed, the loss is not a number, or the sum of step sizes is not above 0.
    pub fn check(&self) -> Result<(), InvalidInput> {
        require(self.samples > 0, "samples", self.samples, "at least 1")?;
        let loss = self.loss.unwrap_or_default();
        require(loss.is_finite(), "loss", loss, "a finite number")?;
        let rate_sum = self.rate_sum.unwrap_or(1.0);
        require(rate_sum > 0.0 && rate_sum.is_finite(), "rate_sum", rate_sum, "above 0")
    }
}

/// Why a request was refused; nothing changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Denial {
    /// The client may not take part.
    #[error("client {client:?} is not allowed; allowed: {allowed}")]
    NotEnrolled {
        /// Its name.
        client: String,
        /// Who may.
        allowed: String,
    },
    /// The secret is not that of the client.
    #[error("secret is not the one with which client {0:?} was enrolled")]
    WrongSecret(String),
    /// By the rounds.
    #[error(transparent)]
    Round(#[from] Refusal),
    /// A field is invalid.
    #[error(transparent)]
    Invalid(#[from] InvalidInput),
}

/// The server of a run. Serializable: it is a record of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Service {
    rounds: Rounds,
    clients: BTreeMap<String, Client>,
    reports: BTreeMap<u64, Report>,
    /// Updates that were aggregated.
    counted: u64,
    /// Rounds that ended without enough updates.
    aborted: u64,
    /// Clients that take no further part, by name.
    revoked: BTreeSet<String>,
    /// Secret of the run, from which the choice of clients and the noise are drawn.
    seed: Seed,
}

impl Service {
    /// Creates the server of a run at version 0. `seed` comes from a cryptographic generator.
    ///
    /// # Errors
    /// A setting is out of its range.
    pub fn new(job: &Job, seed: Seed, model: Digest) -> Result<Self, InvalidInput> {
        let privacy = match &job.privacy {
            None => None,
            Some(privacy) => {
                let (epsilon, delta) = privacy.budget;
                Some((Budget::new(epsilon, delta, job.population)?, privacy.mechanism))
            }
        };
        let enrolled: BTreeSet<ClientId> = (0..job.population).collect();
        let rounds = Rounds::new(job.rounds.clone(), seed, enrolled, privacy, model)?;
        Ok(Self {
            rounds,
            clients: BTreeMap::new(),
            reports: BTreeMap::new(),
            counted: 0,
            aborted: 0,
            revoked: BTreeSet::new(),
            seed,
        })
    }

    /// The rounds.
    #[must_use]
    pub const fn rounds(&self) -> &Rounds {
        &self.rounds
    }

    /// The secret of the run.
    #[must_use]
    pub const fn seed(&self) -> &Seed {
        &self.seed
    }

    /// Number of updates that were aggregated.
    #[must_use]
    pub const fn counted(&self) -> u64 {
        self.counted
    }

    /// Number of rounds that ended without enough updates, or too late.
    #[must_use]
    pub const fn aborted(&self) -> u64 {
        self.aborted
    }

    /// Number of clients so far.
    #[must_use]
    pub fn enrolled(&self) -> usize {
        self.clients.len()
    }

    /// What the client of an accepted task stated.
    #[must_use]
    pub fn report(&self, task: u64) -> Option<&Report> {
        self.reports.get(&task)
    }

    /// The name of a client.
    #[must_use]
    pub fn name_of(&self, client: ClientId) -> Option<&str> {
        self.clients.iter().find(|(_, it)| it.id == client).map(|(name, _)| name.as_str())
    }

    /// The number of an enrolled client.
    #[must_use]
    pub fn number_of(&self, name: &str) -> Option<ClientId> {
        self.clients.get(name).map(|client| client.id)
    }

    /// The identity keys of clients.
    #[must_use]
    pub fn identity_keys(&self) -> BTreeMap<ClientId, PublicKeyBytes> {
        self.clients.values().filter_map(|client| Some((client.id, client.identity_key?))).collect()
    }

    /// The key by which the server signs lists of survivors in a round.
    #[must_use]
    pub fn signing_seed(&self, round: u64) -> Seed {
        derive(&self.seed, &[b"signing", &round.to_le_bytes()])
    }

    /// Returns the settings of secure aggregation over the clients of tasks of one round.
    ///
    /// # Errors
    /// There are fewer than three, or a client has no identity key.
    pub fn cohort(&self, job: &Job, tasks: &[Task]) -> Result<CohortSettings, InvalidInput> {
        let secure = job.secure.ok_or_else(|| InvalidInput::new("secureAggregation", "off", "on"))?;
        let round = tasks.first().map_or(0, |task| task.round);
        let keys = self.identity_keys();
        let mut clients = BTreeMap::new();
        for task in tasks {
            let key =
                keys.get(&task.client).ok_or_else(|| InvalidInput::new("identity_key", "none", "one per client"))?;
            clients.insert(task.client, *key);
        }
        let server_key = verifying_key(&self.signing_seed(round));
        let graph_seed = derive(&self.seed, &[b"graph", &round.to_le_bytes()]);
        let drop_out = job.cohort_drop_out();
        let settings = CohortSettings::new(round, clients, server_key, job.parameters(), drop_out, graph_seed)?;
        // A sum that would be discarded is not revealed.
        let minimum = match job.rounds.mode {
            Mode::Cohorts { goal, minimum, .. } => (2 * goal).div_ceil(3).max(minimum) as usize,
            Mode::Synchronous { minimum, .. } => settings.minimum.max(minimum as usize),
            _ => settings.minimum,
        };
        let minimum = minimum.min(settings.clients.len());
        // Every client counts the same: a weight would be rounded together with the update.
        Ok(CohortSettings { clip: secure.range, max_weight: 1, minimum, ..settings })
    }

    /// Returns secure aggregation over the clients of tasks of one round, of which each stage takes at most `stage_millis`.
    ///
    /// # Errors
    /// As [`Self::cohort`].
    pub fn relay(&self, job: &Job, tasks: &[Task], stage_millis: u64, now_millis: u64) -> Result<Relay, SecureError> {
        let settings = self.cohort(job, tasks)?;
        let members: BTreeMap<ClientId, u64> = tasks.iter().map(|task| (task.client, task.number)).collect();
        let goal = if let Mode::Cohorts { goal, .. } = job.rounds.mode { goal as usize } else { members.len() };
        let signing = self.signing_seed(settings.round);
        Relay::new(settings, members, goal, signing, stage_millis, now_millis)
    }

    /// Records the end of secure aggregation: its updates count, if there are enough.
    pub fn end_aggregation(&mut self, run: &str, round: u64, updates: &[SummedUpdate], now_millis: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        for SummedUpdate { client, task, digest, loss } in updates {
            let report = Report { samples: 1, loss: *loss, rate_sum: None };
            let counted = self.commit(run, (*client, *task, *digest), report, now_millis);
            actions.extend(counted.expect("samples are given and losses are finite"));
        }
        actions.extend(self.step(Event::CloseRound(round), now_millis));
        actions
    }

    /// Returns the number of an enrolled client that proves its identity.
    ///
    /// # Errors
    /// It is not enrolled, or the secret is another one.
    pub fn authenticate(&self, name: &str, secret: &[u8]) -> Result<ClientId, Denial> {
        self.require_not_revoked(name)?;
        let unknown = || Denial::NotEnrolled { client: name.to_owned(), allowed: "clients that checked in".to_owned() };
        let client = self.clients.get(name).ok_or_else(unknown)?;
        // Digests of secrets are compared: the time reveals nothing about the secret.
        if client.secret == digest(secret) { Ok(client.id) } else { Err(Denial::WrongSecret(name.to_owned())) }
    }

    fn require_not_revoked(&self, name: &str) -> Result<(), Denial> {
        if !self.revoked.contains(name) {
            return Ok(());
        }
        Err(Denial::NotEnrolled { client: name.to_owned(), allowed: "clients that were not revoked".to_owned() })
    }

    /// Refuses a client from now on, enrolled or not, and ends its task. Its updates that were accepted stay counted. Returns the actions, and whether
    /// it was not revoked before.
    ///
    /// # Errors
    /// As many names were revoked as a run may have clients.
    pub fn revoke(&mut self, name: &str, now_millis: u64) -> Result<(Vec<Action>, bool), InvalidInput> {
        if self.revoked.contains(name) {
            return Ok((Vec::new(), false));
        }
        require_client_name(name)?;
        let most = MAX_REVOKED;
        require(self.revoked.len() < most, "client", format!("{most} are revoked"), "fewer revoked clients")?;
        self.revoked.insert(name.to_owned());
        let id = self.clients.get(name).map(|client| client.id);
        let actions = id.map(|client| self.step(Event::Leave(client), now_millis));
        Ok((actions.unwrap_or_default(), true))
    }

    /// Enrols a client, or recognizes it. Returns its number, and whether it is new.
    ///
    /// # Errors
    /// It may not take part, the run has all its clients, a field is invalid, or the secret is not that of the client.
    pub fn enrol(
        &mut self,
        job: &Job,
        name: &str,
        secret: &[u8],
        identity_key: Option<PublicKeyBytes>,
    ) -> Result<(ClientId, bool), Denial> {
        self.require_not_revoked(name)?;
        if self.clients.contains_key(name) {
            return Ok((self.authenticate(name, secret)?, false));
        }
        require_client_name(name)?;
        require((16..=64).contains(&secret.len()), "secret", format!("{} bytes", secret.len()), "16 to 64 bytes")?;
        if job.secure.is_some() && identity_key.is_none() {
            return Err(InvalidInput::new("identity_key", "none", "an Ed25519 key: the run aggregates securely").into());
        }
        let denied = |allowed: String| Denial::NotEnrolled { client: name.to_owned(), allowed };
        if let Some(names) = &job.run().clients.allowed
            && !names.iter().any(|allowed| allowed == name)
        {
            return Err(denied("clients of spec.federated.clients.allowed".to_owned()));
        }
        let id = self.clients.len() as ClientId;
        if id >= job.population {
            return Err(denied(format!("the first {} clients (spec.federated.clients.population)", job.population)));
        }
        self.clients.insert(name.to_owned(), Client { id, secret: digest(secret), identity_key });
        Ok((id, true))
    }

    /// Applies an event that is no upload.
    pub fn step(&mut self, event: Event, now_millis: u64) -> Vec<Action> {
        let actions = self.rounds.step(event, now_millis);
        self.note(&actions);
        actions
    }

    /// Returns the task of a client that may upload for it.
    ///
    /// # Errors
    /// The task is another client's, or its lease has ended.
    pub fn leased(&self, client: ClientId, task: u64, now_millis: u64) -> Result<Task, Refusal> {
        match self.rounds.task(task) {
            Some(leased) if leased.client != client => Err(Refusal::OtherClient),
            Some(leased) if leased.expires_millis > now_millis => Ok(*leased),
            _ => Err(Refusal::LeaseExpired),
        }
    }

    /// Accepts an update whose content was checked. The first action is the answer to the client.
    ///
    /// # Errors
    /// No samples are claimed, or the loss is not a number.
    pub fn commit(
        &mut self,
        run: &str,
        contribution: (ClientId, u64, Digest),
        report: Report,
        now_millis: u64,
    ) -> Result<Vec<Action>, InvalidInput> {
        let (client, task, digest) = contribution;
        report.check()?;
        let update = UploadedUpdate { run: run.to_owned(), client, task, digest };
        let actions = self.rounds.step(Event::Upload(update), now_millis);
        if actions
            .iter()
            .any(|action| matches!(action, Action::Acknowledge { task: it, repeated: false, .. } if *it == task))
        {
            self.reports.insert(task, report);
        }
        self.note(&actions);
        Ok(actions)
    }

    /// Counts aborted rounds, and forgets the reports of updates that are not used.
    fn note(&mut self, actions: &[Action]) {
        for action in actions {
            match action {
                Action::Discard(contribution) => drop(self.reports.remove(&contribution.task)),
                Action::Abort { .. } => self.aborted += 1,
                _ => {}
            }
        }
    }

    /// Records that the model of a batch is stored. Returns the reports of the batch by client, and what follows.
    pub fn aggregated(&mut self, batch: &Batch, model: Digest, now_millis: u64) -> (Vec<Report>, Vec<Action>) {
        let reports = batch.contributions.iter().filter_map(|it| self.reports.remove(&it.task)).collect();
        self.counted += batch.contributions.len() as u64;
        (reports, self.step(Event::Aggregated { batch: batch.number, model }, now_millis))
    }
}

/// Returns the update of a contribution.
#[must_use]
pub fn update_of(contribution: &Contribution, samples: u64, delta: Vec<f32>) -> Update {
    Update { client: contribution.client, version: contribution.version, samples, delta, control: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::tests::run;
    use crate::round::Outcome;

    const SECRET: &[u8] = &[7; 16];

    fn service(fields: &str) -> (Job, Service) {
        let job = Job::new("a", &run(fields)).unwrap();
        let service = Service::new(&job, [1; 32], [0; 32]).unwrap();
        (job, service)
    }

    fn check_in(job: &Job, service: &mut Service, name: &str) -> Vec<Action> {
        let (id, _) = service.enrol(job, name, SECRET, None).unwrap();
        service.step(Event::CheckIn(id), 0)
    }

    /// Lets four clients check in; returns their tasks by client.
    fn tasks(job: &Job, service: &mut Service) -> BTreeMap<ClientId, Task> {
        let actions: Vec<Action> = ["a", "b", "c", "d"].iter().flat_map(|name| check_in(job, service, name)).collect();
        let assigned = actions.iter().filter_map(|action| match action {
            Action::Assign(task) => Some((task.client, *task)),
            _ => None,
        });
        assigned.collect()
    }

    const REPORT: Report = Report { samples: 5, loss: Some(0.5), rate_sum: None };

    #[test]
    fn clients_prove_who_they_are_and_the_population_is_bounded() {
        let (job, mut service) = service(r#"{"clients":{"population":4,"perRound":4}}"#);
        assert_eq!(service.enrol(&job, "a", SECRET, None).unwrap(), (0, true));
        assert_eq!(service.enrol(&job, "a", SECRET, None).unwrap(), (0, false));
        assert_eq!(service.enrol(&job, "a", &[8; 16], None), Err(Denial::WrongSecret("a".into())));
        assert_eq!(service.authenticate("a", &[8; 16]), Err(Denial::WrongSecret("a".into())));
        assert!(matches!(service.authenticate("z", SECRET), Err(Denial::NotEnrolled { .. })));
        assert!(service.enrol(&job, "A", SECRET, None).unwrap_err().to_string().starts_with("client: \"A\""));
        assert!(service.enrol(&job, "b", &[1], None).unwrap_err().to_string().starts_with("secret: 1 bytes"));
        ["b", "c", "d"].iter().for_each(|name| assert!(service.enrol(&job, name, SECRET, None).is_ok()));
        assert!(service.enrol(&job, "e", SECRET, None).unwrap_err().to_string().contains("first 4 clients"));
    }

    #[test]
    fn a_revoked_client_is_refused_at_once_and_its_task_ends() {
        let (job, mut service) = service("{}");
        let tasks = tasks(&job, &mut service);
        assert!(service.authenticate("a", SECRET).is_ok());
        let (actions, is_new) = service.revoke("a", 1).unwrap();
        assert!(is_new && actions.contains(&Action::Revoke { client: 0, task: tasks[&0].number }), "{actions:?}");
        let refused = |denial: Denial| matches!(denial, Denial::NotEnrolled { .. });
        assert!(service.rounds().tasks().all(|task| task.client != 0), "it waits for no task either");
        assert!(refused(service.authenticate("a", SECRET).unwrap_err()));
        assert!(refused(service.enrol(&job, "a", SECRET, None).unwrap_err()));
        assert_eq!(service.leased(0, tasks[&0].number, 1), Err(Refusal::LeaseExpired));
        let restored: Vec<u8> = postcard::to_stdvec(&service).unwrap();
        let mut service: Service = postcard::from_bytes(&restored).unwrap();
        assert_eq!(service.revoke("a", 2).unwrap(), (vec![], false));
        assert!(service.revoke("z", 2).unwrap().1 && refused(service.enrol(&job, "z", SECRET, None).unwrap_err()));
        assert!(service.revoke("A", 2).unwrap_err().to_string().starts_with("client"));
        assert!(service.authenticate("b", SECRET).is_ok());
    }

    #[test]
    fn only_listed_clients_are_enrolled_and_secure_runs_require_a_key() {
        let (job, mut allowed) = service(r#"{"clients":{"population":4,"perRound":1,"allowed":["x"]}}"#);
        assert!(allowed.enrol(&job, "x", SECRET, None).is_ok());
        assert!(matches!(allowed.enrol(&job, "y", SECRET, None), Err(Denial::NotEnrolled { .. })));
        let (job, mut secure) = service(r#"{"secureAggregation":{}}"#);
        assert!(secure.enrol(&job, "a", SECRET, None).unwrap_err().to_string().starts_with("identity_key"));
        assert!(secure.enrol(&job, "a", SECRET, Some([1; 32])).is_ok());
    }

    #[test]
    fn an_update_counts_once_and_forged_late_or_foreign_ones_do_not_count() {
        let (job, mut service) = service("{}");
        let tasks = tasks(&job, &mut service);
        assert_eq!(tasks.len(), 4);
        let task = tasks[&0];
        assert_eq!(service.leased(1, task.number, 1), Err(Refusal::OtherClient));
        assert_eq!(service.leased(0, task.number, task.expires_millis), Err(Refusal::LeaseExpired));
        assert_eq!(service.leased(0, 99, 1), Err(Refusal::LeaseExpired));
        let commit = |service: &mut Service, run: &str, client, digest, now| {
            service.commit(run, (client, task.number, digest), REPORT, now).unwrap().remove(0)
        };
        assert_eq!(commit(&mut service, "b", 0, [1; 32], 1), Action::Refuse(0, Refusal::OtherRun));
        assert_eq!(commit(&mut service, "a", 1, [1; 32], 1), Action::Refuse(1, Refusal::LeaseExpired));
        let acknowledged = |repeated| Action::Acknowledge { client: 0, task: task.number, repeated };
        assert_eq!(commit(&mut service, "a", 0, [1; 32], 1), acknowledged(false));
        let restored: Vec<u8> = postcard::to_stdvec(&service).unwrap();
        let mut service: Service = postcard::from_bytes(&restored).unwrap();
        assert_eq!(commit(&mut service, "a", 0, [1; 32], 2), acknowledged(true));
        assert_eq!(commit(&mut service, "a", 0, [2; 32], 2), Action::Refuse(0, Refusal::Conflict));
        assert_eq!(commit(&mut service, "a", 1, [1; 32], 2), Action::Refuse(1, Refusal::OtherClient));
        assert_eq!(service.report(task.number), Some(&REPORT));
    }

    #[test]
    fn malformed_updates_name_what_is_wrong() {
        let content = encode_values(&[1.0, 2.0]);
        let sum = digest(&content);
        assert_eq!(decode_update(&content, 2, &sum).unwrap(), [1.0, 2.0]);
        let refused =
            |content: &[u8], parameters, sum: &Digest| decode_update(content, parameters, sum).unwrap_err().to_string();
        assert!(refused(&content, 3, &sum).starts_with("update: 8 bytes"));
        assert!(refused(&content, 2, &[0; 32]).starts_with("digest"));
        let nan = encode_values(&[1.0, f32::NAN]);
        assert!(refused(&nan, 2, &digest(&nan)).starts_with("update: NaN at 1"));
        let (job, mut service) = service("{}");
        let task = tasks(&job, &mut service)[&0];
        let mut report = |report| service.commit("a", (0, task.number, [1; 32]), report, 1).unwrap_err().field;
        assert_eq!(report(Report { samples: 0, ..REPORT }), "samples");
        assert_eq!(report(Report { loss: Some(f64::NAN), ..REPORT }), "loss");
        for rate_sum in [0.0, -1.0, f64::INFINITY] {
            assert_eq!(report(Report { rate_sum: Some(rate_sum), ..REPORT }), "rate_sum");
        }
    }

    #[test]
    fn reports_are_those_of_the_first_commit_and_kept_until_their_update_is_used() {
        let fields = r#"{"clients":{"population":4,"perRound":4,"minimum":2},"rounds":9}"#;
        let (job, mut service) = service(fields);
        let tasks_of_a_round = tasks(&job, &mut service);
        let commit = |service: &mut Service, task: &Task, samples| {
            let report = Report { samples, ..REPORT };
            service.commit("a", (task.client, task.number, [1; 32]), report, 1).unwrap()
        };
        let first = tasks_of_a_round[&0];
        commit(&mut service, &first, 5);
        commit(&mut service, &first, 500);
        assert_eq!(
            service.report(first.number).map(|report| report.samples),
            Some(5),
            "a repeated one changes nothing"
        );
        let mut actions = Vec::new();
        (1..4).for_each(|client| actions = commit(&mut service, &tasks_of_a_round[&client], client + 10));
        let batch = actions.into_iter().find_map(|action| match action {
            Action::Aggregate(batch) => Some(batch),
            _ => None,
        });
        let (reports, _) = service.aggregated(&batch.unwrap(), [2; 32], 2);
        assert_eq!(reports.iter().map(|report| report.samples).collect::<Vec<_>>(), [5, 11, 12, 13]);
        assert_eq!((service.counted(), service.report(first.number)), (4, None));
        // One update is less than the minimum: its round is aborted.
        let task = tasks(&job, &mut service)[&0];
        commit(&mut service, &task, 5);
        assert!(service.report(task.number).is_some());
        service.step(Event::CloseRound(task.round), 3);
        assert_eq!((service.counted(), service.report(task.number)), (4, None));
        let restored: Service = postcard::from_bytes(&postcard::to_stdvec(&service).unwrap()).unwrap();
        assert_eq!(restored.aborted(), 1, "the next driver goes on counting");
    }

    #[test]
    fn as_many_names_as_a_run_may_have_clients_can_be_revoked() {
        let (_, mut service) = service("{}");
        for name in 0..MAX_REVOKED {
            service.revoke(&format!("c{name}"), 0).unwrap();
        }
        assert!(service.revoke("c0", 0).is_ok(), "a repeated one needs no room");
        assert_eq!(service.revoke("one-more", 0).unwrap_err().field, "client");
    }

    #[test]
    fn settings_of_masks_are_those_of_the_run_and_the_round() {
        let cohort = |fields: &str, round| {
            let (job, mut service) = service(fields);
            for (name, key) in [("a", 1), ("b", 2), ("c", 3), ("d", 4)] {
                service.enrol(&job, name, SECRET, Some([key; 32])).unwrap();
            }
            let task = |client| Task { client, number: client, round, version: 0, model: [0; 32], expires_millis: 9 };
            let settings = service.cohort(&job, &(0..4).map(task).collect::<Vec<_>>()).unwrap();
            assert_eq!(settings.clients, (0..4).map(|client| (client, [client as u8 + 1; 32])).collect());
            settings
        };
        let masked = r#"{"secureAggregation":{"range":3},"clients":{"population":4,"perRound":4,"minimum":4}}"#;
        let first = cohort(masked, 1);
        assert_eq!((first.clip, first.max_weight), (3.0, 1), "every client counts the same");
        assert_eq!(first.minimum, 4, "a sum of fewer would be discarded: it is not revealed");
        let second = cohort(masked, 2);
        assert!(first.server_key != second.server_key && first.graph_seed != second.graph_seed);
        let cohorts =
            r#"{"secureAggregation":{},"strategy":{"kind":"FedBuff"},"clients":{"population":4,"perRound":4}}"#;
        assert_eq!(cohort(cohorts, 1).minimum, 3, "two thirds");
    }

    #[test]
    fn no_round_starts_when_the_budget_is_exhausted() {
        let (job, mut service) = service(r#"{"privacy":{"epsilon":0.01,"delta":0.01,"noiseMultiplier":1,"clip":1}}"#);
        assert_eq!(tasks(&job, &mut service).len(), 0);
        assert!(matches!(service.rounds().outcome(), Some(Outcome::Exhausted { .. })));
    }
}
