//! A learning run: a driver takes every partition through its epochs, dies, and is replaced by one that reads their
//! progress.
//!
//! The run in a partition is one list of steps, small epochs and large ones in parts, drawn in advance, so that every
//! driver sends equal ones. Each updating step adds its own power of four to one memory of the partition: at the end
//! every digit is 1, regardless of dead drivers and repeats.

use crate::cluster::node::Answer;
use crate::draw::Draw;
use crate::faults::Fault;
use crate::faults::plan::FaultPlan;
use crate::world::{Event, World};
use engram_memory::{
    Command, LearningEpoch, MemoryId, OnMissing, Outcome, PartitionId, Record, Reply, RunId, Updates, partition_of,
};

/// The only run.
const RUN: RunId = RunId(0x5eed);
/// Updating steps per partition: as many powers of four as fit in a weight.
const UPDATES: usize = 15;
/// Attempts with numbers from here on are steps of the run.
pub(crate) const FIRST_STEP: u64 = 1 << 62;

/// The run in one partition.
struct Script {
    memory: MemoryId,
    steps: Vec<Command>,
    /// The first result of each step that closed an epoch: every repeat must get the same.
    results: Vec<Option<Outcome>>,
    /// The next step, if the driver knows it; `None`: it has to read the progress.
    next: Option<usize>,
    /// Presumed primary.
    presumed_primary: usize,
}

/// The run, with its current driver.
pub(crate) struct Epochs {
    scripts: Vec<Script>,
    /// Responses to earlier drivers are ignored.
    driver: u64,
}

impl Epochs {
    pub(crate) fn new(plan: &FaultPlan, draw: &mut Draw) -> Self {
        let partitions = if plan.epochs { plan.partitions } else { 0 };
        let scripts = (0..partitions).map(|partition| {
            let memory = loop {
                let id = MemoryId(draw.next());
                if partition_of(id, plan.partitions) == PartitionId(partition) {
                    break id;
                }
            };
            let steps = steps(memory, draw);
            Script { memory, results: vec![None; steps.len()], steps, next: Some(0), presumed_primary: 0 }
        });
        Self { scripts: scripts.collect(), driver: 0 }
    }

    /// Returns what is not done; `None` = nothing.
    pub(crate) fn pending(&self) -> Option<String> {
        let behind = self.scripts.iter().position(|script| script.next != Some(script.steps.len()));
        behind.map(|partition| format!("the run is at step {:?} of p{partition}", self.scripts[partition].next))
    }

    /// The memory of each partition, and its final weight.
    pub(crate) fn sums(&self) -> impl Iterator<Item = (PartitionId, MemoryId, u32)> {
        (0..).map(PartitionId).zip(&self.scripts).map(|(partition, script)| {
            let adds = script.steps.iter().filter(|step| updates(step).is_some()).count();
            (partition, script.memory, ((1_u64 << (2 * adds)) / 3) as u32)
        })
    }
}

fn updates(step: &Command) -> Option<&Updates> {
    match step {
        Command::Epoch { updates, .. } | Command::EpochPart { updates, .. } => Some(updates),
        _ => None,
    }
}

/// The steps of all epochs of a partition.
fn steps(memory: MemoryId, draw: &mut Draw) -> Vec<Command> {
    let mut added = 0;
    let mut next_update = || {
        let deltas = vec![1 << (2 * added)];
        added += 1;
        Updates::ById { ids: vec![memory], deltas, on_missing: OnMissing::Create, keys: None }
    };
    let (mut steps, mut left, mut number) = (Vec::new(), UPDATES, 0);
    while left > 0 {
        number += 1;
        let (run, n) = (RUN, LearningEpoch(number));
        if draw.chance(600) {
            left -= 1;
            steps.push(Command::Epoch { run, n, decay: 0, updates: next_update() });
        } else {
            let parts = draw.within(1, left.min(4) as u64) as u32;
            left -= parts as usize;
            steps.push(Command::EpochBegin { run, n, decay: 0 });
            steps.extend((1..=parts).map(|part| Command::EpochPart { run, n, part, updates: next_update() }));
            steps.push(Command::EpochEnd { run, n, parts });
        }
    }
    steps
}

/// Position of a step: its epoch, and the number of its parts applied before: 0 at its start, above its parts at its
/// end.
const fn position(step: &Command) -> (u64, u32) {
    match step {
        Command::EpochPart { n, part, .. } => (n.0, *part),
        Command::EpochEnd { n, parts, .. } => (n.0, *parts + 1),
        Command::Epoch { n, .. } | Command::EpochBegin { n, .. } => (n.0, 0),
        _ => (0, 0),
    }
}

