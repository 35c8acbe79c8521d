//! Codec of log records.

use super::{DecodeError, Decoded, Reader, Writer, words};
use crate::command::{Blobs, Command, OnMissing, Record, Updates, Upsert};
use crate::ids::{Group, LearningEpoch, MemoryId, RunId};
use crate::law::Weight;
use crate::outcome::Refusal;
use crate::session::{Request, SessionId};
use crate::settings::{CapacityPolicy, Settings};

const UPSERT: u8 = 1;
const REMOVE: u8 = 2;
const REINFORCE: u8 = 3;
const DECAY: u8 = 4;
const EPOCH: u8 = 5;
const EPOCH_BEGIN: u8 = 6;
const EPOCH_PART: u8 = 7;
const EPOCH_END: u8 = 8;
const EVICT: u8 = 9;
const CONFIGURE: u8 = 10;
const CLOSE_REQUEST: u8 = 11;
const EXPIRE_SESSIONS: u8 = 12;
const RUN_RECORD: u8 = 13;
const RUN_REMOVE: u8 = 14;
const DIGEST_MARKER: u8 = 15;
const BUFFER: u8 = 16;

const BY_ID: u8 = 0;
const BY_GROUP: u8 = 1;

/// Encodes `record` to the end of `out`.
pub fn encode_record(record: &Record, out: &mut Vec<u8>) {
    let mut writer = Writer(out);
    writer.option(record.request, Writer::request);
    writer.command(&record.command);
}

/// Decodes a record that fills `bytes`, and checks it with [`Record::check`].
///
/// # Errors
/// The bytes are not a valid record of this version.
pub fn decode_record(bytes: &[u8]) -> Result<Record, DecodeError> {
    let mut reader = Reader(bytes);
    let request = reader.option("request", Reader::request)?;
    let command = reader.command()?;
    reader.finish()?;
    let record = Record { request, command };
    record.check().map_err(|refusal| invalid(&refusal))?;
    Ok(record)
}

/// Converts a refusal of a check into a decode error.
pub(super) fn invalid(refusal: &Refusal) -> DecodeError {
    match refusal {
        Refusal::Malformed { what } => DecodeError::Invalid(what),
        _ => DecodeError::Invalid("command"),
    }
}

impl Writer<'_> {
    pub(super) fn request(&mut self, request: Request) {
        self.u64(request.session.opened_ms);
        self.u64(request.session.random);
        self.u64(request.seq);
    }

    fn epoch(&mut self, run: RunId, n: LearningEpoch) {
        self.u128(run.0);
        self.u64(n.0);
    }

    pub(super) fn ids(&mut self, ids: &[MemoryId]) {
        self.len(ids.len());
        self.0.reserve(ids.len() * 8);
        self.0.extend(ids.iter().flat_map(|id| id.0.to_le_bytes()));
    }

    pub(super) fn blobs(&mut self, blobs: &Blobs) {
        self.u32s(blobs.ends());
        self.bytes(blobs.bytes());
    }

    fn updates(&mut self, updates: &Updates) {
        match updates {
            Updates::ById { ids, deltas, on_missing, keys } => {
                self.u8(BY_ID);
                self.u8(u8::from(*on_missing == OnMissing::Create));
                self.ids(ids);
                debug_assert_eq!(ids.len(), deltas.len(), "checked at the edge: the count of the ids is also theirs");
                self.0.reserve(deltas.len() * 4);
                self.0.extend(deltas.iter().flat_map(|delta| delta.to_le_bytes()));
                self.option(keys.as_ref(), Writer::blobs);
            }
            Updates::ByGroup(groups) => {
                self.u8(BY_GROUP);
                self.len(groups.len());
                for (group, delta) in groups {
                    self.u8(group.0);
                    self.0.extend_from_slice(&delta.to_le_bytes());
                }
            }
        }
    }

    pub(super) fn settings(&mut self, settings: &Settings) {
        self.u32(settings.rate);
        self.u32(settings.initial_weight.units());
        self.u64(settings.limit);
        self.u8(u8::from(settings.policy == CapacityPolicy::Refuse));
        self.u8(u8::from(settings.count_updates));
    }

    fn command(&mut self, command: &Command) {
        match command {
            Command::Upsert(upsert) => {
                self.u8(UPSERT);
                self.ids(&upsert.ids);
                self.u32s(&upsert.weights);
                self.len(upsert.groups.len());
                self.0.extend(upsert.groups.iter().map(|group| group.0));
                self.option(upsert.keys.as_ref(), Writer::blobs);
                self.bytes(&upsert.features);
                self.option(upsert.payloads.as_ref(), Writer::blobs);
            }
            Command::Remove { ids } => {
                self.u8(REMOVE);
                self.ids(ids);
            }
            Command::Reinforce(updates) => {
                self.u8(REINFORCE);
                self.updates(updates);
            }
            Command::Decay { amount } => {
                self.u8(DECAY);
                self.u32(*amount);
            }
            Command::Epoch { run, n, decay, updates } => {
                self.u8(EPOCH);
                self.epoch(*run, *n);
                self.u32(*decay);
                self.updates(updates);
            }
            Command::EpochBegin { run, n, decay } => {
                self.u8(EPOCH_BEGIN);
                self.epoch(*run, *n);
                self.u32(*decay);
            }
            Command::EpochPart { run, n, part, updates } => {
                self.u8(EPOCH_PART);
                self.epoch(*run, *n);
                self.u32(*part);
                self.updates(updates);
            }
            Command::EpochEnd { run, n, parts } => {
                self.u8(EPOCH_END);
                self.epoch(*run, *n);
                self.u32(*parts);
            }
            Command::Evict { count } => {
                self.u8(EVICT);
                self.u64(*count);
            }
            Command::Configure(settings) => {
                self.u8(CONFIGURE);
                self.settings(settings);
            }
            Command::CloseRequest(request) => {
                self.u8(CLOSE_REQUEST);
                self.request(*request);
            }
            Command::ExpireSessions { before_ms } => {
                self.u8(EXPIRE_SESSIONS);
                self.u64(*before_ms);
            }
            Command::RunRecord { run, expected, state, row } => {
                self.u8(RUN_RECORD);
                self.u128(run.0);
                self.u64(*expected);
                self.bytes(state);
                self.option(row.as_deref(), Writer::bytes);
            }
            Command::RunRemove { run } => {
                self.u8(RUN_REMOVE);
                self.u128(run.0);
            }
            Command::DigestMarker { marker } => {
                self.u8(DIGEST_MARKER);
                self.u64(*marker);
            }
            Command::Buffer(command) => {
                self.u8(BUFFER);
                self.buffer_command(command);
            }
        }
    }
}

