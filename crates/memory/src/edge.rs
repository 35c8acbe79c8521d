//! Conversion of floats from clients. Out-of-range values are rejected, never clamped.

use crate::law::{ONE, Weight};

/// A number out of range. The caller adds the field and the index.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{value} is not allowed here; allowed: {allowed}")]
pub struct OutOfRange {
    /// The number.
    pub value: f64,
    /// Description of the allowed numbers.
    pub allowed: &'static str,
}

const SCALE: f64 = ONE as f64;

/// Converts a quality in [0, 1] to units. The product is exact in f64; the fraction is truncated.
///
/// # Errors
/// NaN, infinite, below 0 or above 1.
pub fn quality(value: f32) -> Result<u32, OutOfRange> {
    let wide = f64::from(value);
    if (0.0..=1.0).contains(&wide) {
        Ok((wide * SCALE) as u32)
    } else {
        Err(OutOfRange { value: wide, allowed: "a number from 0 to 1" })
    }
}

/// Converts a weight in [0, 1] like [`quality`].
///
/// # Errors
/// NaN, infinite, below 0 or above 1.
pub fn weight(value: f32) -> Result<Weight, OutOfRange> {
    quality(value).map(|units| Weight::from_units(units).expect("a quality is at most ONE"))
}

/// Converts a signed delta in [-1, 1] to units, truncating toward zero.
///
/// # Errors
/// NaN, infinite, or an absolute value above 1.
pub fn delta(value: f32) -> Result<i32, OutOfRange> {
    match quality(value.abs()) {
        Ok(units) if value < 0.0 => Ok(-(units as i32)),
        Ok(units) => Ok(units as i32),
        Err(_) => Err(OutOfRange { value: f64::from(value), allowed: "a number from -1 to 1" }),
    }
}

/// Converts a setting (decay, initial weight) to units, rounding to nearest, ties to even.
///
/// # Errors
/// NaN, infinite, below 0, above 1, or positive but too small for one unit.
pub fn setting(value: f64) -> Result<u32, OutOfRange> {
    let refused = OutOfRange { value, allowed: "0, or a number above 2^-31 and at most 1" };
    if !(0.0..=1.0).contains(&value) {
        return Err(refused);
    }
    let units = (value * SCALE).round_ties_even() as u32;
    if units == 0 && value > 0.0 { Err(refused) } else { Ok(units) }
}

/// Converts a learning rate: a [`setting`] that may not be 0.
///
/// # Errors
/// As [`setting`], and 0.
pub fn rate(value: f64) -> Result<u32, OutOfRange> {
    match setting(value) {
        Ok(units) if units > 0 => Ok(units),
        _ => Err(OutOfRange { value, allowed: "a number above 2^-31 and at most 1" }),
    }
}
