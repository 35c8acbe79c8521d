//! Replicated state of a partition other than its memories: settings, sessions, epochs, runs, buffers.
//!
//! [`Ledger::admit`] and [`Ledger::complete`] surround the execution of every record, in the store and in the reference, so that
//! deduplication and refusals are decided in one place.

use crate::buffer::BufferCommand;
use crate::clock::DecayClock;
use crate::codec;
use crate::command::{Command, Record};
use crate::outcome::{Outcome, Refusal, Reply};
use crate::settings::Settings;
use crate::{buffer, epoch, run, session};
use xxhash_rust::xxh3::xxh3_128;

/// Replicated state of a partition without its memories and their clock.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ledger {
    /// Settings in force.
    pub settings: Settings,
    /// Sessions and their answers.
    pub sessions: session::Table,
    /// Learning epochs per run.
    pub epochs: epoch::Table,
    /// Runs whose records are kept in this partition.
    pub runs: run::Table,
    /// Replay buffers.
    pub buffers: buffer::BufferTable,
}

/// What to do with a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gate {
    /// Execute it on the memories, then [`Ledger::complete`].
    Execute,
    /// Reply with this; the memories do not change.
    Answer(Reply),
}

impl Ledger {
    /// Returns the reply to `record` if it were applied now and needs no execution: a duplicate or a refusal. `None` if it would be
    /// executed. Changes nothing, so a primary can call it before logging.
    pub fn lookup_reply(&self, record: &Record) -> Option<Reply> {
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

    /// Decides whether to execute `record`, and executes it here if it affects only the ledger.
    pub fn admit(&mut self, record: &Record) -> Gate {
        let unseen = record.request.is_none_or(|request| self.sessions.admit(request) == session::Admission::Execute);
        match self.lookup_reply(record) {
            None => match self.execute(&record.command) {
                None => Gate::Execute,
                Some(reply) => self.answer(record, reply),
            },
            // The epoch table has the reply to a new request: the session stores it too.
            Some(reply) if unseen => self.answer(record, reply),
            Some(reply) => Gate::Answer(reply),
        }
    }

    /// Records the reply of a record that was executed on the memories.
    pub fn complete(&mut self, record: &Record, reply: &Reply) {
        if let (Some((run, n, step)), Reply::Applied(outcome)) = (epoch_step(&record.command), reply) {
            self.epochs.complete(run, n, step, outcome);
        }
        if let Some(request) = record.request {
            self.sessions.complete(request, reply.clone());
        }
    }

    /// Returns the hash of ledger and clock, which replica digests include.
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

    /// Executes a command that affects only the ledger; `None` for one that needs the memories.
    fn execute(&mut self, command: &Command) -> Option<Reply> {
        let done = Some(Reply::Applied(Outcome::default()));
        match command {
            Command::Configure(settings) => {
                self.settings = *settings;
                // A lowered limit evicts with the same record, which needs the memories.
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
            Command::Buffer(BufferCommand::Define { group, name, definition, limits }) => {
                let defined = self.buffers.define(*group, name, definition, *limits);
                Some(defined.map_or_else(Reply::Refused, |()| Reply::Applied(Outcome::default())))
            }
            Command::Buffer(command) => {
                command.buffer().and_then(|buffer| self.buffers.check(buffer).err()).map(Reply::Refused)
            }
            _ => None,
        }
    }
}

/// Returns the step of a learning epoch that a command represents, if any.
pub fn epoch_step(command: &Command) -> Option<(crate::RunId, crate::LearningEpoch, epoch::Step)> {
    match command {
        Command::Epoch { run, n, .. } => Some((*run, *n, epoch::Step::Whole)),
        Command::EpochBegin { run, n, .. } => Some((*run, *n, epoch::Step::Begin)),
        Command::EpochPart { run, n, part, .. } => Some((*run, *n, epoch::Step::Part(*part))),
        Command::EpochEnd { run, n, parts } => Some((*run, *n, epoch::Step::End(*parts))),
        _ => None,
    }
}
