//! Codec of replies in sessions and epoch tables.

use super::{DecodeError, Decoded, Reader, Writer};
use crate::hash::Digest;
use crate::ids::{Group, LearningEpoch, MemoryId};
use crate::outcome::{MAX_REJECTIONS, Outcome, Refusal, Rejection, RejectionReason, Reply};
use crate::quality::{GroupQuality, QualityVector};

const APPLIED: u8 = 0;
const SESSION_EXPIRED: u8 = 1;
const ALREADY_CLOSED: u8 = 2;
const OUT_OF_WINDOW: u8 = 3;
const EPOCH_GAP: u8 = 4;
const EPOCH_FORGOTTEN: u8 = 5;
const RUN_CONFLICT: u8 = 6;
const RUN_UNKNOWN: u8 = 7;
const RUN_FULL: u8 = 8;
const MALFORMED: u8 = 9;
const BUFFER_UNKNOWN: u8 = 10;
const BUFFER_CONFLICT: u8 = 11;
const BUFFER_FULL: u8 = 12;
const BUFFER_LIMIT: u8 = 13;
/// An applied record with the handle of its first item.
const APPENDED: u8 = 14;

/// Encodes `reply` to the end of `out`.
pub fn encode_reply(reply: &Reply, out: &mut Vec<u8>) {
    Writer(out).reply(reply);
}

/// Decodes a reply that fills `bytes`.
///
/// # Errors
/// The bytes are not a reply of this version.
pub fn decode_reply(bytes: &[u8]) -> Result<Reply, DecodeError> {
    let mut reader = Reader(bytes);
    let reply = reader.reply()?;
    reader.finish()?;
    Ok(reply)
}

impl Writer<'_> {
    pub(super) fn reply(&mut self, reply: &Reply) {
        match reply {
            Reply::Applied(outcome) => {
                match outcome.first {
                    None => self.u8(APPLIED),
                    Some(first) => {
                        self.u8(APPENDED);
                        self.u64(first.0);
                    }
                }
                self.outcome(outcome);
            }
            Reply::Refused(refusal) => self.refusal(refusal),
        }
    }

    pub(super) fn outcome(&mut self, outcome: &Outcome) {
        self.u64(outcome.applied);
        self.u64(outcome.created);
        self.u64(outcome.evicted);
        self.u64(outcome.rejected);
        self.len(outcome.rejections.len());
        for rejection in &outcome.rejections {
            self.u64(rejection.id.0);
            self.u8(rejection.reason.code());
        }
        self.option(outcome.quality.as_ref(), |writer, quality| {
            writer.len(quality.groups().len());
            for (group, quality) in quality.groups() {
                writer.u8(group.0);
                writer.u64(quality.count);
                writer.u128(quality.sum);
                writer.u32(quality.min);
                writer.u32(quality.max);
            }
        });
        self.option(outcome.digest, |writer, digest| writer.u128(digest.0));
    }

    fn refusal(&mut self, refusal: &Refusal) {
        match refusal {
            Refusal::SessionExpired => self.u8(SESSION_EXPIRED),
            Refusal::AlreadyClosed => self.u8(ALREADY_CLOSED),
            Refusal::OutOfWindow { window } => {
                self.u8(OUT_OF_WINDOW);
                self.u64(*window);
            }
            Refusal::EpochGap { expected, expected_part, found, found_part } => {
                self.u8(EPOCH_GAP);
                self.u64(expected.0);
                self.u32(*expected_part);
                self.u64(found.0);
                self.u32(*found_part);
            }
            Refusal::EpochForgotten { n } => {
                self.u8(EPOCH_FORGOTTEN);
                self.u64(n.0);
            }
            Refusal::RunConflict { expected, found } => {
                self.u8(RUN_CONFLICT);
                self.u64(*expected);
                self.u64(*found);
            }
            Refusal::RunUnknown => self.u8(RUN_UNKNOWN),
            Refusal::RunFull { bytes } => {
                self.u8(RUN_FULL);
                self.u64(*bytes);
            }
            Refusal::BufferUnknown => self.u8(BUFFER_UNKNOWN),
            Refusal::BufferConflict => self.u8(BUFFER_CONFLICT),
            Refusal::BufferFull { items, capacity, needed } => {
                self.u8(BUFFER_FULL);
                self.u64(*items);
                self.u64(*capacity);
                self.u64(*needed);
            }
            Refusal::BufferLimit { most, .. } => {
                self.u8(BUFFER_LIMIT);
                self.u64(*most);
            }
            Refusal::Malformed { .. } => self.u8(MALFORMED),
        }
    }
}

