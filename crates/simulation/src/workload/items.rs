//! A writer of items: it fills a buffer in each partition, in order, and repeats what gets no response.
//!
//! The payload of an item follows from its partition, the step that appended it and its place in the step, so that every stored payload can
//! be checked, on whichever disk it is. Repeats may append an item again; none that was acknowledged may be missing. Buffers of odd
//! partitions are small and drop their oldest items, so that payload segments are compacted.

use crate::cluster::node::Answer;
use crate::draw::Draw;
use crate::faults::Fault;
use crate::faults::plan::FaultPlan;
use crate::world::{Event, World};
use engram_memory::buffer::{Buffer, BufferRef, Limits, Remover, position};
use engram_memory::{Blobs, BufferCommand, Command, Group, PartitionId, Record, Reply};
use engram_replay::item::Head;
use engram_store::WriteError;
use std::collections::BTreeSet;

/// Attempts with numbers from here on, below those of the learning run, are steps of the writer.
pub(crate) const FIRST_APPEND: u64 = 1 << 61;
/// Steps of the writer per partition; the first one creates the buffer.
const STEPS: usize = 24;
/// Most items that a step appends.
const MOST_ITEMS: u64 = 3;
/// Lengths of payloads: some fill a segment of a simulated disk, most do not.
const LENGTHS: [u64; 4] = [0, 300, 5_000, 60_000];
/// Items of a small buffer.
const SMALL: u64 = 12;
/// Items of a buffer that drops none.
const LARGE: u64 = 1 << 20;

/// The writer in one partition.
struct Script {
    /// Lengths of the payloads of each step.
    lengths: Vec<Vec<usize>>,
    /// The next step; all before it are acknowledged.
    next: usize,
    /// Presumed primary.
    presumed_primary: usize,
}

/// The writer.
pub(crate) struct Items {
    scripts: Vec<Script>,
}

impl Items {
    /// Draws nothing unless the run has items, so that other runs are as they were.
    pub(crate) fn new(plan: &FaultPlan, draw: &mut Draw, has_items: bool) -> Self {
        let partitions = if has_items { plan.partitions } else { 0 };
        let mut lengths = || {
            let items = draw.within(1, MOST_ITEMS);
            let mut length = || {
                let most = draw.pick(&LENGTHS);
                draw.below(most + 1) as usize
            };
            (0..items).map(|_| length()).collect()
        };
        let scripts = (0..partitions).map(|_| {
            let lengths = (0..STEPS).map(|step| if step == 0 { Vec::new() } else { lengths() }).collect();
            Script { lengths, next: 0, presumed_primary: 0 }
        });
        Self { scripts: scripts.collect() }
    }

    /// Returns whether the run has items.
    pub(crate) fn is_used(&self) -> bool {
        !self.scripts.is_empty()
    }

    /// Returns what is not done; `None` = nothing.
    pub(crate) fn pending(&self) -> Option<String> {
        let behind = self.scripts.iter().position(|script| script.next < STEPS);
        behind.map(|partition| format!("the writer is at step {} of p{partition}", self.scripts[partition].next))
    }

    fn record(&self, partition: PartitionId, partitions: u32, step: usize) -> Record {
        let command = if step == 0 {
            let (share, remover) = if is_small(partition) { (SMALL, Remover::Fifo) } else { (LARGE, Remover::Refuse) };
            let limits = Limits { capacity: LARGE, share, remover, max_reuse: 0 };
            BufferCommand::Define { group: None, name: "items".into(), definition: b"items".to_vec(), limits }
        } else {
            let stamp = Buffer { definition: b"items".to_vec(), ..Buffer::default() }.stamp();
            let lengths = &self.scripts[partition.0 as usize].lengths[step];
            let payloads = (0..lengths.len()).map(|at| payload(partition, step, at, lengths[at])).collect::<Blobs>();
            let buffer = BufferRef { group: Group(255), stamp };
            let from = position(0, partition.0, partitions);
            BufferCommand::Append { buffer, from, weights: vec![1; lengths.len()], payloads }
        };
        Record::bare(Command::Buffer(command))
    }

    /// Checks a stored payload; returns the step and the place that appended it.
    fn origin(&self, partition: PartitionId, stored: &[u8]) -> Option<(usize, usize)> {
        let (head, _) = Head::decode(stored)?;
        let (step, at) = (head.version as usize, head.trajectory as usize);
        let length = *self.scripts[partition.0 as usize].lengths.get(step)?.get(at)?;
        (payload(partition, step, at, length) == stored).then_some((step, at))
    }

    /// All items that must be there: those of buffers that drop none.
    fn required(&self, partition: PartitionId) -> BTreeSet<(usize, usize)> {
        if is_small(partition) {
            return BTreeSet::new();
        }
        let steps = self.scripts[partition.0 as usize].lengths.iter().enumerate();
        steps.flat_map(|(step, lengths)| (0..lengths.len()).map(move |at| (step, at))).collect()
    }
}

