//! Storage of activations and their gradients in 16 bits. Parameters, their gradients and optimizer state stay f32.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// Type of stored activations and of the gradients that flow between layers during training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Precision {
    /// 32 bits.
    #[default]
    F32,
    /// 16 bits with the range of f32 and 8 bits of precision. Needs no loss scaling.
    Bf16,
    /// 16 bits with 11 bits of precision and values up to 65,504. Needs loss scaling.
    F16,
}

/// Values rounded at a time, on the stack.
const CHUNK: usize = 512;

impl Precision {
    /// Rounds values to those that the type can hold. Values beyond its range become infinite.
    pub(crate) fn round(self, values: &mut [f32]) {
        if self == Self::F32 {
            return;
        }
        let mut bits = [0u16; CHUNK];
        for chunk in values.chunks_mut(CHUNK) {
            let bits = &mut bits[..chunk.len()];
            self.encode(chunk, bits);
            self.decode(bits, chunk);
        }
    }

    /// Converts to 16 bits.
    pub(crate) fn encode(self, values: &[f32], bits: &mut [u16]) {
        match self {
            Self::F16 => bits.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values),
            Self::Bf16 | Self::F32 => bits.reinterpret_cast_mut::<bf16>().convert_from_f32_slice(values),
        }
    }

    /// Converts from 16 bits.
    pub(crate) fn decode(self, bits: &[u16], values: &mut [f32]) {
        match self {
            Self::F16 => bits.reinterpret_cast::<f16>().convert_to_f32_slice(values),
            Self::Bf16 | Self::F32 => bits.reinterpret_cast::<bf16>().convert_to_f32_slice(values),
        }
    }
}