impl World {
    /// The driver sends the next steps.
    pub(crate) fn drive(&mut self) {
        let wait_us = self.draw.within(5_000, if self.is_calm { 50_000 } else { self.plan.think_us });
        self.at(wait_us, Event::Drive);
        let driver = self.epochs.driver;
        for partition in 0..self.epochs.scripts.len() {
            let script = &self.epochs.scripts[partition];
            let (next, node) = (script.next, script.presumed_primary);
            if next == Some(script.steps.len()) || self.draw.chance(300) {
                continue;
            }
            if self.draw.chance(self.plan.request_lost) {
                self.count(Fault::RequestLost);
                continue;
            }
            let partition = PartitionId(partition as u32);
            let wait_us = self.delay_us();
            let event = next.map_or(Event::ReadProgress { node, partition, driver }, |step| Event::Step {
                node,
                partition,
                step,
            });
            self.at(wait_us, event);
            if let Some(step) = next
                && self.draw.chance(self.plan.request_again)
            {
                self.count(Fault::RequestAgain);
                let late_us = wait_us + self.draw.below(1_500_000);
                self.at(late_us, Event::Step { node, partition, step });
            }
        }
    }

    /// The driver ends with its knowledge; its requests stay in flight. False if there is no run.
    pub(crate) fn replace_driver(&mut self) -> bool {
        self.epochs.driver += 1;
        self.epochs.scripts.iter_mut().for_each(|script| script.next = None);
        !self.epochs.scripts.is_empty()
    }

    /// A step arrives at a node.
    pub(crate) fn step_arrives(&mut self, node: usize, partition: PartitionId, step: usize) {
        let record = Record::bare(self.epochs.scripts[partition.0 as usize].steps[step].clone());
        let number = FIRST_STEP | u64::from(partition.0) << 32 | step as u64;
        self.trace.note(self.now_us, &[22, node as u64, u64::from(partition.0), step as u64], || {
            format!("{node} receives step {step} of p{partition}: {record:?}")
        });
        if !self.submit_record(node, partition, record, number) {
            self.find_server(partition);
        }
    }

    fn find_server(&mut self, partition: PartitionId) {
        let primary = self.map_store.entry(partition).primary.0 as usize;
        self.epochs.scripts[partition.0 as usize].presumed_primary = primary;
    }

    /// Delivers the result of a step to the driver.
    pub(crate) fn step_answered(&mut self, (number, answer): Answer) {
        let (partition, step) = (PartitionId((number >> 32 & 0xffff) as u32), (number & 0xffff_ffff) as usize);
        self.trace.note(self.now_us, &[23, number, u64::from(answer.is_ok())], || {
            format!("step {step} of p{partition} gets {answer:?}")
        });
        let outcome = match answer {
            Ok(committed) => match committed.reply {
                Reply::Applied(outcome) => outcome,
                Reply::Refused(refusal) => {
                    self.fail(format!("step {step} of p{partition} is next in order, but was rejected: {refusal:?}"));
                    return;
                }
            },
            Err(_) => {
                self.find_server(partition);
                return;
            }
        };
        let script = &mut self.epochs.scripts[partition.0 as usize];
        if matches!(script.steps[step], Command::Epoch { .. } | Command::EpochEnd { .. }) {
            let first = script.results[step].get_or_insert_with(|| outcome.clone()).clone();
            if first != outcome {
                self.fail(format!("step {step} of p{partition} got response {first:?}, then {outcome:?}"));
                return;
            }
        }
        if let Some(next) = &mut script.next {
            *next = (*next).max(step + 1);
        }
    }

    /// A new driver reads the progress of a partition at a node.
    pub(crate) fn read_progress(&mut self, node: usize, partition: PartitionId, driver: u64) {
        let mut current = None;
        self.with(node, |store| {
            if store.is_readable(partition) {
                let ledger = store.partitions().ledger(partition);
                let progress = ledger.and_then(|ledger| ledger.epochs.progress(RUN));
                let position = progress.map_or((0, None), |progress| (progress.done, progress.open));
                current = store.is_readable(partition).then_some(position);
            }
            Ok(())
        });
        match current {
            Some((done, open)) if !self.draw.chance(self.plan.request_lost) => {
                let wait_us = self.delay_us();
                self.at(wait_us, Event::Progress { partition, driver, done, open });
            }
            _ => self.find_server(partition),
        }
    }

    /// The driver receives the progress of a partition, and continues from there, with some repetition.
    pub(crate) fn receive_progress(&mut self, partition: PartitionId, driver: u64, done: u64, open: Option<u32>) {
        let back = self.draw.below(4) as usize;
        let script = &mut self.epochs.scripts[partition.0 as usize];
        if driver != self.epochs.driver || script.next.is_some() {
            return;
        }
        let is_done = |step: &Command| {
            let (n, before) = position(step);
            n <= done || (n == done + 1 && open.is_some_and(|applied| before <= applied))
        };
        let next = script.steps.iter().take_while(|step| is_done(step)).count();
        script.next = Some(next.saturating_sub(back));
    }
}
