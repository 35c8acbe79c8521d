//! Conversion of floats from clients. Out-of-range values are rejected, never clamped.

use crate::law::{ONE, Weight};
use std::fmt;

/// Shows a float in messages: the shortest text that reads back as the same value, at most 24 characters. Large and small ones have an
/// exponent; the usual text of 5e-324 has 326 characters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShortNumber(pub f64);

impl fmt::Display for ShortNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.abs() {
            plain if plain == 0.0 || (1e-5..1e16).contains(&plain) => write!(f, "{}", self.0),
            // NaN and infinity have no exponent.
            _ => write!(f, "{:e}", self.0),
        }
    }
}

/// A number out of range. The caller adds the field and the index.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{} is not allowed here; allowed: {allowed}", ShortNumber(*value))]
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_show_extreme_numbers_with_an_exponent() {
        let text = |value: f64| setting(value).expect_err("it is out of range").to_string();
        for (value, shown) in [
            (5e-324, "5e-324"),
            (-1e300, "-1e300"),
            (f64::MAX, "1.7976931348623157e308"),
            (1.5, "1.5"),
            (2.0, "2"),
            (-0.25, "-0.25"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "inf"),
        ] {
            assert!(text(value).starts_with(&format!("{shown} is not allowed")), "{}", text(value));
        }
        assert_eq!(ShortNumber(-0.0).to_string(), "-0");
    }

    proptest! {
        #[test]
        fn a_shown_number_is_short_and_reads_back_the_same(bits: u64) {
            let value = f64::from_bits(bits);
            let text = ShortNumber(value).to_string();
            prop_assert!(text.len() <= 24, "{text}");
            let read: f64 = text.parse().expect("a number");
            prop_assert!(read.to_bits() == bits || (read.is_nan() && value.is_nan()), "{text}");
        }
    }
}
