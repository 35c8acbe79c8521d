//! Codec of commands on buffers, and of their state in ledgers.

use super::ledger::above;
use super::{DecodeError, Decoded, Reader, Writer};
use crate::buffer::{Buffer, BufferCommand, BufferRef, BufferTable, Counts, Cursor, Limits, Remover};
use crate::ids::{Group, MemoryId};
use std::collections::{BTreeMap, BTreeSet};

const DEFINE: u8 = 1;
const DROP: u8 = 2;
const APPEND: u8 = 3;
const SET_WEIGHTS: u8 = 4;
const DELETE: u8 = 5;
const USE: u8 = 6;
const LEASE: u8 = 7;
const ACKNOWLEDGE: u8 = 8;

impl Writer<'_> {
    fn buffer_ref(&mut self, kind: u8, buffer: BufferRef) {
        self.u8(kind);
        self.u8(buffer.group.0);
        self.u64(buffer.stamp);
    }

    fn limits(&mut self, limits: &Limits) {
        self.u64(limits.capacity);
        self.u64(limits.share);
        self.u8(limits.remover.number());
        self.u32(limits.max_reuse);
    }

    pub(super) fn buffer_command(&mut self, command: &BufferCommand) {
        match command {
            BufferCommand::Define { group, name, definition, limits } => {
                self.u8(DEFINE);
                self.option(*group, |writer, group| writer.u8(group.0));
                self.bytes(name.as_bytes());
                self.bytes(definition);
                self.limits(limits);
            }
            BufferCommand::Drop { buffer } => self.buffer_ref(DROP, *buffer),
            BufferCommand::Append { buffer, from, weights, payloads } => {
                self.buffer_ref(APPEND, *buffer);
                self.u64(*from);
                self.u32s(weights);
                self.blobs(payloads);
            }
            BufferCommand::SetWeights { buffer, ids, weights } => {
                self.buffer_ref(SET_WEIGHTS, *buffer);
                self.ids(ids);
                self.u32s(weights);
            }
            BufferCommand::Delete { buffer, ids } => {
                self.buffer_ref(DELETE, *buffer);
                self.ids(ids);
            }
            BufferCommand::Use { buffer, sampled, ids } => {
                self.buffer_ref(USE, *buffer);
                self.u64(*sampled);
                self.ids(ids);
            }
            BufferCommand::Lease { buffer, consumer, ids, now_ms, until_ms } => {
                self.buffer_ref(LEASE, *buffer);
                self.bytes(consumer.as_bytes());
                self.ids(ids);
                self.u64(*now_ms);
                self.u64(*until_ms);
            }
            BufferCommand::Acknowledge { buffer, consumer, ids } => {
                self.buffer_ref(ACKNOWLEDGE, *buffer);
                self.bytes(consumer.as_bytes());
                self.ids(ids);
            }
        }
    }

    pub(super) fn buffers(&mut self, table: &BufferTable) {
        self.u64(table.high);
        self.len(table.buffers.len());
        for (group, buffer) in &table.buffers {
            self.u8(group.0);
            self.bytes(buffer.name.as_bytes());
            self.bytes(&buffer.definition);
            self.limits(&buffer.limits);
            self.u64(buffer.counts.inserted);
            self.u64(buffer.counts.sampled);
            self.u64(buffer.counts.deleted);
            self.len(buffer.consumers.len());
            for (name, cursor) in &buffer.consumers {
                self.bytes(name.as_bytes());
                self.cursor(cursor);
            }
            self.len(buffer.uses.len());
            for (id, uses) in &buffer.uses {
                self.u64(id.0);
                self.u32(*uses);
            }
        }
    }

    fn cursor(&mut self, cursor: &Cursor) {
        self.u64(cursor.next);
        self.len(cursor.done.len());
        cursor.done.iter().for_each(|position| self.u64(*position));
        self.len(cursor.leased.len());
        for (position, until_ms) in &cursor.leased {
            self.u64(*position);
            self.u64(*until_ms);
        }
    }
}

