//! `FedBuff` with secure aggregation: several cohorts at a time, each from the version at which it was formed.
//!
//! A cohort is charged when it is formed and waits for no other one. Its sum is one buffer, weighted by the staleness of its version; what is too
//! old, or has too few updates, is aborted.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::Rounds;
use crate::model::ClientId;
use crate::round::{Action, Contribution, Mode, Outcome};
use crate::strategy::MAX_STALENESS;

/// Clients that aggregate securely together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Cohort {
    version: u64,
    deadline_millis: u64,
    accepted: Vec<Contribution>,
}

/// The cohorts of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::round) struct Cohorts {
    /// In progress, by number.
    open: BTreeMap<u64, Cohort>,
    /// With a sum that is not aggregated yet, in the order in which they ended.
    ended: VecDeque<(u64, Cohort)>,
    /// The next cohort does not fit the budget: the run ends after those in progress.
    exhausted: Option<Outcome>,
}

impl Cohorts {
    pub(super) fn deadline_of(&mut self, round: u64) -> Option<&mut u64> {
        self.open.get_mut(&round).map(|cohort| &mut cohort.deadline_millis)
    }

    pub(super) fn accepted_of(&mut self, round: u64) -> Option<&mut Vec<Contribution>> {
        self.open.get_mut(&round).map(|cohort| &mut cohort.accepted)
    }

    /// Removes all cohorts; returns their updates.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Contribution> + use<> {
        let Self { open, ended, .. } = std::mem::take(self);
        let cohorts = open.into_values().chain(ended.into_iter().map(|(_, cohort)| cohort));
        cohorts.flat_map(|cohort| cohort.accepted)
    }

    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.open.values().map(|cohort| cohort.deadline_millis).min()
    }

    /// Cohorts in progress, and those whose sums are not aggregated yet.
    pub(super) fn numbers(&self) -> BTreeSet<u64> {
        self.open.keys().copied().chain(self.ended.iter().map(|(round, _)| *round)).collect()
    }

    #[cfg(test)]
    pub(in crate::round) fn accepted(&self) -> impl Iterator<Item = &Contribution> {
        self.open.values().chain(self.ended.iter().map(|(_, cohort)| cohort)).flat_map(|cohort| &cohort.accepted)
    }
}

impl Rounds {
    pub(super) fn advance_cohorts(&mut self, now: u64, actions: &mut Vec<Action>) {
        let late = self.cohorts.open.iter().filter(|(_, cohort)| cohort.deadline_millis <= now);
        for round in late.map(|(round, _)| *round).collect::<Vec<_>>() {
            self.end_cohort(round, actions);
        }
        self.aggregate_cohort(actions);
        self.form_cohorts(now, actions);
        let is_idle = self.cohorts.open.is_empty() && self.aggregating.is_none();
        if let Some(outcome) = self.cohorts.exhausted.filter(|_| is_idle) {
            self.end(outcome, actions);
        }
    }

    fn end_cohort(&mut self, round: u64, actions: &mut Vec<Action>) {
        let Mode::Cohorts { minimum, .. } = self.settings.mode else { return };
        let Some(cohort) = self.cohorts.open.remove(&round) else { return };
        let members = self.leases.tasks.values().filter(|task| task.round == round);
        for (client, task) in members.map(|task| (task.client, task.number)).collect::<Vec<_>>() {
            self.leases.remove(client);
            actions.push(Action::Revoke { client, task });
        }
        if cohort.accepted.len() >= minimum as usize {
            self.cohorts.ended.push_back((round, cohort));
        } else {
            self.abort_cohort(round, cohort, actions);
        }
    }

    fn abort_cohort(&mut self, round: u64, cohort: Cohort, actions: &mut Vec<Action>) {
        actions.push(Action::Abort { round, updates: cohort.accepted.len() as u32 });
        actions.extend(cohort.accepted.into_iter().map(Action::Discard));
        self.aborts += 1;
        if self.aborts >= self.settings.max_aborts {
            self.end(Outcome::TooManyAborts, actions);
        }
    }

    /// Begins the next aggregation, one at a time.
    fn aggregate_cohort(&mut self, actions: &mut Vec<Action>) {
        while self.aggregating.is_none()
            && let Some((round, cohort)) = self.cohorts.ended.pop_front()
        {
            if self.version - cohort.version > MAX_STALENESS {
                self.abort_cohort(round, cohort, actions);
            } else {
                self.begin_batch(round, cohort.accepted, actions);
            }
        }
    }

    /// Forms cohorts of the clients that wait, in the order in which they checked in. No more are in progress than versions are missing: a cohort
    /// that the run does not need would be charged.
    fn form_cohorts(&mut self, now: u64, actions: &mut Vec<Action>) {
        let Mode::Cohorts { size, cohorts, .. } = self.settings.mode else { return };
        while self.outcome.is_none() && self.cohorts.exhausted.is_none() && self.waiting.queue.len() >= size as usize {
            let unused = self.cohorts.numbers().len() + usize::from(self.aggregating.is_some());
            let missing = (self.settings.versions - self.version).saturating_sub(unused as u64);
            if missing == 0 || self.cohorts.open.len() >= cohorts as usize {
                return;
            }
            if let Err(exhausted) = self.charge() {
                self.cohorts.exhausted = Some(exhausted.into());
                return;
            }
            self.round += 1;
            let deadline_millis = now.saturating_add(self.settings.deadline_millis);
            let cohort = Cohort { version: self.version, deadline_millis, accepted: Vec::new() };
            self.cohorts.open.insert(self.round, cohort);
            let waiting = self.waiting.queue.values().map(|(client, _)| *client);
            for client in waiting.take(size as usize).collect::<Vec<ClientId>>() {
                self.assign(client, now, actions);
            }
        }
    }
}
