//! Search of the settings of a memory that predict a history best.
//!
//! Candidates of (decay, learning rate, initial weight) learn the first part of a history in process and are compared by the hit rate of
//! their rankings; the best one is then judged on the rest, next to the baselines. Everything is deterministic: the same history and the
//! same settings give the same result on any number of threads.
//!
//! ```text
//! source -> History -> grid -> successive halving on growing ends of the first part -> refinement -> judgement on the rest
//! ```

mod history;
mod search;
mod simulate;

pub use history::{History, MAX_EVENTS};
pub use search::{Judgement, TuneError, TuneOptions, Tuning, tune};
pub use simulate::Candidate;

#[cfg(test)]
mod tests;
