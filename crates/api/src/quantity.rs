//! Quantities with a unit: durations (`500ms`, `3s`), sizes (`64Mi`) and rates (`64Mi/s`).
//!
//! A quantity is one integer and one unit; its text form parses to the same value.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// The units of durations, in milliseconds, the largest first.
const DURATION_UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];

/// The units of sizes, in bytes, the largest first. Powers of two only: `64M` is rejected, since it is
/// easily confused with 64 MiB.
const SIZE_UNITS: [(&str, u64); 4] = [("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)];

/// The units of rates, in bytes per second, the largest first. A rate without a unit is rejected.
const RATE_UNITS: [(&str, u64); 2] = [("Gi/s", 1 << 30), ("Mi/s", 1 << 20)];

/// A span of time in whole milliseconds: `500ms`, `3s`, `10m`, `24h`, `1d`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Duration(u64);

impl Duration {
    /// Creates a duration of `milliseconds`.
    pub const fn from_millis(milliseconds: u64) -> Self {
        Self(milliseconds)
    }

    /// Returns the duration in milliseconds.
    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// Converts to the standard library's type.
    pub const fn to_std(self) -> std::time::Duration {
        std::time::Duration::from_millis(self.0)
    }
}

/// A number of bytes: `4096`, `64Mi`, `50Gi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(u64);

impl Size {
    /// Creates a size of `bytes`.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Returns the size in bytes.
    pub const fn as_bytes(self) -> u64 {
        self.0
    }
}

/// A number of MiB per second: `64Mi/s`, `1Gi/s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rate(u64);

impl Rate {
    /// Creates a rate of `mebibytes` per second.
    pub const fn from_mebibytes(mebibytes: u32) -> Self {
        Self((mebibytes as u64) << 20)
    }

    /// Returns the rate in bytes per second.
    pub const fn as_bytes(self) -> u64 {
        self.0
    }
}

/// Parses digits and a unit; `None` where either is invalid.
fn parse(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

/// Writes `value` in the largest unit that divides it.
fn print(f: &mut fmt::Formatter<'_>, value: u64, units: &[(&str, u64)]) -> fmt::Result {
    match units.iter().find(|(_, factor)| value > 0 && value.is_multiple_of(*factor)) {
        Some((unit, factor)) => write!(f, "{}{unit}", value / factor),
        None => write!(f, "{value}"),
    }
}

impl FromStr for Duration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text, &DURATION_UNITS)
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a duration; write 500ms, 3s, 10m, 24h or 1d"))
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text, &SIZE_UNITS)
            .or_else(|| text.parse().ok())
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a size; write 512Ki, 64Mi, 50Gi or 1Ti"))
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse(text, &RATE_UNITS)
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not a rate; write 16Mi/s, 64Mi/s or 1Gi/s"))
    }
}

impl fmt::Display for Duration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { f.write_str("0s") } else { print(f, self.0, &DURATION_UNITS) }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        print(f, self.0, &SIZE_UNITS)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { f.write_str("0Mi/s") } else { print(f, self.0, &RATE_UNITS) }
    }
}

/// Gives a quantity its text form in serde and a string with a named format in the schema.
macro_rules! text_form {
    ($name:ident, $format:literal, $pattern:literal, $description:literal) => {
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Cow::<'de, str>::deserialize(deserializer)?.parse().map_err(de::Error::custom)
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({ "type": "string", "format": $format, "pattern": $pattern, "description": $description })
            }
        }
    };
}

text_form!(Duration, "engram-duration", "^[0-9]+(ms|s|m|h|d)$", "A whole number and a unit: 500ms, 3s, 10m, 24h, 1d.");
text_form!(Size, "engram-size", "^[0-9]+(Ki|Mi|Gi|Ti)?$", "Bytes, or a whole number and a unit: 512Ki, 64Mi, 50Gi.");
text_form!(Rate, "engram-rate", "^[0-9]+(Mi|Gi)/s$", "A whole number and a unit: 16Mi/s, 64Mi/s, 1Gi/s.");

/// A quantity of a Kubernetes resource, as Kubernetes writes it: `2`, `500m`, `1.5`, `4Gi`, `1e3`. Passed through as written.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(transparent)]
pub struct ResourceQuantity(serde_json::Value);

