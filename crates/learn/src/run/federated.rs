//! Persistent progress of a Federated run: the current model, and the course of its rounds.

use super::history;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most clients whose participation is shown.
const MAX_CLIENTS: usize = 100;

/// Progress of a Federated run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FederatedState {
    /// Version of the model.
    pub version: u64,
    /// SHA-256 of the model as 32-bit floats, in hexadecimal digits.
    pub model: String,
    /// Signature of run, version and `model` by `model_key`, in hexadecimal digits.
    pub signature: String,
    /// Ed25519 key by which its models are signed, in hexadecimal digits.
    pub model_key: String,
    /// Rounds that ended without enough updates.
    pub aborted: u64,
    /// Course of the rounds, ascending by version.
    pub history: Vec<FederatedRow>,
    /// What clients contributed, by name: the first 100.
    pub clients: BTreeMap<String, ClientRow>,
    /// Whether further clients contributed.
    pub has_further_clients: bool,
}

/// A round that made a version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FederatedRow {
    /// The version.
    pub version: u64,
    /// Updates in it.
    pub updates: u32,
    /// Clients without an update: they were late, or disappeared.
    pub missing: u32,
    /// Loss of the model before it, as the clients measured it, weighted by samples.
    pub loss: Option<f64>,
    /// Privacy spent so far.
    pub epsilon: Option<f64>,
    /// Seconds since the version before.
    pub seconds: f64,
}

/// What a client contributed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientRow {
    /// Updates that were aggregated.
    pub updates: u64,
    /// Samples of the last one.
    pub samples: u64,
    /// Loss that it measured last.
    pub loss: Option<f64>,
}

impl FederatedState {
    /// Adds a row to the history.
    pub fn note(&mut self, row: FederatedRow) {
        history::append(&mut self.history, row, |other, row| other.version < row.version);
    }

    /// Counts an update of a client, as far as there is room for its name.
    pub fn count(&mut self, client: &str, samples: u64, loss: Option<f64>) {
        if self.clients.len() >= MAX_CLIENTS && !self.clients.contains_key(client) {
            self.has_further_clients = true;
            return;
        }
        let row = self.clients.entry(client.to_owned()).or_default();
        (row.updates, row.samples) = (row.updates + 1, samples);
        row.loss = loss.or(row.loss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_history_is_thinned_and_clients_are_counted_up_to_a_bound() {
        let mut state = FederatedState::default();
        (1..=1_000).for_each(|version| state.note(FederatedRow { version, ..FederatedRow::default() }));
        assert!(state.history.len() <= history::MAX_ROWS && state.history.last().unwrap().version == 1_000);
        (0..MAX_CLIENTS).for_each(|client| state.count(&format!("c{client}"), 3, None));
        assert!(!state.has_further_clients);
        (0..200).for_each(|client| state.count(&format!("c{client}"), 3, None));
        assert!(state.has_further_clients);
        state.count("c0", 5, Some(0.5));
        assert_eq!(state.clients.len(), MAX_CLIENTS);
        assert_eq!(state.clients["c0"], ClientRow { updates: 3, samples: 5, loss: Some(0.5) });
    }
}