/// Whether the buffer of a partition drops its oldest items.
const fn is_small(partition: PartitionId) -> bool {
    !partition.0.is_multiple_of(2)
}

/// The payload of an item: a head, then bytes that follow from where it was appended.
fn payload(partition: PartitionId, step: usize, at: usize, length: usize) -> Vec<u8> {
    let mut payload = Vec::new();
    Head { version: step as u64, trajectory: at as u64, tag: b"" }.encode(&mut payload);
    let mut bytes = Draw::new(u64::from(partition.0) << 32 | (step as u64) << 8 | at as u64);
    payload.extend((0..length).map(|_| bytes.next() as u8));
    payload
}

impl World {
    /// The writer sends the next steps.
    pub(crate) fn append(&mut self) {
        let wait_us = self.draw.within(5_000, if self.is_calm { 50_000 } else { self.plan.think_us });
        self.at(wait_us, Event::Append);
        for partition in 0..self.items.scripts.len() {
            let script = &self.items.scripts[partition];
            let (step, node) = (script.next, script.presumed_primary);
            if step == STEPS || self.draw.chance(300) {
                continue;
            }
            if self.draw.chance(self.plan.request_lost) {
                self.count(Fault::RequestLost);
                continue;
            }
            let wait_us = self.delay_us();
            self.at(wait_us, Event::AppendStep { node, partition: PartitionId(partition as u32), step });
        }
    }

    /// A step of the writer arrives at a node.
    pub(crate) fn append_arrives(&mut self, node: usize, partition: PartitionId, step: usize) {
        let record = self.items.record(partition, self.plan.partitions, step);
        let number = FIRST_APPEND | u64::from(partition.0) << 32 | step as u64;
        self.trace.note(self.now_us, &[26, node as u64, u64::from(partition.0), step as u64], || {
            format!("{node} receives items of step {step} of p{partition}")
        });
        if !self.submit_record(node, partition, record, number) {
            self.find_primary_of_items(partition);
        }
    }

    fn find_primary_of_items(&mut self, partition: PartitionId) {
        let primary = self.map_store.entry(partition).primary.0 as usize;
        self.items.scripts[partition.0 as usize].presumed_primary = primary;
    }

    /// Delivers the result of a step to the writer.
    pub(crate) fn append_answered(&mut self, (number, answer): Answer) {
        let (partition, step) = (PartitionId((number >> 32 & 0xffff) as u32), (number & 0xffff_ffff) as usize);
        self.trace.note(self.now_us, &[27, number, u64::from(answer.is_ok())], || {
            format!("items of step {step} of p{partition} get {answer:?}")
        });
        match answer.map(|committed| committed.reply) {
            Ok(Reply::Applied(_)) => {
                let next = &mut self.items.scripts[partition.0 as usize].next;
                *next = (*next).max(step + 1);
            }
            Ok(Reply::Refused(refusal)) => {
                self.fail(format!("items of step {step} of p{partition} were rejected: {refusal:?}"));
            }
            Err(error @ WriteError::Invalid { .. }) => {
                self.fail(format!("items of step {step} of p{partition} are invalid: {error}"));
            }
            Err(_) => self.find_primary_of_items(partition),
        }
    }

    /// Checks the payloads of all items on the disks of all replicas. Where bits of a disk were flipped, items may be damaged, also on disks that
    /// received them from it before another replica could repair them; a wrong payload is never read.
    pub(crate) fn check_items(&mut self) {
        if !self.items.is_used() {
            return;
        }
        let (mut broken, is_intact) = (Vec::new(), self.counters.get(Fault::BitFlip) == 0);
        for partition in (0..self.plan.partitions).map(PartitionId) {
            let members = self.map_store.entry(partition).isr.clone();
            for member in members {
                let node = &mut self.nodes[member.ordinal.0 as usize];
                let process = node.process.as_mut().expect("the cluster is whole");
                let (mut found, mut wrong) = (BTreeSet::new(), 0);
                let items = &self.items;
                let read = process.store.partitions().scan(partition, None, u32::MAX, |memory| {
                    if memory.group != Group(255) {
                        return;
                    }
                    match items.origin(partition, memory.payload) {
                        Some(origin) => drop(found.insert(origin)),
                        None => wrong += 1,
                    }
                });
                let lacking = self.items.required(partition).difference(&found).count();
                let lost = is_intact && (read.is_err() || lacking > 0);
                if wrong > 0 || lost || (is_intact && found.is_empty()) {
                    broken.push(format!(
                        "p{partition} on {member}: {wrong} wrong payloads, {lacking} acknowledged items are missing, read {:?}",
                        read.err()
                    ));
                }
            }
        }
        if let Some(first) = broken.first() {
            self.fail(format!("{} replicas have lost items; the first: {first}", broken.len()));
        }
    }
}