/// Pattern of a quantity in text form that is not negative: that of Kubernetes without a minus sign.
pub(crate) const RESOURCE_QUANTITY_PATTERN: &str =
    "^\\+?([0-9]+(\\.[0-9]*)?|\\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$";
/// Allowed values of a quantity, for error messages.
pub(crate) const RESOURCE_QUANTITY_ALLOWED: &str = "a whole number, or text with a number and a unit of Kubernetes, such as 2, \"1.5\", 500m, 512Mi or 4Gi, not negative";

/// Returns whether `text` matches [`RESOURCE_QUANTITY_PATTERN`].
pub(crate) fn is_resource_quantity(text: &str) -> bool {
    let text = text.strip_prefix('+').unwrap_or(text);
    let number = text.bytes().take_while(|byte| byte.is_ascii_digit() || *byte == b'.').count();
    let (number, unit) = text.split_at(number);
    let has_digit = number.bytes().any(|byte| byte.is_ascii_digit());
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_exponent = |unit: &str| {
        let exponent = unit.strip_prefix(['e', 'E']);
        exponent.is_some_and(|text| digits(text.strip_prefix(['+', '-']).unwrap_or(text)))
    };
    let is_unit = matches!(
        unit,
        "" | "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" | "n" | "u" | "m" | "k" | "M" | "G" | "T" | "P" | "E"
    );
    has_digit && number.matches('.').count() <= 1 && (is_unit || is_exponent(unit))
}

impl<'de> Deserialize<'de> for ResourceQuantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let is_scalar = value.is_string() || value.is_u64();
        if is_scalar && is_resource_quantity(&text) {
            return Ok(Self(value));
        }
        Err(de::Error::custom(format!("{text} is not a quantity; allowed: {RESOURCE_QUANTITY_ALLOWED}")))
    }
}

impl JsonSchema for ResourceQuantity {
    fn schema_name() -> Cow<'static, str> {
        "ResourceQuantity".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": ["integer", "string"], "pattern": RESOURCE_QUANTITY_PATTERN, "x-quantity": true,
            "description": "A quantity as Kubernetes writes it: 2, 500m, 1.5, 512Mi, 4Gi.",
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Duration, Rate, Size};

    #[test]
    fn quantities_have_one_number_and_one_unit() {
        assert_eq!("500ms".parse(), Ok(Duration::from_millis(500)));
        assert_eq!("10m".parse(), Ok(Duration::from_millis(600_000)));
        assert_eq!("64Mi".parse(), Ok(Size::from_bytes(64 << 20)));
        for bad in ["", "3", "s", "-3s", "1.5s", "3 s", "3S", "1h30m", "99999999999999999999d", "213503982335d"] {
            assert!(bad.parse::<Duration>().is_err(), "{bad:?} must be rejected");
        }
        for bad in ["", "Mi", "64M", "64mi", "1e3", "16777216Ti"] {
            assert!(bad.parse::<Size>().is_err(), "{bad:?} must be rejected");
        }
        assert_eq!("64Mi/s".parse(), Ok(Rate::from_mebibytes(64)));
        assert_eq!(
            (Rate::from_mebibytes(0).to_string(), Rate::from_mebibytes(2_048).to_string()),
            ("0Mi/s".into(), "2Gi/s".into())
        );
        for bad in ["", "64", "64Mi", "64Ki/s", "64 Mi/s", "1.5Gi/s", "-1Mi/s", "17179869184Gi/s"] {
            assert!(bad.parse::<Rate>().is_err(), "{bad:?} must be rejected");
        }
    }

    #[test]
    fn resource_quantities_are_those_of_kubernetes() {
        for good in ["0", "2", "500m", "1.5", ".5", "4Gi", "1e3", "1E-3", "+2", "100k", "2E"] {
            assert!(super::is_resource_quantity(good), "{good:?}");
        }
        for bad in ["", "lots", "-1", "4GB", "4gi", "1.2.3", ".", "1e", "2 Gi", "1K", "Gi", "4Gim"] {
            assert!(!super::is_resource_quantity(bad), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn a_printed_quantity_parses_to_itself(value: u64) {
            prop_assert_eq!(Duration::from_millis(value).to_string().parse(), Ok(Duration::from_millis(value)));
            prop_assert_eq!(Size::from_bytes(value).to_string().parse(), Ok(Size::from_bytes(value)));
        }
    }
}