impl Reader<'_> {
    pub(super) fn reply(&mut self) -> Decoded<Reply> {
        let refusal = match self.u8("reply")? {
            APPLIED => return self.outcome().map(Reply::Applied),
            APPENDED => {
                let first = Some(MemoryId(self.u64("handle")?));
                return Ok(Reply::Applied(Outcome { first, ..self.outcome()? }));
            }
            SESSION_EXPIRED => Refusal::SessionExpired,
            ALREADY_CLOSED => Refusal::AlreadyClosed,
            OUT_OF_WINDOW => Refusal::OutOfWindow { window: self.u64("window")? },
            EPOCH_GAP => Refusal::EpochGap {
                expected: LearningEpoch(self.u64("epoch")?),
                expected_part: self.u32("part")?,
                found: LearningEpoch(self.u64("epoch")?),
                found_part: self.u32("part")?,
            },
            EPOCH_FORGOTTEN => Refusal::EpochForgotten { n: LearningEpoch(self.u64("epoch")?) },
            RUN_CONFLICT => Refusal::RunConflict { expected: self.u64("version")?, found: self.u64("version")? },
            RUN_UNKNOWN => Refusal::RunUnknown,
            RUN_FULL => Refusal::RunFull { bytes: self.u64("bytes")? },
            BUFFER_UNKNOWN => Refusal::BufferUnknown,
            BUFFER_CONFLICT => Refusal::BufferConflict,
            BUFFER_FULL => Refusal::BufferFull {
                items: self.u64("items")?,
                capacity: self.u64("capacity")?,
                needed: self.u64("needed")?,
            },
            BUFFER_LIMIT => Refusal::BufferLimit { what: "buffers or consumers", most: self.u64("limit")? },
            MALFORMED => Refusal::Malformed { what: "the request" },
            found => return Err(DecodeError::Unknown { what: "kind of reply", found: found.into() }),
        };
        Ok(Reply::Refused(refusal))
    }

    pub(super) fn outcome(&mut self) -> Decoded<Outcome> {
        let mut outcome = Outcome {
            applied: self.u64("applied")?,
            created: self.u64("created")?,
            evicted: self.u64("evicted")?,
            rejected: self.u64("rejected")?,
            ..Outcome::default()
        };
        let named = self.count(9, "rejections")?;
        if named > MAX_REJECTIONS || named as u64 > outcome.rejected {
            return Err(DecodeError::Invalid("rejections"));
        }
        for _ in 0..named {
            let id = MemoryId(self.u64("rejection")?);
            let code = self.u8("rejection")?;
            let reason = RejectionReason::from_code(code)
                .ok_or(DecodeError::Unknown { what: "rejection", found: code.into() })?;
            outcome.rejections.push(Rejection { id, reason });
        }
        outcome.quality = self.option("quality", Reader::quality)?;
        outcome.digest = self.option("digest", |reader| reader.u128("digest").map(Digest))?;
        Ok(outcome)
    }

    fn quality(&mut self) -> Decoded<QualityVector> {
        let mut groups = Vec::new();
        for _ in 0..self.count(33, "quality")? {
            let group = Group(self.u8("quality")?);
            let quality = GroupQuality {
                count: self.u64("quality")?,
                sum: self.u128("quality")?,
                min: self.u32("quality")?,
                max: self.u32("quality")?,
            };
            groups.push((group, quality));
        }
        QualityVector::from_parts(groups).ok_or(DecodeError::Invalid("quality"))
    }
}
