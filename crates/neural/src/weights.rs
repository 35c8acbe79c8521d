//! Weights as safetensors bytes. No file I/O.

use std::collections::HashMap;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::error::WeightsError;
use crate::model::Model;

/// Metadata key of the model's specification as JSON. One key alone: the format keeps no order among several.
const SPEC_KEY: &str = "engram.model";

/// Which tensors a file must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coverage {
    /// Exactly those of the model.
    Exact,
    /// Any: tensors with a name and shape of the model are loaded, others are left. For warm starts.
    Matching,
}

impl Model {
    /// All parameters as a safetensors file in f32, with the specification in the metadata. Equal models give equal
    /// bytes.
    ///
    /// # Errors
    /// The serializer refused the tensors.
    pub fn to_safetensors(&self) -> Result<Vec<u8>, WeightsError> {
        let bytes: Vec<u8> = self.parameters.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut tensors = Vec::with_capacity(self.views().len());
        for view in self.views() {
            let data = &bytes[4 * view.range.start..4 * view.range.end];
            tensors.push((view.name.as_str(), TensorView::new(Dtype::F32, view.shape.clone(), data)?));
        }
        let spec = serde_json::to_string(&self.spec).expect("a specification has only string keys");
        let metadata = HashMap::from([(SPEC_KEY.to_owned(), spec)]);
        Ok(safetensors::serialize(tensors, Some(metadata))?)
    }

    /// Loads parameters from a safetensors file. Changes nothing on error. Returns the number of tensors loaded.
    ///
    /// # Errors
    /// Not a safetensors file, a value is not finite, or, with [`Coverage::Exact`], tensors are missing, unknown, or of
    /// another shape or type.
    pub fn load_safetensors(&mut self, bytes: &[u8], coverage: Coverage) -> Result<usize, WeightsError> {
        let file = SafeTensors::deserialize(bytes)?;
        let exact = coverage == Coverage::Exact;
        if exact {
            let mut names = file.names();
            names.sort_unstable();
            if let Some(name) = names.iter().find(|name| !self.views().iter().any(|v| v.name == **name)) {
                return Err(WeightsError::Unknown { name: (*name).to_string() });
            }
        }
        let mut parameters = self.parameters.clone();
        let mut loaded = 0;
        for view in self.views() {
            let Ok(tensor) = file.tensor(&view.name) else {
                if exact {
                    return Err(WeightsError::Missing { name: view.name.clone(), expected: view.shape.clone() });
                }
                continue;
            };
            if tensor.dtype() != Dtype::F32 || tensor.shape() != view.shape {
                if exact {
                    return Err(WeightsError::Shape {
                        name: view.name.clone(),
                        dtype: format!("{:?}", tensor.dtype()),
                        actual: tensor.shape().to_vec(),
                        expected: view.shape.clone(),
                    });
                }
                continue;
            }
            let values = &mut parameters[view.range.clone()];
            for (index, (value, bytes)) in values.iter_mut().zip(tensor.data().as_chunks().0).enumerate() {
                *value = f32::from_le_bytes(*bytes);
                if !value.is_finite() {
                    return Err(WeightsError::NotFinite { name: view.name.clone(), index });
                }
            }
            loaded += 1;
        }
        self.parameters = parameters;
        Ok(loaded)
    }
}
