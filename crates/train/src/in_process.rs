//! Reduction between threads of one process, for tests and for several devices of one worker.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use engram_neural::{GradientSum, Moments};
use thiserror::Error;

use crate::reduce::{LocalGradient, Reduce, SumError, sum_gradients, sum_moments};

/// Why an in-process reduction failed.
#[derive(Debug, Clone, Copy, PartialEq, Error)]
pub enum InProcessError {
    /// Not all members took part within the deadline.
    #[error("rank {rank}: reduction timed out, {arrived} of {members} members arrived")]
    Timeout {
        /// The waiting member.
        rank: usize,
        /// Members that arrived, this one included.
        arrived: usize,
        /// Members of the group.
        members: usize,
    },
    /// A member sent moments where another sent a gradient.
    #[error("members call different reductions")]
    Mismatch,
    /// The sums of the members do not fit together.
    #[error("failed to add sums")]
    Sum(#[from] SumError),
}

#[derive(Debug)]
enum Part {
    Moments(Vec<Moments>),
    Gradient(LocalGradient),
}

#[derive(Debug, Clone)]
enum Total {
    Moments(Moments),
    Gradient(Arc<GradientSum>),
}

#[derive(Debug, Default)]
struct Round {
    number: u64,
    parts: Vec<Option<Part>>,
    result: Option<Result<Total, InProcessError>>,
}

#[derive(Debug)]
struct Shared {
    round: Mutex<Round>,
    finished: Condvar,
    deadline: Duration,
}

/// One member of an in-process group.
#[derive(Debug)]
pub struct InProcess {
    shared: Arc<Shared>,
    rank: usize,
    members: usize,
}

impl InProcess {
    /// The members of a group, by rank. A reduction fails if it takes longer than `deadline`.
    pub fn group(members: usize, deadline: Duration) -> Vec<Self> {
        let round = Round { parts: (0..members).map(|_| None).collect(), ..Round::default() };
        let shared = Arc::new(Shared { round: Mutex::new(round), finished: Condvar::new(), deadline });
        (0..members).map(|rank| Self { shared: Arc::clone(&shared), rank, members }).collect()
    }

    fn exchange(&self, part: Part) -> Result<Total, InProcessError> {
        const HELD: &str = "no member panics while it holds the lock";
        let mut round = self.shared.round.lock().expect(HELD);
        round.parts[self.rank] = Some(part);
        let arrived = round.parts.iter().flatten().count();
        if arrived == self.members {
            let parts = std::mem::take(&mut round.parts);
            round.parts.resize_with(self.members, || None);
            let result = total(parts.into_iter().flatten().collect());
            round.result = Some(result.clone());
            round.number += 1;
            self.shared.finished.notify_all();
            return result;
        }
        let number = round.number;
        let (mut round, wait) =
            self.shared.finished.wait_timeout_while(round, self.shared.deadline, |r| r.number == number).expect(HELD);
        if wait.timed_out() {
            // The part is withdrawn: the member may reduce it again in another group.
            round.parts[self.rank] = None;
            return Err(InProcessError::Timeout { rank: self.rank, arrived, members: self.members });
        }
        // No member can start another round to its end before this one has returned, so the result is that of `number`.
        round.result.clone().expect("a finished round has a result")
    }
}

/// Adds the parts, which are in rank order.
fn total(parts: Vec<Part>) -> Result<Total, InProcessError> {
    let (mut moments, mut gradients) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            Part::Moments(m) => moments.push(m),
            Part::Gradient(g) => gradients.push(g),
        }
    }
    match (moments.is_empty(), gradients.is_empty()) {
        (false, true) => Ok(Total::Moments(sum_moments(moments.iter().map(Vec::as_slice)))),
        (true, false) => Ok(Total::Gradient(Arc::new(sum_gradients(&gradients.iter().collect::<Vec<_>>())?))),
        _ => Err(InProcessError::Mismatch),
    }
}

impl Reduce for InProcess {
    type Error = InProcessError;

    fn moments(&mut self, local: &[Moments]) -> Result<Moments, InProcessError> {
        match self.exchange(Part::Moments(local.to_vec()))? {
            Total::Moments(m) => Ok(m),
            Total::Gradient(_) => Err(InProcessError::Mismatch),
        }
    }

    fn gradient(&mut self, local: &LocalGradient) -> Result<GradientSum, InProcessError> {
        match self.exchange(Part::Gradient(local.clone()))? {
            Total::Gradient(g) => Ok(GradientSum::clone(&g)),
            Total::Moments(_) => Err(InProcessError::Mismatch),
        }
    }
}
