//! Checks a number against the range of its schema.

use serde_json::Value;

use crate::cluster::SMALLEST_SETTING;

/// Whether `schema` allows `value`.
pub(super) fn is_allowed(value: f64, schema: &Value) -> bool {
    let bound = |schema: &Value, keyword: &str, otherwise: f64| schema[keyword].as_f64().unwrap_or(otherwise);
    let gap = &schema["not"];
    value.is_finite()
        && value >= bound(schema, "minimum", f64::MIN)
        && value > bound(schema, "exclusiveMinimum", f64::NEG_INFINITY)
        && value <= bound(schema, "maximum", f64::MAX)
        && !(value > bound(gap, "exclusiveMinimum", f64::INFINITY) && value <= bound(gap, "maximum", f64::MAX))
        && schema["multipleOf"].as_f64().is_none_or(|divisor| value % divisor == 0.0)
}

/// Describes the numbers that `schema` allows.
pub(super) fn range(schema: &Value) -> String {
    let show = |number: &Value| match number.as_f64() {
        Some(SMALLEST_SETTING) => "2^-31".to_owned(),
        _ => number.to_string(),
    };
    let [least, above, most] = ["minimum", "exclusiveMinimum", "maximum"].map(|keyword| &schema[keyword]);
    let gap = &schema["not"]["maximum"];
    let range = match (least.is_null(), above.is_null(), most.is_null()) {
        _ if !gap.is_null() => format!("0, or above {} and at most {}", show(gap), show(most)),
        (_, false, false) => format!("above {}, at most {}", show(above), show(most)),
        (_, false, true) => format!("above {}", show(above)),
        (false, true, false) => format!("{} to {}", show(least), show(most)),
        (false, true, true) => format!("{} or more", show(least)),
        (true, true, _) => "finite numbers".into(),
    };
    if schema["multipleOf"] == 2 { format!("even, {range}") } else { range }
}
