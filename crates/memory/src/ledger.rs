//! Everything a partition replicates beside its memories: settings, sessions, epochs, runs.
//!
//! [`Ledger::admit`] and [`Ledger::complete`] frame the execution of every record, in the store and in the reference
//! alike, so what is applied once, repeated or refused is decided in one place.

use crate::clock::DecayClock;
use crate::codec;
use crate::command::{Command, Record};
use crate::outcome::{Outcome, Refusal, Reply};
use crate::settings::Settings;
use crate::{epoch, run, session};
use xxhash_rust::xxh3::xxh3_128;

/// The replicated state of a partition, its memories and their clock apart.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Settings in force.
    pub settings: Settings,
    /// Sessions and their answers.
    pub sessions: session::Table,
    /// Learning epochs per run.
    pub epochs: epoch::Table,
    /// Runs whose driver lives here.
    pub runs: run::Table,
}

/// What to do with a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gate {
    /// Execute it on the memories, then [`Ledger::complete`].
    Execute,
    /// Answer this; the memories do not change.
    Answer(Reply),
}

impl Ledger {
    /// What `record` would be answered without being executed, if it were applied now: a duplicate, a refusal. `None` when
    /// it would be executed. Changes nothing, so a primary can ask before it logs.
    pub fn foresee(&self, record: &Record) -> Option<Reply> {
        match record.request.map(|request| self.sessions.admit(request)) {
            Some(session::Admission::Stored(reply)) => return Some(reply),
            Some(session::Admission::Refuse(refusal)) => return Some(Reply::Refused(refusal)),
            Some(session::Admission::Execute) | None => {}
        }
        match self.epoch_admission(&record.command) {
            Some(epoch::Admission::Repeat(outcome)) => Some(Reply::Applied(outcome)),
            Some(epoch::Admission::Refuse(refusal)) => Some(Reply::Refused(refusal)),
            Some(epoch::Admission::Execute) | None => None,
        }
    }

    /// Decides what becomes of `record`, and executes it here when it touches the ledger alone.
    pub fn admit(&mut self, record: &Record) -> Gate {
        let unseen = record.request.is_none_or(|request| self.sessions.admit(request) == session::Admission::Execute);
        match self.foresee(record) {
            None => match self.execute(&record.command) {
                None => Gate::Execute,
                Some(reply) => self.answer(record, reply),
            },
            // The epoch table answered under a request not seen before: its answer is the request's.
            Some(reply) if unseen => self.answer(record, reply),
            Some(reply) => Gate::Answer(reply),
        }
    }

    /// Notes the reply of a record that was executed on the memories.
    pub fn complete(&mut self, record: &Record, reply: &Reply) {
        if let (Some((run, n, step)), Reply::Applied(outcome)) = (epoch_step(&record.command), reply) {
            self.epochs.complete(run, n, step, outcome);
        }
        if let Some(request) = record.request {
            self.sessions.complete(request, reply.clone());
        }
    }

    /// Hash of the ledger and the clock, added to the digest of the memories when replicas compare.
    pub fn digest(&self, clock: DecayClock) -> u128 {
        let mut bytes = clock.units().to_le_bytes().to_vec();
        codec::encode_ledger(self, &mut bytes);
        xxh3_128(&bytes)
    }

    fn answer(&mut self, record: &Record, reply: Reply) -> Gate {
        if let Some(request) = record.request {
            self.sessions.complete(request, reply.clone());
        }
        Gate::Answer(reply)
    }

    fn epoch_admission(&self, command: &Command) -> Option<epoch::Admission> {
        epoch_step(command).map(|(run, n, step)| self.epochs.admit(run, n, step))
    }

    /// Executes a command that touches the ledger alone; `None` for one that needs the memories.
    fn execute(&mut self, command: &Command) -> Option<Reply> {
        let done = Some(Reply::Applied(Outcome::default()));
        match command {
            Command::Configure(settings) => {
                self.settings = *settings;
                // What is over a lowered limit goes with the record that lowered it, which needs the memories.
                None
            }
            Command::CloseRequest(request) => Some(match self.sessions.close(*request) {
                Ok(session::Answer::Done(reply)) => reply,
                Ok(session::Answer::Never) => Reply::Refused(Refusal::AlreadyClosed),
                Err(refusal) => Reply::Refused(refusal),
            }),
            Command::ExpireSessions { before_ms } => {
                self.sessions.expire(*before_ms);
                done
            }
            Command::RunRecord { run, expected, state, row } => {
                match self.runs.record(*run, *expected, state, row.as_deref()) {
                    Ok(()) => done,
                    Err(refusal) => Some(Reply::Refused(refusal)),
                }
            }
            Command::RunRemove { run } => {
                self.epochs.remove(*run);
                if self.runs.remove(*run) { done } else { Some(Reply::Refused(Refusal::RunUnknown)) }
            }
            _ => None,
        }
    }
}

/// The step of a learning epoch that a command is, if it is one.
pub fn epoch_step(command: &Command) -> Option<(crate::RunId, crate::LearningEpoch, epoch::Step)> {
    match command {
        Command::Epoch { run, n, .. } => Some((*run, *n, epoch::Step::Whole)),
        Command::EpochBegin { run, n, .. } => Some((*run, *n, epoch::Step::Begin)),
        Command::EpochPart { run, n, part, .. } => Some((*run, *n, epoch::Step::Part(*part))),
        Command::EpochEnd { run, n, parts } => Some((*run, *n, epoch::Step::End(*parts))),
        _ => None,
    }
}
