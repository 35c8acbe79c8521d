//! Models and updates as flat vectors with named layers; the check of an update before it is aggregated.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::error::{InvalidInput, require};

/// A client's number, given at enrolment.
pub type ClientId = u64;

/// One layer of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Name, unique in the model.
    pub name: String,
    /// Number of parameters, at least 1.
    pub parameters: usize,
    /// Stays on the client and is never uploaded (personalised layer).
    pub local: bool,
}

/// The layers of a model in order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    layers: Vec<Layer>,
}

impl Layout {
    /// Creates a layout.
    ///
    /// # Errors
    /// When no layer is shared, a name repeats, or a layer has no parameters.
    pub fn new(layers: Vec<Layer>) -> Result<Self, InvalidInput> {
        let mut names = BTreeSet::new();
        for layer in &layers {
            require(layer.parameters > 0, "layers.parameters", layer.parameters, "at least 1")?;
            require(names.insert(&layer.name), "layers.name", &layer.name, "each name once")?;
        }
        let shared = layers.iter().filter(|layer| !layer.local).count();
        require(shared > 0, "layers.local", "all layers", "at least one shared layer")?;
        Ok(Self { layers })
    }

    /// Number of parameters on a client.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(|layer| layer.parameters).sum()
    }

    /// Number of parameters that are uploaded and aggregated.
    #[must_use]
    pub fn shared_parameters(&self) -> usize {
        self.layers.iter().filter(|layer| !layer.local).map(|layer| layer.parameters).sum()
    }

    /// Returns the shared layers of a client's model: what may leave the client.
    ///
    /// # Errors
    /// When the model has another number of parameters.
    pub fn shared(&self, model: &[f32]) -> Result<Vec<f32>, InvalidInput> {
        check_len("model", model.len(), self.parameters())?;
        let mut rest = model;
        let mut shared = Vec::with_capacity(self.shared_parameters());
        for layer in &self.layers {
            let (own, after) = rest.split_at(layer.parameters);
            if !layer.local {
                shared.extend_from_slice(own);
            }
            rest = after;
        }
        Ok(shared)
    }

    /// Replaces the shared layers of a client's model; its local layers stay.
    ///
    /// # Errors
    /// When a vector has another number of parameters.
    pub fn merge(&self, model: &mut [f32], shared: &[f32]) -> Result<(), InvalidInput> {
        check_len("model", model.len(), self.parameters())?;
        check_len("shared", shared.len(), self.shared_parameters())?;
        let (mut rest, mut source) = (model, shared);
        for layer in &self.layers {
            let (own, after) = rest.split_at_mut(layer.parameters);
            if !layer.local {
                let (values, remaining) = source.split_at(layer.parameters);
                own.copy_from_slice(values);
                source = remaining;
            }
            rest = after;
        }
        Ok(())
    }
}

/// What a client uploads after local training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// The client.
    pub client: ClientId,
    /// Model version that it trained from.
    pub version: u64,
    /// Samples it trained on, at least 1.
    pub samples: u64,
    /// Its shared parameters minus those of `version`.
    pub delta: Vec<f32>,
    /// Change of its control variate; SCAFFOLD only.
    pub control: Option<Vec<f32>>,
}

impl Update {
    /// Checks an update against a model of `parameters` shared parameters at version `current`.
    ///
    /// # Errors
    /// When a vector has another length or a value that is not finite, when no samples are claimed, or when the version is in the future.
    pub fn check(&self, parameters: usize, current: u64, control: bool) -> Result<(), InvalidInput> {
        check_vector("delta", &self.delta, parameters)?;
        require(self.samples > 0, "samples", self.samples, "at least 1")?;
        if self.version > current {
            return Err(InvalidInput::new("version", self.version, format!("at most {current}")));
        }
        match (&self.control, control) {
            (Some(values), true) => check_vector("control", values, parameters),
            (None, true) => Err(InvalidInput::new("control", "none", "one value per parameter, for SCAFFOLD")),
            (Some(_), false) => {
                Err(InvalidInput::new("control", "a vector", "none: the strategy has no control variates"))
            }
            (None, false) => Ok(()),
        }
    }
}

fn check_len(field: &'static str, len: usize, parameters: usize) -> Result<(), InvalidInput> {
    if len == parameters {
        return Ok(());
    }
    Err(InvalidInput::new(field, format!("{len} values"), format!("{parameters} values")))
}

/// Checks the length of a vector and that all its values are finite.
pub(crate) fn check_vector(field: &'static str, values: &[f32], parameters: usize) -> Result<(), InvalidInput> {
    check_len(field, values.len(), parameters)?;
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => Err(InvalidInput::new(field, format!("{} at {at}", values[at]), "finite numbers")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        let layer = |name: &str, parameters, local| Layer { name: name.into(), parameters, local };
        Layout::new(vec![layer("body", 2, false), layer("norm", 1, true), layer("head", 1, false)]).unwrap()
    }

    #[test]
    fn personalised_layers_stay_on_the_client() {
        let layout = layout();
        assert_eq!(layout.shared(&[1.0, 2.0, 3.0, 4.0]).unwrap(), [1.0, 2.0, 4.0]);
        let mut model = [1.0, 2.0, 3.0, 4.0];
        layout.merge(&mut model, &[5.0, 6.0, 7.0]).unwrap();
        assert_eq!(model, [5.0, 6.0, 3.0, 7.0]);
        assert!(layout.merge(&mut model, &[5.0]).is_err());
        assert!(layout.merge(&mut [0.0; 5], &[5.0, 6.0, 7.0]).is_err());
        assert!(layout.shared(&[0.0; 5]).is_err(), "a value that belongs to no layer");
    }

    #[test]
    fn layouts_without_parameters_to_share_are_refused() {
        let layer = |name: &str, parameters, local| Layer { name: name.into(), parameters, local };
        let field = |layers| Layout::new(layers).unwrap_err().field;
        assert_eq!(field(vec![]), "layers.local");
        assert_eq!(field(vec![layer("a", 1, true)]), "layers.local");
        assert_eq!(field(vec![layer("a", 0, false)]), "layers.parameters");
        assert_eq!(field(vec![layer("a", 1, false), layer("a", 2, false)]), "layers.name");
    }

    #[test]
    fn malformed_updates_are_refused_with_the_field() {
        let update = Update { client: 1, version: 3, samples: 5, delta: vec![0.0; 3], control: None };
        assert_eq!(update.check(3, 3, false), Ok(()));
        let refused = |update: Update| update.check(3, 3, false).unwrap_err().to_string();
        assert!(refused(Update { delta: vec![0.0; 2], ..update.clone() }).starts_with("delta: 2 values"));
        let nan = refused(Update { delta: vec![0.0, f32::NAN, 0.0], ..update.clone() });
        assert_eq!(nan, "delta: NaN at 1 is not allowed; allowed: finite numbers");
        assert!(refused(Update { delta: vec![f32::INFINITY; 3], ..update.clone() }).starts_with("delta: inf at 0"));
        assert!(refused(Update { samples: 0, ..update.clone() }).starts_with("samples: 0"));
        assert!(refused(Update { version: 4, ..update.clone() }).starts_with("version: 4"));
        assert!(refused(Update { control: Some(vec![0.0; 3]), ..update.clone() }).starts_with("control"));
        assert!(update.check(3, 3, true).is_err());
        let control = |values: &[f32]| Update { control: Some(values.to_vec()), ..update.clone() }.check(3, 3, true);
        assert_eq!(control(&[0.0; 3]), Ok(()));
        assert!(control(&[0.0; 2]).is_err() && control(&[0.0, 0.0, f32::NAN]).is_err());
    }
}
