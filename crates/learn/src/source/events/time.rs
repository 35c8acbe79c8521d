//! Times of events: RFC 3339 text, milliseconds since the Unix epoch, and spans of time as epochs.
//!
//! The calendar is the proleptic Gregorian one, without leap seconds: second 60 counts as the next second 0.

use std::ops::RangeInclusive;

/// The years 0 to 9999: what RFC 3339 can write, and nowhere near the ends of an i64.
pub(super) const RANGE_MS: RangeInclusive<i64> = -62_167_219_200_000..=253_402_300_799_999;

/// Bare numbers that are taken for seconds: of 1980 to 2100, which as milliseconds are of the first weeks of 1970. A file in seconds
/// would otherwise become one or two epochs without an error.
pub(super) const LIKELY_SECONDS: RangeInclusive<i64> = 315_532_800..=4_102_444_800;

const DAY_MS: i64 = 86_400_000;

/// Parses an RFC 3339 time; a date without a time is midnight in UTC. Digits beyond milliseconds are truncated.
pub(super) fn parse(text: &str) -> Option<i64> {
    let text = text.trim();
    let date = text.get(..10)?;
    let (year, month, day) = (digits(date.get(..4)?)?, digits(date.get(5..7)?)?, digits(date.get(8..10)?)?);
    let separated = date.as_bytes()[4] == b'-' && date.as_bytes()[7] == b'-';
    if !separated || !(1..=12).contains(&month) || day < 1 || day > days_in(year, month) {
        return None;
    }
    let midnight = days_from_civil(year, month, day) * DAY_MS;
    let rest = &text[10..];
    if rest.is_empty() {
        return Some(midnight);
    }
    let clock = rest.strip_prefix(['T', 't', ' '])?;
    let (hour, minute, second) = (digits(clock.get(..2)?)?, digits(clock.get(3..5)?)?, digits(clock.get(6..8)?)?);
    let separated = clock.as_bytes()[2] == b':' && clock.as_bytes()[5] == b':';
    if !separated || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let (millis, zone) = fraction(&clock[8..])?;
    Some(midnight + ((hour * 60 + minute) * 60 + second) * 1_000 + millis - offset_ms(zone)?)
}

fn digits(text: &str) -> Option<i64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Milliseconds of a fraction such as `.25`, and what follows it.
fn fraction(text: &str) -> Option<(i64, &str)> {
    let Some(after) = text.strip_prefix('.') else { return Some((0, text)) };
    let end = after.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(after.len());
    let places = &after[..end];
    if places.is_empty() {
        return None;
    }
    let millis: String = places.chars().chain("00".chars()).take(3).collect();
    Some((digits(&millis)?, &after[end..]))
}

fn offset_ms(zone: &str) -> Option<i64> {
    if matches!(zone, "Z" | "z") {
        return Some(0);
    }
    let sign = match zone.as_bytes().first()? {
        b'+' => 1,
        b'-' => -1,
        _ => return None,
    };
    let (hours, minutes) = zone.get(1..)?.split_once(':')?;
    if hours.len() != 2 || minutes.len() != 2 {
        return None;
    }
    let (hours, minutes) = (digits(hours)?, digits(minutes)?);
    (hours < 24 && minutes < 60).then_some(sign * (hours * 60 + minutes) * 60_000)
}

fn days_in(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Days since 1970-01-01. Years are counted from March, so that the leap day comes last.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let shifted = if month <= 2 { year - 1 } else { year };
    let era = shifted.div_euclid(400);
    let year_of_era = shifted.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    (year, month, day_of_year - (153 * shifted_month + 2) / 5 + 1)
}

/// A time in RFC 3339, in UTC, with milliseconds only where there are some.
pub(super) fn format(millis: i64) -> String {
    let (days, rest) = (millis.div_euclid(DAY_MS), millis.rem_euclid(DAY_MS));
    let (year, month, day) = civil_from_days(days);
    let (hour, minute, second) = (rest / 3_600_000, rest / 60_000 % 60, rest / 1_000 % 60);
    let fraction = if rest % 1_000 == 0 { String::new() } else { format!(".{:03}", rest % 1_000) };
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}{fraction}Z")
}

/// Returns the number of the span that contains a time.
pub(super) fn span_of(millis: i64, span_ms: u64) -> i64 {
    millis.div_euclid(i64::try_from(span_ms.max(1)).unwrap_or(i64::MAX))
}

/// Formats the start of a span; only the date if spans are whole days.
pub(super) fn format_span(span: i64, span_ms: u64) -> String {
    let start = i128::from(span) * i128::from(span_ms.max(1));
    // A span longer than the calendar can begin before year 0.
    let start = start.clamp(i128::from(*RANGE_MS.start()), i128::from(*RANGE_MS.end())) as i64;
    let text = format(start);
    if span_ms.is_multiple_of(DAY_MS as u64) { text[..10].to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_parse_as_rfc_3339() {
        for (text, millis) in [
            ("1970-01-01", 0),
            ("1970-01-01T00:00:00Z", 0),
            ("1969-12-31T23:59:59.999Z", -1),
            ("2000-02-29T12:00:00+01:00", 951_822_000_000),
            ("2026-11-21 16:09:50.1239-00:30", 1_795_279_190_123),
            ("0000-01-01T00:00:00Z", *RANGE_MS.start()),
            ("9999-12-31T23:59:59.999Z", *RANGE_MS.end()),
        ] {
            assert_eq!(parse(text), Some(millis), "{text}");
        }
        for text in [
            "",
            "1970",
            "1970-13-01",
            "1900-02-29",
            "1970-01-01T24:00:00Z",
            "1970-01-01T00:00:00",
            "1970-01-01T00:00:00.Z",
            "1970-01-01T00:00:00+1:00",
            "1970-01-01T00:00:00+09223372036758071:00",
            "197\u{e9}-01-01",
            "1970-01-01Tx0:00:00Z",
            "+970-01-01",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    #[test]
    fn days_of_ten_thousand_years_round_trip() {
        let mut day = *RANGE_MS.start();
        while day <= *RANGE_MS.end() {
            assert_eq!(parse(&format(day)), Some(day));
            // No period of the calendar divides 11 days.
            day += 11 * DAY_MS;
        }
    }

    #[test]
    fn spans_lie_on_a_grid_from_the_unix_epoch() {
        let day = DAY_MS as u64;
        assert_eq!((span_of(-1, day), span_of(0, day), span_of(DAY_MS, day)), (-1, 0, 1));
        assert_eq!(format_span(-1, day), "1969-12-31");
        assert_eq!(format_span(3, 3_600_000), "1970-01-01T03:00:00Z");
        assert_eq!(span_of(-5, u64::MAX), -1);
        assert_eq!(format_span(-1, u64::MAX), "0000-01-01T00:00:00Z");
    }
}
