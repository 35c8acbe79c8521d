//! Validity period of a certificate. The library that verifies certificates checks it but does not expose it.
//!
//! Parses only as much DER as needed, of certificates that are already verified.

use std::time::{Duration, SystemTime};

const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const VERSION: u8 = 0xa0;

/// Returns the first and last moment of validity; `None` if it is not a certificate or starts before 1970.
pub(crate) fn period(certificate: &[u8]) -> Option<(SystemTime, SystemTime)> {
    let (certificate, _) = read(certificate, SEQUENCE)?;
    let (to_be_signed, _) = read(certificate, SEQUENCE)?;
    let rest = read(to_be_signed, VERSION).map_or(to_be_signed, |(_, rest)| rest);
    let (_serial, rest) = read(rest, INTEGER)?;
    let (_algorithm, rest) = read(rest, SEQUENCE)?;
    let (_issuer, rest) = read(rest, SEQUENCE)?;
    let (validity, _) = read(rest, SEQUENCE)?;
    let (not_before, rest) = time(validity)?;
    let (not_after, _) = time(rest)?;
    Some((not_before, not_after))
}

/// Returns the content of the value with this tag at the start of `bytes`, and the rest.
fn read(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (&found, rest) = bytes.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // Lengths of up to four bytes: certificates are no longer.
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (digits.iter().fold(0, |sum, digit| sum << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    (found == tag).then(|| rest.split_at_checked(length)).flatten()
}

fn time(bytes: &[u8]) -> Option<(SystemTime, &[u8])> {
    let number = |digits: &[u8]| {
        let add = |sum: u64, digit: &u8| digit.is_ascii_digit().then(|| sum * 10 + u64::from(digit - b'0'));
        digits.iter().try_fold(0_u64, add)
    };
    let (year, text, rest) = if let Some((text, rest)) = read(bytes, UTC_TIME) {
        let (year, text) = text.split_at_checked(2)?;
        let year = number(year)?;
        // RFC 5280, 4.1.2.5.1.
        (if year >= 50 { 1900 + year } else { 2000 + year }, text, rest)
    } else {
        let (text, rest) = read(bytes, GENERALIZED_TIME)?;
        let (year, text) = text.split_at_checked(4)?;
        (number(year)?, text, rest)
    };
    if text.len() != 11 || text[10] != b'Z' || year < 1970 {
        return None;
    }
    let part = |at: usize| number(&text[at..at + 2]);
    let (month, day) = (part(0)?, part(2)?);
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let seconds = days(year, month, day) * 86_400 + part(4)? * 3_600 + part(6)? * 60 + part(8)?;
    Some((SystemTime::UNIX_EPOCH + Duration::from_secs(seconds), rest))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar, with years that start in March.
const fn days(year: u64, month: u64, day: u64) -> u64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    // 719,468 days lie between March 1 of year 0 and 1970-01-01.
    year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 1 - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ca::SKEW;
    use crate::{CertificateAuthority, Name, Role};
    use engram_memory::ClusterId;
    use proptest::prelude::*;
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject as _;

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!([days(1970, 1, 1), days(2000, 2, 29), days(2000, 3, 1)], [0, 11_016, 11_017]);
        assert_eq!(days(2026, 11, 23), 20_780);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_end_is_the_one_that_was_signed(start in 1_000..4_000_000_000_u64, lifetime in 60..1_000_000_u64) {
            let ca = CertificateAuthority::create(ClusterId(1), SystemTime::now()).unwrap();
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(start);
            let name = Name::local("demo", ClusterId(1), Role::Client, 0);
            let issued = ca.issue(&name, now, Duration::from_secs(lifetime)).unwrap();
            let der = CertificateDer::from_pem_slice(issued.pem.as_bytes()).unwrap();
            prop_assert_eq!(period(&der), Some((now - SKEW, issued.until)));
            // A truncated certificate does not panic.
            for end in 0..der.len() {
                let _ = period(&der[..end]);
            }
        }

        #[test]
        fn anything_else_is_none_or_a_time(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = period(&bytes);
        }
    }
}
