//! Time of the decisions: monotonic, also across a restart, and independent of jumps of the wall clock.

use serde::{Deserialize, Serialize};

/// Accumulated time in seconds. Advances by the monotonic clock of the process; after a restart by the wall clock.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Clock {
    /// Time that selects the slot of the period.
    phase: f64,
    /// Time of delays: as `phase`, but the time between two processes counts as one interval at most.
    delays: f64,
    last_wall: Option<f64>,
    /// Meaningless in another process.
    #[serde(skip)]
    last_monotonic: Option<f64>,
}

/// Times of one observation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Times {
    /// Seconds for slots.
    pub(crate) phase: f64,
    /// Seconds for delays.
    pub(crate) delays: f64,
    /// Seconds by which the wall clock jumped; positive is forward.
    pub(crate) jump: f64,
}

impl Clock {
    /// Advances to an observation at `wall` and `monotonic`, in seconds. `interval` is the usual time between observations.
    pub(crate) fn advance(&mut self, wall: f64, monotonic: f64, interval: f64) -> Times {
        let wall_delta = self.last_wall.map_or(0.0, |last| wall - last);
        let (delta, delay, jump) = match self.last_monotonic {
            Some(last) => {
                let delta = (monotonic - last).max(0.0);
                (delta, delta, wall_delta - delta)
            }
            None => (wall_delta.max(0.0), wall_delta.clamp(0.0, interval), 0.0),
        };
        self.phase += delta;
        self.delays += delay;
        self.last_wall = Some(wall);
        self.last_monotonic = Some(monotonic);
        Times { phase: self.phase, delays: self.delays, jump }
    }

    /// Forgets the monotonic clock: the next observation is one of another process.
    pub(crate) fn restart(&mut self) {
        self.last_monotonic = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jumps_of_the_wall_clock_move_neither_slots_nor_delays() {
        let mut clock = Clock::default();
        clock.advance(1_000.0, 5.0, 60.0);
        let forward = clock.advance(1_060.0 + 3_600.0, 65.0, 60.0);
        assert_eq!(forward, Times { phase: 60.0, delays: 60.0, jump: 3_600.0 });
        let backward = clock.advance(1_120.0, 125.0, 60.0);
        assert_eq!(backward, Times { phase: 120.0, delays: 120.0, jump: -3_600.0 });
        assert_eq!(clock.advance(1_120.0, 100.0, 60.0).phase, 120.0, "time never goes back");
    }

    #[test]
    fn after_a_restart_slots_follow_the_wall_clock_and_delays_start_over() {
        let mut clock = Clock::default();
        clock.advance(1_000.0, 900.0, 60.0);
        let mut restored: Clock = serde_json::from_str(&serde_json::to_string(&clock).unwrap()).unwrap();
        assert_eq!(restored.advance(8_200.0, 3.0, 60.0), Times { phase: 7_200.0, delays: 60.0, jump: 0.0 });
    }
}
