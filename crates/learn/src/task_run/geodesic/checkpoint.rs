//! State of a training in progress, from which another worker makes the same steps.

use engram_geodesic::{Error, LossPoint, Trainer};

/// Bytes of an encoded point of the loss curve.
const POINT: usize = 24;

/// Encodes a training: the number of points of its loss curve, the points, and the state of the trainer.
pub(super) fn save(trainer: &Trainer, losses: &[LossPoint]) -> Vec<u8> {
    let mut out = (losses.len() as u64).to_le_bytes().to_vec();
    for point in losses {
        out.extend(point.step.to_le_bytes());
        out.extend(point.training.to_bits().to_le_bytes());
        out.extend(point.validation.to_bits().to_le_bytes());
    }
    out.extend(trainer.save());
    out
}

/// Continues `trainer`, which has made no step, from [`save`].
///
/// # Errors
/// The bytes are damaged, or belong to another training.
pub(super) fn resume(trainer: Trainer, bytes: &[u8]) -> Result<(Trainer, Vec<LossPoint>), Error> {
    let damaged = || Error::Encoding { object: "checkpoint of a training", problem: "it is too short".into() };
    let (count, rest) = bytes.split_first_chunk::<8>().ok_or_else(damaged)?;
    let length = usize::try_from(u64::from_le_bytes(*count)).ok().and_then(|count| count.checked_mul(POINT));
    let (points, state) = length.and_then(|length| rest.split_at_checked(length)).ok_or_else(damaged)?;
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let point = |bytes: &[u8]| LossPoint {
        step: word(bytes, 0),
        training: f64::from_bits(word(bytes, 8)),
        validation: f64::from_bits(word(bytes, 16)),
    };
    Ok((trainer.resume(state)?, points.chunks_exact(POINT).map(point).collect()))
}