impl Reader<'_> {
    pub(super) fn request(&mut self) -> Decoded<Request> {
        let session = SessionId { opened_ms: self.u64("session")?, random: self.u64("session")? };
        Ok(Request { session, seq: self.u64("seq")? })
    }

    pub(super) fn run(&mut self) -> Decoded<RunId> {
        self.u128("run").map(RunId)
    }

    pub(super) fn epoch(&mut self) -> Decoded<LearningEpoch> {
        self.u64("epoch").map(LearningEpoch)
    }

    pub(super) fn ids(&mut self) -> Decoded<Vec<MemoryId>> {
        Ok(words(self.column(8, "ids")?).map(|id| MemoryId(u64::from_le_bytes(id))).collect())
    }

    pub(super) fn blobs(&mut self) -> Decoded<Blobs> {
        let ends = self.u32s("blobs")?;
        Blobs::from_parts(ends, self.bytes("blobs")?.to_vec()).ok_or(DecodeError::Invalid("blobs"))
    }

    fn updates(&mut self) -> Decoded<Updates> {
        match self.u8("updates")? {
            BY_ID => {
                let on_missing = if self.bool("on missing")? { OnMissing::Create } else { OnMissing::Report };
                let ids = self.ids()?;
                let deltas = words(self.take(ids.len() * 4, "deltas")?).map(i32::from_le_bytes).collect();
                let keys = self.option("keys", Reader::blobs)?;
                Ok(Updates::ById { ids, deltas, on_missing, keys })
            }
            BY_GROUP => {
                let entries = words::<5>(self.column(5, "groups")?);
                let entry = |[group, a, b, c, d]: [u8; 5]| (Group(group), i32::from_le_bytes([a, b, c, d]));
                Ok(Updates::ByGroup(entries.map(entry).collect()))
            }
            found => Err(DecodeError::Unknown { what: "kind of updates", found: found.into() }),
        }
    }

    pub(super) fn settings(&mut self) -> Decoded<Settings> {
        let settings = Settings {
            rate: self.u32("rate")?,
            initial_weight: Weight::from_units(self.u32("initial weight")?)
                .ok_or(DecodeError::Invalid("initial weight"))?,
            limit: self.u64("limit")?,
            policy: if self.bool("policy")? { CapacityPolicy::Refuse } else { CapacityPolicy::Evict },
            count_updates: self.bool("count updates")?,
        };
        settings.check().map_err(|refusal| invalid(&refusal))?;
        Ok(settings)
    }

    fn command(&mut self) -> Decoded<Command> {
        Ok(match self.u8("kind")? {
            UPSERT => Command::Upsert(Upsert {
                ids: self.ids()?,
                weights: self.u32s("weights")?,
                groups: self.bytes("groups")?.iter().map(|&group| Group(group)).collect(),
                keys: self.option("keys", Reader::blobs)?,
                features: self.bytes("features")?.to_vec(),
                payloads: self.option("payloads", Reader::blobs)?,
            }),
            REMOVE => Command::Remove { ids: self.ids()? },
            REINFORCE => Command::Reinforce(self.updates()?),
            DECAY => Command::Decay { amount: self.u32("amount")? },
            EPOCH => Command::Epoch {
                run: self.run()?,
                n: self.epoch()?,
                decay: self.u32("decay")?,
                updates: self.updates()?,
            },
            EPOCH_BEGIN => Command::EpochBegin { run: self.run()?, n: self.epoch()?, decay: self.u32("decay")? },
            EPOCH_PART => Command::EpochPart {
                run: self.run()?,
                n: self.epoch()?,
                part: self.u32("part")?,
                updates: self.updates()?,
            },
            EPOCH_END => Command::EpochEnd { run: self.run()?, n: self.epoch()?, parts: self.u32("parts")? },
            EVICT => Command::Evict { count: self.u64("count")? },
            CONFIGURE => Command::Configure(self.settings()?),
            CLOSE_REQUEST => Command::CloseRequest(self.request()?),
            EXPIRE_SESSIONS => Command::ExpireSessions { before_ms: self.u64("watermark")? },
            RUN_RECORD => Command::RunRecord {
                run: self.run()?,
                expected: self.u64("version")?,
                state: self.bytes("state")?.to_vec(),
                row: self.option("row", |reader| reader.bytes("row").map(<[u8]>::to_vec))?,
            },
            RUN_REMOVE => Command::RunRemove { run: self.run()? },
            DIGEST_MARKER => Command::DigestMarker { marker: self.u64("marker")? },
            BUFFER => Command::Buffer(self.buffer_command()?),
            found => return Err(DecodeError::Unknown { what: "kind of record", found: found.into() }),
        })
    }
}