impl Reader<'_> {
    fn text(&mut self, what: &'static str) -> Decoded<String> {
        String::from_utf8(self.bytes(what)?.to_vec()).map_err(|_| DecodeError::Invalid(what))
    }

    fn buffer_ref(&mut self) -> Decoded<BufferRef> {
        Ok(BufferRef { group: Group(self.u8("buffer")?), stamp: self.u64("buffer")? })
    }

    fn limits(&mut self) -> Decoded<Limits> {
        let (capacity, share, code) = (self.u64("capacity")?, self.u64("share")?, self.u8("remover")?);
        let remover =
            Remover::from_number(code).ok_or(DecodeError::Unknown { what: "remover", found: u64::from(code) })?;
        Ok(Limits { capacity, share, remover, max_reuse: self.u32("reuse")? })
    }

    pub(super) fn buffer_command(&mut self) -> Decoded<BufferCommand> {
        Ok(match self.u8("kind of buffer command")? {
            DEFINE => BufferCommand::Define {
                group: self.option("group", |reader| reader.u8("group").map(Group))?,
                name: self.text("buffer name")?,
                definition: self.bytes("definition")?.to_vec(),
                limits: self.limits()?,
            },
            DROP => BufferCommand::Drop { buffer: self.buffer_ref()? },
            APPEND => BufferCommand::Append {
                buffer: self.buffer_ref()?,
                from: self.u64("position")?,
                weights: self.u32s("weights")?,
                payloads: self.blobs()?,
            },
            SET_WEIGHTS => BufferCommand::SetWeights {
                buffer: self.buffer_ref()?,
                ids: self.ids()?,
                weights: self.u32s("weights")?,
            },
            DELETE => BufferCommand::Delete { buffer: self.buffer_ref()?, ids: self.ids()? },
            USE => BufferCommand::Use { buffer: self.buffer_ref()?, sampled: self.u64("sampled")?, ids: self.ids()? },
            LEASE => BufferCommand::Lease {
                buffer: self.buffer_ref()?,
                consumer: self.text("consumer name")?,
                ids: self.ids()?,
                now_ms: self.u64("time")?,
                until_ms: self.u64("time")?,
            },
            ACKNOWLEDGE => BufferCommand::Acknowledge {
                buffer: self.buffer_ref()?,
                consumer: self.text("consumer name")?,
                ids: self.ids()?,
            },
            found => return Err(DecodeError::Unknown { what: "kind of buffer command", found: found.into() }),
        })
    }

    pub(super) fn buffers(&mut self) -> Decoded<BufferTable> {
        let mut table = BufferTable { high: self.u64("position")?, buffers: BTreeMap::new() };
        for _ in 0..self.count(62, "buffers")? {
            let group = Group(self.u8("group")?);
            if !above(&table.buffers, &group) {
                return Err(DecodeError::Invalid("order of the buffers"));
            }
            let buffer = self.buffer()?;
            table.buffers.insert(group, buffer);
        }
        // An empty table is not encoded.
        if table.is_empty() { Err(DecodeError::Invalid("buffers")) } else { Ok(table) }
    }

    fn buffer(&mut self) -> Decoded<Buffer> {
        let (name, definition) = (self.text("buffer name")?, self.bytes("definition")?.to_vec());
        let limits = self.limits()?;
        let counts =
            Counts { inserted: self.u64("inserted")?, sampled: self.u64("sampled")?, deleted: self.u64("deleted")? };
        let mut consumers = BTreeMap::new();
        for _ in 0..self.count(20, "consumers")? {
            let name = self.text("consumer name")?;
            if !above(&consumers, &name) {
                return Err(DecodeError::Invalid("order of the consumers"));
            }
            let cursor = self.cursor()?;
            consumers.insert(name, cursor);
        }
        let mut uses = BTreeMap::new();
        for _ in 0..self.count(12, "uses")? {
            let id = MemoryId(self.u64("handle")?);
            if !above(&uses, &id) {
                return Err(DecodeError::Invalid("order of the uses"));
            }
            uses.insert(id, self.u32("uses")?);
        }
        Ok(Buffer { name, definition, limits, counts, consumers, uses })
    }

    fn cursor(&mut self) -> Decoded<Cursor> {
        let next = self.u64("cursor")?;
        let mut done = BTreeSet::new();
        for _ in 0..self.count(8, "done")? {
            let position = self.u64("position")?;
            if position < next || done.last().is_some_and(|last| *last >= position) {
                return Err(DecodeError::Invalid("order of the done items"));
            }
            done.insert(position);
        }
        let mut leased = BTreeMap::new();
        for _ in 0..self.count(16, "leases")? {
            let position = self.u64("position")?;
            if position < next || !above(&leased, &position) {
                return Err(DecodeError::Invalid("order of the leases"));
            }
            leased.insert(position, self.u64("time")?);
        }
        Ok(Cursor { next, done, leased })
    }
}
