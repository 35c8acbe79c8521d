//! The runner of every campaign: draws from one seed, faults one after another, and one outcome.
//!
//! It injects nothing and waits for nothing: the campaign asks for the next fault, injects it, and notes what came of it. So it serves
//! campaigns on threads and in tasks alike.

use crate::outcome::{FaultReport, Outcome};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use std::time::{Duration, Instant};

/// Runs the faults of a campaign in the order of its seed.
pub struct SeedRunner {
    draws: StdRng,
    planned: usize,
    begun: usize,
    /// Time limit for all faults together, and when it ends.
    limit: Option<(Duration, Instant)>,
    /// Failures in a row after which there is no use in going on.
    tolerated: u32,
    in_a_row: u32,
    outcome: Outcome,
}

impl SeedRunner {
    /// Creates a runner of this many faults. The first failure ends it, unless more are [tolerated](Self::tolerating).
    pub fn new(seed: u64, planned: usize) -> Self {
        Self {
            draws: StdRng::seed_from_u64(seed),
            planned,
            begun: 0,
            limit: None,
            tolerated: 1,
            in_a_row: 0,
            outcome: Outcome { seed, ..Outcome::default() },
        }
    }

    /// Limits the time of all faults together, from now.
    #[must_use]
    pub fn within(self, limit: Duration) -> Self {
        Self { limit: Some((limit, Instant::now() + limit)), ..self }
    }

    /// Ends the campaign only after this many failures in a row, at least 1.
    #[must_use]
    pub fn tolerating(self, failures: u32) -> Self {
        Self { tolerated: failures, ..self }
    }

    /// Reports the faults by kind in this order; kinds that it does not name come last, by name.
    #[must_use]
    pub fn in_order(self, kinds: &'static [&'static str]) -> Self {
        Self { outcome: Outcome { order: kinds, ..self.outcome }, ..self }
    }

    /// Returns the random numbers of the seed: all choices of a campaign come from here.
    pub const fn draws(&mut self) -> &mut StdRng {
        &mut self.draws
    }

    /// Begins the next fault and returns its number, from 1; `None` when all are done, or there is no use or time for another.
    pub fn next_fault(&mut self) -> Option<usize> {
        if self.begun == self.planned || self.in_a_row >= self.tolerated {
            return None;
        }
        if let Some((limit, _)) = self.limit.filter(|(_, end)| Instant::now() >= *end) {
            let (done, planned) = (self.begun, self.planned);
            let problem = format!("{done} of {planned} faults were done within {} s", limit.as_secs());
            self.outcome.problems.push(problem);
            return None;
        }
        self.begun += 1;
        Some(self.begun)
    }

    /// Notes what came of the fault, and returns it with its number.
    pub fn note(&mut self, result: Result<FaultReport, String>) -> Option<&FaultReport> {
        match result {
            Ok(fault) => {
                self.in_a_row = 0;
                self.outcome.faults.push(FaultReport { number: self.begun, of: self.planned, ..fault });
                self.outcome.faults.last()
            }
            Err(problem) => {
                self.in_a_row += 1;
                self.outcome.problems.push(problem);
                if self.in_a_row == self.tolerated && self.tolerated > 1 {
                    self.outcome.problems.push(format!("given up after {} faults", self.begun));
                }
                None
            }
        }
    }

    /// Returns what has come of the campaign, to add to it what concerns all faults.
    pub const fn outcome(&mut self) -> &mut Outcome {
        &mut self.outcome
    }

    /// Ends the campaign.
    pub fn finish(self) -> Outcome {
        self.outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::RngExt as _;

    fn fault(kind: &'static str) -> FaultReport {
        FaultReport { kind, ..FaultReport::default() }
    }

    #[test]
    fn a_seed_draws_the_same_again_and_faults_are_numbered_and_grouped() {
        let run = |seed| {
            let mut runner = SeedRunner::new(seed, 3).in_order(&["pause", "kill"]);
            let mut drawn = Vec::new();
            while let Some(number) = runner.next_fault() {
                drawn.push(runner.draws().random::<u64>());
                let kind = if number == 2 { "cut" } else { ["kill", "pause"][number % 2] };
                assert_eq!(runner.note(Ok(fault(kind))).map(|fault| (fault.number, fault.of)), Some((number, 3)));
            }
            (drawn, runner.finish())
        };
        let (first, outcome) = run(7);
        assert_eq!(first, run(7).0);
        assert_ne!(first, run(8).0);
        let kinds: Vec<_> = outcome.by_kind().iter().map(|kind| (kind.kind, kind.done)).collect();
        assert_eq!(kinds, [("pause", 2), ("cut", 1)]);
        assert_eq!(outcome.violations(), [""; 0]);
    }

    #[test]
    fn a_campaign_ends_after_as_many_failures_in_a_row_as_are_tolerated_and_at_its_limit() {
        let run = |mut runner: SeedRunner, failing: fn(usize) -> bool| {
            while let Some(number) = runner.next_fault() {
                runner.note(if failing(number) { Err(format!("fault {number}")) } else { Ok(fault("kill")) });
            }
            let outcome = runner.finish();
            (outcome.faults.len(), outcome.problems)
        };
        assert_eq!(run(SeedRunner::new(1, 9), |it| it == 3), (2, vec!["fault 3".to_owned()]));
        let (done, problems) = run(SeedRunner::new(1, 9).tolerating(2), |it| it == 2 || it > 4);
        assert_eq!((done, &*problems[1..].join(", ")), (3, "fault 5, fault 6, given up after 6 faults"));
        let (done, problems) = run(SeedRunner::new(1, 9).within(Duration::ZERO), |_| false);
        assert_eq!((done, &*problems[0]), (0, "0 of 9 faults were done within 0 s"));
    }
}
