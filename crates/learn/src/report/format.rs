//! Numbers and names as people read them.

/// With commas between thousands.
pub(super) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A rate such as epochs per second: three figures.
pub(super) fn per_second(value: f64) -> String {
    match value {
        v if !v.is_finite() => "-".to_owned(),
        v if v >= 100.0 => count(v.round() as u64),
        v if v >= 10.0 => format!("{v:.1}"),
        v => format!("{v:.2}"),
    }
}

/// A duration in seconds.
pub(super) fn seconds(value: f64) -> String {
    match value {
        v if v < 1.0 => format!("{:.0} ms", v * 1e3),
        v if v < 120.0 => format!("{v:.1} s"),
        v if v < 7_200.0 => format!("{:.0} min {:02.0} s", (v / 60.0).floor(), (v % 60.0).floor()),
        v => format!("{:.0} h {:02.0} min", (v / 3_600.0).floor(), (v / 60.0 % 60.0).floor()),
    }
}

/// A setting such as a decay: as short as it was written.
pub(super) fn setting(value: f64) -> String {
    let text = format!("{value:.9}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The end of a number of things: `s`, unless it is one.
pub(super) const fn plural(count: u64) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// Text inside HTML, in elements and in quoted attributes. Control characters become visible.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            control if control.is_control() => safe.push('\u{fffd}'),
            other => safe.push(other),
        }
    }
    safe
}
