//! Codec of ledgers in snapshots.

use super::{DecodeError, Decoded, Reader, Writer};
use crate::ids::LearningEpoch;
use crate::ledger::Ledger;
use crate::session::{Answer, SessionId, is_behind_window};
use crate::{buffer, epoch, run, session};
use std::collections::BTreeMap;

/// Encodes `ledger` to the end of `out`. Tables are in key order.
pub fn encode_ledger(ledger: &Ledger, out: &mut Vec<u8>) {
    let mut writer = Writer(out);
    writer.settings(&ledger.settings);
    writer.sessions(&ledger.sessions);
    writer.epochs(&ledger.epochs);
    writer.runs(&ledger.runs);
    // Ledgers of clusters without buffers keep their encoding.
    if !ledger.buffers.is_empty() {
        writer.buffers(&ledger.buffers);
    }
}

/// Decodes a ledger that fills `bytes`.
///
/// # Errors
/// The bytes are not a ledger of this version.
pub fn decode_ledger(bytes: &[u8]) -> Result<Ledger, DecodeError> {
    let mut reader = Reader(bytes);
    let ledger = Ledger {
        settings: reader.settings()?,
        sessions: reader.sessions()?,
        epochs: reader.epochs()?,
        runs: reader.runs()?,
        buffers: if reader.0.is_empty() { buffer::BufferTable::default() } else { reader.buffers()? },
    };
    reader.finish()?;
    Ok(ledger)
}

impl Writer<'_> {
    fn sessions(&mut self, table: &session::Table) {
        self.u64(table.watermark_ms);
        self.len(table.sessions.len());
        for (id, entry) in &table.sessions {
            self.u64(id.opened_ms);
            self.u64(id.random);
            self.u64(entry.high);
            self.len(entry.answers.len());
            for (seq, answer) in &entry.answers {
                self.u64(*seq);
                let reply = match answer {
                    Answer::Done(reply) => Some(reply),
                    Answer::Never => None,
                };
                self.option(reply, Writer::reply);
            }
        }
    }

    fn epochs(&mut self, table: &epoch::Table) {
        self.len(table.runs.len());
        for (run, progress) in &table.runs {
            self.u128(run.0);
            self.u64(progress.done);
            self.option(progress.open, Writer::u32);
            self.len(progress.results.len());
            for (n, outcome) in &progress.results {
                self.u64(n.0);
                self.outcome(outcome);
            }
        }
    }

    fn runs(&mut self, table: &run::Table) {
        self.len(table.len());
        for (run, entry) in table.iter() {
            self.u128(run.0);
            self.u64(entry.version);
            self.bytes(&entry.state);
            self.len(entry.rows.len());
            entry.rows.iter().for_each(|row| self.bytes(row));
        }
    }
}

impl Reader<'_> {
    fn sessions(&mut self) -> Decoded<session::Table> {
        let (watermark_ms, mut sessions) = (self.u64("watermark")?, BTreeMap::new());
        for _ in 0..self.count(28, "sessions")? {
            let id = SessionId { opened_ms: self.u64("session")?, random: self.u64("session")? };
            if id.opened_ms < watermark_ms || !above(&sessions, &id) {
                return Err(DecodeError::Invalid("order of the sessions"));
            }
            let entry = self.session()?;
            sessions.insert(id, entry);
        }
        Ok(session::Table::new(watermark_ms, sessions))
    }

    fn session(&mut self) -> Decoded<session::Entry> {
        let mut entry = session::Entry { high: self.u64("session")?, ..session::Entry::default() };
        for _ in 0..self.count(9, "answers")? {
            let seq = self.u64("seq")?;
            if is_behind_window(seq, entry.high) || !above(&entry.answers, &seq) {
                return Err(DecodeError::Invalid("order of the answers of a session"));
            }
            let reply = self.option("answer", Reader::reply)?;
            entry.answers.insert(seq, reply.map_or(Answer::Never, Answer::Done));
        }
        // A session exists because a request of it was answered, including its highest seq.
        match entry.answers.last_key_value() {
            Some((&last, _)) if last == entry.high => Ok(entry),
            _ => Err(DecodeError::Invalid("highest sequence number of a session")),
        }
    }

    fn epochs(&mut self) -> Decoded<epoch::Table> {
        let mut table = epoch::Table::default();
        for _ in 0..self.count(29, "epochs")? {
            let run = self.run()?;
            if !above(&table.runs, &run) {
                return Err(DecodeError::Invalid("order of the epochs"));
            }
            let progress = self.progress()?;
            table.runs.insert(run, progress);
        }
        Ok(table)
    }

    fn progress(&mut self) -> Decoded<epoch::Progress> {
        let mut progress = epoch::Progress {
            done: self.u64("epoch")?,
            open: self.option("part", |reader| reader.u32("part"))?,
            ..epoch::Progress::default()
        };
        let kept = self.count(46, "results")? as u64;
        if kept != progress.done.min(epoch::KEPT_RESULTS as u64) || (kept == 0 && progress.open.is_none()) {
            return Err(DecodeError::Invalid("number of kept results"));
        }
        for n in progress.done - kept + 1..=progress.done {
            if self.epoch()?.0 != n {
                return Err(DecodeError::Invalid("order of the kept results"));
            }
            progress.results.push_back((LearningEpoch(n), self.outcome()?));
        }
        Ok(progress)
    }

    fn runs(&mut self) -> Decoded<run::Table> {
        let mut runs = BTreeMap::new();
        for _ in 0..self.count(32, "runs")? {
            let run = self.run()?;
            if !above(&runs, &run) {
                return Err(DecodeError::Invalid("order of the runs"));
            }
            let version = self.u64("version")?;
            let state = self.bytes("state")?.to_vec();
            let rows = self.count(4, "rows")?;
            let rows = (0..rows).map(|_| self.bytes("row").map(<[u8]>::to_vec)).collect::<Decoded<_>>()?;
            let entry = run::Entry::new(version, state, rows);
            if version == 0 || entry.rows.len() as u64 > version || !entry.fits() {
                return Err(DecodeError::Invalid("history of a run"));
            }
            runs.insert(run, entry);
        }
        Ok(run::Table::new(runs))
    }
}

/// Whether `key` is above all keys so far, so that a table has one encoding.
pub(super) fn above<K: Ord, V>(table: &BTreeMap<K, V>, key: &K) -> bool {
    table.last_key_value().is_none_or(|(last, _)| last < key)
}
