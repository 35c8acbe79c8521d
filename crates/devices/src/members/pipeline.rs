//! Pipeline over members: each has consecutive stages, and sends items on as far as the next member has granted credit.
//!
//! Every member takes its items in ascending order, and sends credit for an item when it starts the one `capacity` places before it. The
//! smallest item without a result can therefore always advance: no cycle of members that wait for each other exists.

use super::Member;
use super::exchange::{Exchange, MemberFailure, hash};
use super::placement::{Part, place_stages};
use crate::{Error, Stage};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// What members send to each other between two stages.
pub trait Item: Sized {
    /// Returns the bytes of the item.
    fn encode(&self) -> Vec<u8>;

    /// Returns the item of these bytes.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    fn decode(bytes: &[u8]) -> Result<Self, String>;
}

/// How a group runs a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemberPipelineRun {
    /// Name of the pipeline, for errors.
    pub name: &'static str,
    /// Items that wait for a member, at least 1.
    pub capacity: usize,
    /// Items between two boundaries, at least 1: what a lost member costs at most. The pipeline drains at a boundary.
    pub items_per_boundary: usize,
    /// Time limit.
    pub limit: Duration,
}

/// Sends items through the stages, together with all other members. Rank 0 has the items and appends their results, in order, to `results`,
/// which has those of the first items already; the other ranks leave both empty. After an error `results` has those of all boundaries that
/// were reached: call again in a new generation, in which rank 0 is the same member.
///
/// # Errors
/// [`Error::Member`] if another member was lost, stalls, or fails; an own error if a stage fails or panics, or the time limit passes. The
/// transport must be dropped then.
pub fn advance_pipeline<T: Item>(
    member: &mut Member<'_>,
    stages: &[Stage<'_, T>],
    items: &[T],
    results: &mut Vec<T>,
    run: &MemberPipelineRun,
) -> Result<(), Error> {
    if run.capacity == 0 || run.items_per_boundary == 0 || stages.is_empty() {
        return Err(Error::argument("capacity, items per boundary or stages", 0, "at least 1"));
    }
    if results.len() > items.len() {
        return Err(Error::argument("results", results.len(), "at most the number of items"));
    }
    let mut exchange = Exchange::new(member, run.name, run.limit);
    let result = advance_windows(&mut exchange, stages, items, results, run);
    exchange.conclude(result)
}

fn advance_windows<T: Item>(
    exchange: &mut Exchange<'_, '_>,
    stages: &[Stage<'_, T>],
    items: &[T],
    results: &mut Vec<T>,
    run: &MemberPipelineRun,
) -> Result<(), Error> {
    let costs: Vec<u64> = stages.iter().map(Stage::cost).collect();
    let settings = [run.capacity as u64, run.items_per_boundary as u64].into_iter().chain(costs.iter().copied());
    let own = [items.len() as u64, results.len() as u64, exchange.speed()];
    let agreed = exchange.agree(hash(settings), own)?;
    let speeds: Vec<u64> = agreed.iter().map(|it| it[2]).collect();
    let parts = place_stages(&costs, &speeds);
    let (all, mut done) = (agreed[0][0] as usize, agreed[0][1] as usize);
    while done < all {
        let end = all.min(done + run.items_per_boundary);
        let window = Window { stages, items, parts: &parts, capacity: run.capacity, range: done..end };
        let own = window.compute(exchange)?;
        results.extend(window.gather(exchange, own)?);
        done = end;
    }
    Ok(())
}

/// The items between two boundaries.
struct Window<'a, 'b, T> {
    stages: &'a [Stage<'b, T>],
    items: &'a [T],
    parts: &'a [Part],
    capacity: usize,
    range: Range<usize>,
}

impl<T: Item> Window<'_, '_, T> {
    /// Computes the own stages of the own items; returns the results that this member has, in order.
    fn compute(&self, exchange: &mut Exchange<'_, '_>) -> Result<Vec<T>, Error> {
        let rank = exchange.rank();
        let own = self.parts.iter().position(|part| part.ranks.contains(&rank)).expect("every rank has a part");
        let mut results = Vec::new();
        for item in self.range.clone() {
            if rank == 0 && self.parts[0].rank_of(item) != 0 {
                self.send(exchange, 0, item, &self.items[item])?;
            }
            if self.parts[own].rank_of(item) != rank {
                continue;
            }
            let computed = if rank == 0 {
                self.compute_stages(exchange, own, &self.items[item])?
            } else {
                let input = self.receive(exchange, own, item)?;
                self.compute_stages(exchange, own, &input)?
            };
            if own + 1 == self.parts.len() {
                results.push(computed);
            } else {
                self.send(exchange, own + 1, item, &computed)?;
            }
        }
        Ok(results)
    }

    /// Returns the rank that sends an item to a part.
    fn sender(&self, part: usize, item: usize) -> usize {
        part.checked_sub(1).map_or(0, |before| self.parts[before].rank_of(item))
    }

    /// Returns the item of the same rank of a part, `capacity` places later.
    fn later(&self, part: usize, item: usize) -> usize {
        item + self.capacity * self.parts[part].ranks.len()
    }

    fn send(&self, exchange: &mut Exchange<'_, '_>, part: usize, item: usize, value: &T) -> Result<(), Error> {
        let to = self.parts[part].rank_of(item);
        if item >= self.later(part, self.range.start) {
            exchange.waiting("credit", |exchange| exchange.wait_for_credit(to, item as u64))?;
        }
        let bytes = value.encode();
        exchange.waiting("send item", |exchange| exchange.send_item(to, item as u64, &bytes))
    }

    fn receive(&self, exchange: &mut Exchange<'_, '_>, part: usize, item: usize) -> Result<T, Error> {
        let from = self.sender(part, item);
        let bytes = exchange.waiting("item", |exchange| exchange.receive_item(from, item as u64))?;
        let later = self.later(part, item);
        // The first rank of a part computes its own inputs.
        if later < self.range.end {
            exchange.grant(self.sender(part, later), later as u64)?;
        }
        T::decode(&bytes).map_err(|error| {
            exchange.failure(from, MemberFailure::Failed(format!("item {item} cannot be read: {error}")))
        })
    }

    fn compute_stages(&self, exchange: &Exchange<'_, '_>, part: usize, input: &T) -> Result<T, Error> {
        let mut stages = self.stages[self.parts[part].stages.clone()].iter();
        let first = stages.next().expect("a part has a stage");
        let first = compute(exchange, first, input)?;
        stages.try_fold(first, |input, stage| compute(exchange, stage, &input))
    }

    /// Collects the results of all items at rank 0, which grants credit for a few at a time; empty at other ranks.
    fn gather(&self, exchange: &mut Exchange<'_, '_>, own: Vec<T>) -> Result<Vec<T>, Error> {
        let last = self.parts.last().expect("there is a part");
        let rank = exchange.rank();
        let mut own = own.into_iter();
        if rank != 0 {
            for item in self.range.clone().filter(|&item| last.rank_of(item) == rank) {
                let result = own.next().expect("a result for every own item").encode();
                exchange.wait_for_credit(0, item as u64)?;
                exchange.send_item(0, item as u64, &result)?;
            }
            return Ok(Vec::new());
        }
        let mut results = Vec::new();
        let mut granted = self.range.start;
        for item in self.range.clone() {
            while granted < self.range.end.min(item + self.capacity) {
                if last.rank_of(granted) != 0 {
                    exchange.grant(last.rank_of(granted), granted as u64)?;
                }
                granted += 1;
            }
            let from = last.rank_of(item);
            results.push(if from == 0 {
                own.next().expect("a result for every own item")
            } else {
                let bytes = exchange.waiting("result", |exchange| exchange.receive_item(from, item as u64))?;
                T::decode(&bytes).map_err(|error| {
                    exchange.failure(from, MemberFailure::Failed(format!("result {item} cannot be read: {error}")))
                })?
            });
        }
        Ok(results)
    }
}

/// Computes a stage on the first device of this member that is left.
fn compute<T>(exchange: &Exchange<'_, '_>, stage: &Stage<'_, T>, input: &T) -> Result<T, Error> {
    let devices = exchange.devices();
    for device in devices {
        exchange.time_left()?;
        let result = catch_unwind(AssertUnwindSafe(|| device.execute(stage.name(), || stage.compute(input))));
        let result = result.unwrap_or_else(|_| Some(Err("the stage panicked".to_owned())));
        if let Some(result) = result {
            let device = device.name().to_owned();
            return result.map_err(|message| Error::Kernel { what: stage.name(), device, message });
        }
    }
    Err(Error::NoDevice { what: stage.name(), devices: devices.len() })
}
