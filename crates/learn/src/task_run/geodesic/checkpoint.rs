//! State of a training in progress, from which another worker makes the same steps.

use engram_geodesic::{Error, LossPoint, Trainer};

/// Bytes of an encoded point of the loss curve.
const POINT: usize = 24;

/// Encodes the models of a task: per model the number of points of its loss curve, the points, and the state of the trainer with its length.
pub(super) fn save(models: &[(Trainer, Vec<LossPoint>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (trainer, losses) in models {
        out.extend((losses.len() as u64).to_le_bytes());
        for point in losses {
            out.extend(point.step.to_le_bytes());
            out.extend(point.training.to_bits().to_le_bytes());
            out.extend(point.validation.to_bits().to_le_bytes());
        }
        let state = trainer.save();
        out.extend((state.len() as u64).to_le_bytes());
        out.extend(state);
    }
    out
}

/// Continues `models`, which have made no step, from [`save`].
///
/// # Errors
/// The bytes are damaged, or belong to another training.
pub(super) fn resume(
    models: &[(Trainer, Vec<LossPoint>)],
    mut bytes: &[u8],
) -> Result<Vec<(Trainer, Vec<LossPoint>)>, Error> {
    let damaged = |problem: &str| Error::Encoding { object: "checkpoint of a training", problem: problem.into() };
    let mut part = |size: usize| {
        let (count, rest) = bytes.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_le_bytes(*count)).ok()?.checked_mul(size)?;
        let (part, rest) = rest.split_at_checked(length)?;
        bytes = rest;
        Some(part)
    };
    let mut resumed = Vec::new();
    for (trainer, _) in models {
        let (points, state) =
            part(POINT).and_then(|points| Some((points, part(1)?))).ok_or_else(|| damaged("it is too short"))?;
        resumed.push((trainer.clone().resume(state)?, points.chunks_exact(POINT).map(point).collect()));
    }
    if bytes.is_empty() { Ok(resumed) } else { Err(damaged("it is too long")) }
}

fn point(bytes: &[u8]) -> LossPoint {
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    LossPoint { step: word(0), training: f64::from_bits(word(8)), validation: f64::from_bits(word(16)) }
}
