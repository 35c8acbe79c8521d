//! Assignment of the tasks of one stage to workers, as a state machine without I/O.
//!
//! A worker executes one task at a time. The most expensive task that waits is started first. The task of a lost worker waits again;
//! a task that loses too many workers is given up, because it probably kills them. Every task is recorded exactly once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Losses of workers by one task after which the run fails.
pub const MAX_LOSSES: u32 = 5;
/// Time until a worker that refused a task or was lost is tried again.
const REST: Duration = Duration::from_millis(500);

/// Ordinal of a worker.
pub type WorkerNumber = u32;

/// What happened, to [`Assignment::step`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AssignmentEvent {
    /// The live workers are these.
    Workers(BTreeSet<WorkerNumber>),
    /// A worker returned the result of its task.
    Finished(WorkerNumber),
    /// A worker did not accept its task: it is busy, stops, or cannot be reached.
    Refused(WorkerNumber),
    /// A worker was lost after it had accepted its task.
    Lost(WorkerNumber),
    /// Time has passed.
    Tick,
}

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AssignmentAction {
    /// Start a task, by its index, on a worker.
    Start {
        /// The worker.
        worker: WorkerNumber,
        /// The task.
        task: usize,
    },
    /// End the call to a worker that is no longer alive.
    Abandon(WorkerNumber),
    /// Record the result of a task.
    Record {
        /// The worker that returned it.
        worker: WorkerNumber,
        /// The task.
        task: usize,
    },
    /// Fail the run: this task has lost too many workers.
    GiveUp {
        /// The task.
        task: usize,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TaskState {
    Waiting,
    Running,
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkerState {
    Idle,
    /// It executes this task.
    Busy(usize),
    /// It refused or was lost, and is tried again at this time.
    Resting(Duration),
}

/// The tasks of a stage and the workers. Times are since any fixed moment.
#[derive(Debug, Clone)]
pub struct Assignment {
    /// State and losses per task.
    tasks: Vec<(TaskState, u32)>,
    /// Indexes of tasks, the most expensive first.
    order: Vec<usize>,
    workers: BTreeMap<WorkerNumber, WorkerState>,
    given_up: bool,
}

impl Assignment {
    /// Creates the assignment of tasks with `costs`, of which `done` are recorded already.
    pub fn new(costs: &[u64], done: &BTreeSet<usize>) -> Self {
        let state = |task| if done.contains(&task) { TaskState::Done } else { TaskState::Waiting };
        let mut order: Vec<usize> = (0..costs.len()).collect();
        order.sort_by_key(|task| (std::cmp::Reverse(costs[*task]), *task));
        let tasks = (0..costs.len()).map(|task| (state(task), 0)).collect();
        Self { tasks, order, workers: BTreeMap::new(), given_up: false }
    }

    /// Returns whether every task is recorded.
    pub fn is_complete(&self) -> bool {
        self.tasks.iter().all(|(state, _)| *state == TaskState::Done)
    }

    /// Returns the tasks in execution, with their workers.
    pub fn running(&self) -> impl Iterator<Item = (WorkerNumber, usize)> {
        self.workers.iter().filter_map(|(worker, state)| match state {
            WorkerState::Busy(task) => Some((*worker, *task)),
            WorkerState::Idle | WorkerState::Resting(_) => None,
        })
    }

    /// Returns how many workers were lost while they executed a task.
    pub fn losses(&self, task: usize) -> u32 {
        self.tasks[task].1
    }

    /// Returns how often tasks were taken back from lost workers.
    pub fn total_losses(&self) -> u64 {
        self.tasks.iter().map(|(_, losses)| u64::from(*losses)).sum()
    }

    /// Returns when a [`AssignmentEvent::Tick`] is due, if at all.
    pub fn next_tick(&self) -> Option<Duration> {
        let is_waiting = self.tasks.iter().any(|(state, _)| *state == TaskState::Waiting);
        let rests = self.workers.values().filter_map(|state| match state {
            WorkerState::Resting(until) => Some(*until),
            WorkerState::Idle | WorkerState::Busy(_) => None,
        });
        rests.min().filter(|_| is_waiting && !self.given_up)
    }

    /// Applies an event at time `now`.
    pub fn step(&mut self, event: AssignmentEvent, now: Duration) -> Vec<AssignmentAction> {
        let mut actions = Vec::new();
        match event {
            AssignmentEvent::Workers(alive) => actions.extend(self.set_workers(&alive)),
            AssignmentEvent::Finished(worker) => actions.extend(self.finish(worker)),
            AssignmentEvent::Refused(worker) => {
                self.release(worker, now);
            }
            AssignmentEvent::Lost(worker) => {
                if let Some(task) = self.release(worker, now) {
                    actions.extend(self.count_loss(task));
                }
            }
            AssignmentEvent::Tick => {}
        }
        self.wake(now);
        actions.extend(self.start());
        actions
    }

    fn set_workers(&mut self, alive: &BTreeSet<WorkerNumber>) -> Vec<AssignmentAction> {
        let gone: Vec<WorkerNumber> = self.workers.keys().filter(|worker| !alive.contains(worker)).copied().collect();
        let mut actions = Vec::new();
        for worker in gone {
            if let Some(WorkerState::Busy(task)) = self.workers.remove(&worker) {
                self.tasks[task].0 = TaskState::Waiting;
                actions.push(AssignmentAction::Abandon(worker));
                actions.extend(self.count_loss(task));
            }
        }
        for worker in alive {
            self.workers.entry(*worker).or_insert(WorkerState::Idle);
        }
        actions
    }

    fn finish(&mut self, worker: WorkerNumber) -> Option<AssignmentAction> {
        let state = self.workers.get_mut(&worker)?;
        let WorkerState::Busy(task) = *state else { return None };
        *state = WorkerState::Idle;
        self.tasks[task].0 = TaskState::Done;
        Some(AssignmentAction::Record { worker, task })
    }

    /// Takes the task of a worker back, and lets the worker rest.
    fn release(&mut self, worker: WorkerNumber, now: Duration) -> Option<usize> {
        let state = self.workers.get_mut(&worker)?;
        let WorkerState::Busy(task) = *state else { return None };
        *state = WorkerState::Resting(now + REST);
        self.tasks[task].0 = TaskState::Waiting;
        Some(task)
    }

    fn count_loss(&mut self, task: usize) -> Option<AssignmentAction> {
        self.tasks[task].1 += 1;
        let is_hopeless = self.tasks[task].1 > MAX_LOSSES && !self.given_up;
        self.given_up |= is_hopeless;
        is_hopeless.then_some(AssignmentAction::GiveUp { task })
    }

    fn wake(&mut self, now: Duration) {
        for state in self.workers.values_mut() {
            if matches!(state, WorkerState::Resting(until) if *until <= now) {
                *state = WorkerState::Idle;
            }
        }
    }

    fn start(&mut self) -> Vec<AssignmentAction> {
        if self.given_up {
            return Vec::new();
        }
        let idle = self.workers.iter_mut().filter(|(_, state)| **state == WorkerState::Idle);
        let waiting = self.order.iter().copied().filter(|task| self.tasks[*task].0 == TaskState::Waiting);
        let pairs = idle.zip(waiting.collect::<Vec<_>>());
        let start = |((worker, state), task): ((&WorkerNumber, &mut WorkerState), usize)| {
            *state = WorkerState::Busy(task);
            self.tasks[task].0 = TaskState::Running;
            AssignmentAction::Start { worker: *worker, task }
        };
        pairs.map(start).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START: Duration = Duration::ZERO;

    fn workers(numbers: impl IntoIterator<Item = u32>) -> AssignmentEvent {
        AssignmentEvent::Workers(numbers.into_iter().collect())
    }

    #[test]
    fn expensive_tasks_start_first_and_recorded_ones_never() {
        let mut assignment = Assignment::new(&[1, 9, 5, 9], &BTreeSet::from([1]));
        let started = assignment.step(workers([0, 7]), START);
        let start = |worker, task| AssignmentAction::Start { worker, task };
        assert_eq!(started, [start(0, 3), start(7, 2)]);
        let record = AssignmentAction::Record { worker: 7, task: 2 };
        assert_eq!(assignment.step(AssignmentEvent::Finished(7), START), [record, start(7, 0)]);
    }

    #[test]
    fn task_of_a_lost_worker_goes_to_an_idle_one_at_once() {
        let mut assignment = Assignment::new(&[1], &BTreeSet::new());
        assignment.step(workers([0, 1]), START);
        let again = AssignmentAction::Start { worker: 1, task: 0 };
        assert_eq!(assignment.step(AssignmentEvent::Lost(0), START), [again]);
        // The same if the cluster declares a worker dead before its call fails.
        let actions = assignment.step(workers([0]), START);
        assert_eq!(actions, [AssignmentAction::Abandon(1)], "worker 0 rests");
        assert_eq!((assignment.losses(0), assignment.total_losses()), (2, 2));
        let due = assignment.next_tick().unwrap();
        let again = AssignmentAction::Start { worker: 0, task: 0 };
        assert_eq!(assignment.step(AssignmentEvent::Tick, due), [again]);
    }

    #[test]
    fn task_that_kills_workers_is_given_up_but_refusals_never_count() {
        let mut assignment = Assignment::new(&[1], &BTreeSet::new());
        let mut now = START;
        assignment.step(workers([0]), now);
        for _ in 0..100 {
            assert_eq!(assignment.step(AssignmentEvent::Refused(0), now), []);
            now = assignment.next_tick().unwrap();
            assert_eq!(assignment.step(AssignmentEvent::Tick, now).len(), 1);
        }
        for _ in 0..MAX_LOSSES {
            assert_eq!(assignment.step(AssignmentEvent::Lost(0), now), []);
            now = assignment.next_tick().unwrap();
            assignment.step(AssignmentEvent::Tick, now);
        }
        assert_eq!(assignment.step(AssignmentEvent::Lost(0), now), [AssignmentAction::GiveUp { task: 0 }]);
        assert_eq!((assignment.next_tick(), assignment.step(workers([0, 1]), now)), (None, vec![]));
    }

    proptest! {
        /// Whatever workers refuse, come, go and die, in any order, every task is recorded exactly once, no worker has two tasks and no
        /// task two workers, unless a task was given up.
        #[test]
        fn every_task_is_recorded_once(
            costs in prop::collection::vec(1_u64..9, 1..12),
            choices in prop::collection::vec((0_u8..10, 0_u32..4), 0..200),
        ) {
            let mut assignment = Assignment::new(&costs, &BTreeSet::new());
            let mut alive = BTreeSet::from([0, 1]);
            let mut calls: BTreeMap<u32, usize> = BTreeMap::new();
            let mut recorded = vec![0; costs.len()];
            let mut given_up = false;
            let mut now = START;
            let mut queue = vec![AssignmentEvent::Workers(alive.clone())];
            let mut choices = choices.into_iter();
            for _ in 0..10_000 {
                for event in std::mem::take(&mut queue) {
                    for action in assignment.step(event, now) {
                        match action {
                            AssignmentAction::Start { worker, task } => {
                                prop_assert!(alive.contains(&worker) && recorded[task] == 0);
                                prop_assert!(!calls.values().any(|other| *other == task));
                                prop_assert!(calls.insert(worker, task).is_none());
                            }
                            AssignmentAction::Abandon(worker) => prop_assert!(calls.remove(&worker).is_some()),
                            AssignmentAction::Record { task, .. } => recorded[task] += 1,
                            AssignmentAction::GiveUp { .. } => given_up = true,
                        }
                    }
                }
                if given_up || assignment.is_complete() {
                    break;
                }
                now += Duration::from_millis(100);
                // After the random part everything works.
                let (what, worker) = choices.next().unwrap_or((0, 0));
                match what {
                    7 => { alive.insert(worker); }
                    8 => { alive.remove(&worker); }
                    _ => {}
                }
                if matches!(what, 7 | 8) {
                    queue.push(AssignmentEvent::Workers(alive.clone()));
                } else if choices.len() == 0 && alive.is_empty() {
                    alive.insert(0);
                    queue.push(AssignmentEvent::Workers(alive.clone()));
                } else if let Some(worker) = calls.keys().nth(worker as usize % calls.len().max(1)).copied() {
                    calls.remove(&worker);
                    queue.push(match what {
                        0..=3 => AssignmentEvent::Finished(worker),
                        4 | 5 => AssignmentEvent::Refused(worker),
                        _ => AssignmentEvent::Lost(worker),
                    });
                } else {
                    queue.push(AssignmentEvent::Tick);
                }
            }
            prop_assert!(given_up || recorded.iter().all(|count| *count == 1), "{recorded:?}");
        }
    }
}
