//! Inputs and results of tasks as bytes: a JSON value, or numbers in little-endian order.

use super::TaskError;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Encodes a value.
pub(super) fn encode<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("values of tasks have string keys and finite numbers")
}

/// Decodes a value.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, TaskError> {
    serde_json::from_slice(bytes).map_err(|error| TaskError::Failed(format!("failed to decode a task: {error}")))
}

/// Appends numbers.
pub(super) fn put_f32(bytes: &mut Vec<u8>, values: &[f32]) {
    values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
}

/// Appends numbers.
pub(super) fn put_f64(bytes: &mut Vec<u8>, values: &[f64]) {
    values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
}

/// Reads numbers.
pub(super) fn get_f32(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|it| f32::from_le_bytes([it[0], it[1], it[2], it[3]])).collect()
}

/// Reads numbers.
pub(super) fn get_f64(bytes: &[u8]) -> Vec<f64> {
    let value = |it: &[u8]| f64::from_le_bytes(it.try_into().expect("chunks of eight bytes"));
    bytes.chunks_exact(8).map(value).collect()
}
