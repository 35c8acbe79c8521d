//! The rule without a forecast, and the window that delays scaling down.

use crate::settings::Settings;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Returns the number of workers that serve `load` with at most `per_worker` each.
pub(crate) fn workers_for(load: f64, per_worker: f64) -> u32 {
    // A relative rounding error of the quotient must not cost a worker.
    let workers = (load.max(0.0) / per_worker - 1e-9).ceil();
    // Saturates for an overflow.
    workers as u32
}

/// Returns the workers that the reactive rule wants: `load` at the target, or `workers` while the load is within the tolerance.
pub fn desired(settings: &Settings, load: f64, workers: u32) -> u32 {
    let ratio = load / (settings.target_load() * f64::from(workers.max(1)));
    if workers > 0 && (ratio - 1.0).abs() <= settings.tolerance {
        return workers;
    }
    workers_for(load, settings.target_load())
}

/// Returns the fewest workers with which the reactive rule does not scale up.
pub fn least_accepted(settings: &Settings, load: f64) -> u32 {
    workers_for(load, settings.target_load() * (1.0 + settings.tolerance))
}

/// Highest proposal of a window of time.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StabilizationWindow {
    /// Times and proposals, both increasing in age and in size: a smaller proposal before a larger one never counts.
    proposals: VecDeque<(f64, u32)>,
}

impl StabilizationWindow {
    /// Returns whether there was no proposal yet.
    pub fn is_empty(&self) -> bool {
        self.proposals.is_empty()
    }

    /// Adds a proposal at `time` and returns the highest of the last `seconds`. Times don't decrease.
    pub fn highest(&mut self, proposal: u32, time: f64, seconds: f64) -> u32 {
        while self.proposals.back().is_some_and(|(_, last)| *last <= proposal) {
            self.proposals.pop_back();
        }
        self.proposals.push_back((time, proposal));
        while self.proposals.front().is_some_and(|(oldest, _)| time - oldest > seconds) {
            self.proposals.pop_front();
        }
        self.proposals.front().map_or(proposal, |(_, highest)| *highest)
    }
}

/// An autoscaler by the reactive rule alone, as the Kubernetes HorizontalPodAutoscaler applies it by default: up at once, down to the
/// highest proposal of the window, without a limit per step, unchanged without a metric.
#[derive(Debug, Clone, Default)]
pub struct ReactiveAutoscaler {
    window: StabilizationWindow,
}

impl ReactiveAutoscaler {
    /// Returns the desired number of workers at `time` in seconds.
    pub fn decide(&mut self, settings: &Settings, load: Option<f64>, workers: u32, time: f64) -> u32 {
        let proposal = load.map_or(workers, |load| desired(settings, load, workers));
        let proposal = proposal.clamp(settings.min_workers, settings.max_workers);
        self.window.highest(proposal, time, f64::from(settings.stabilization_seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reactive_rule_holds_within_the_tolerance() {
        let settings = Settings { target_utilization: 0.5, ..Settings::new(100.0) };
        let cases = [(500.0, 10, 10), (549.0, 10, 10), (551.0, 10, 12), (450.0, 10, 10), (449.0, 10, 9), (0.0, 3, 0)];
        for (load, workers, expected) in cases {
            assert_eq!(desired(&settings, load, workers), expected, "load {load}, {workers} workers");
        }
        assert_eq!([500.0, 550.0, 551.0].map(|load| least_accepted(&settings, load)), [10, 10, 11]);
        assert_eq!(workers_for(f64::MAX, 1.0), u32::MAX);
    }

    #[test]
    fn window_returns_the_highest_proposal_and_forgets_it_in_time() {
        let mut window = StabilizationWindow::default();
        let at = [(0.0, 5), (60.0, 9), (120.0, 3), (180.0, 4), (361.0, 2), (500.0, 1)];
        let highest: Vec<u32> = at.map(|(time, proposal)| window.highest(proposal, time, 300.0)).to_vec();
        assert_eq!(highest, [5, 9, 9, 9, 4, 2]);
    }
}
