//! The rate limiter: keeps samples and inserts in a ratio, and says why a call has to wait.
//!
//! The cursor is `d = inserts * samples_per_insert - samples`. Inserts are allowed while the buffer fills up to `min_size`, or as long as d
//! stays at or below `max_diff`; samples as long as there are `min_size` items and d stays at or above `min_diff`.

use engram_memory::edge::ShortNumber;

/// Settings. Ratios are in samples per insert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Samples per insert, above 0.
    pub samples_per_insert: f64,
    /// Items that must exist before the first sample, at least 1.
    pub min_size: u64,
    /// Lower bound of the cursor.
    pub min_diff: f64,
    /// Upper bound of the cursor.
    pub max_diff: f64,
}

/// What has been counted; saved with the buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Items inserted.
    pub inserts: u64,
    /// Items sampled, with repetition.
    pub samples: u64,
    /// Items deleted.
    pub deletes: u64,
}

/// Why settings were refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A number out of its range.
    #[error("{field}: {} is not allowed; allowed: {allowed}", ShortNumber(*value))]
    Range {
        /// Name of the setting.
        field: &'static str,
        /// The refused value.
        value: f64,
        /// The range.
        allowed: &'static str,
    },
    /// Bounds so close that neither side could proceed.
    #[error(
        "max_diff - min_diff: {} is not allowed; allowed: at least {}, or inserts and samples block each other",
        ShortNumber(*width),
        ShortNumber(*least)
    )]
    TooNarrow {
        /// The distance of the bounds.
        width: f64,
        /// The least distance that cannot deadlock.
        least: f64,
    },
    /// Bounds that the cursor cannot reach once the buffer is filled.
    #[error(
        "min_size * samples_per_insert: {} is not allowed; allowed: min_diff {} to max_diff {}",
        ShortNumber(*cursor),
        ShortNumber(*min_diff),
        ShortNumber(*max_diff)
    )]
    Outside {
        /// The cursor after `min_size` inserts.
        cursor: f64,
        /// The lower bound.
        min_diff: f64,
        /// The upper bound.
        max_diff: f64,
    },
}

/// Why a call has to wait.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum Wait {
    /// Fewer items than `min_size`.
    #[error("waiting for inserts: {size} of {min_size} items")]
    Filling {
        /// Items in the buffer.
        size: u64,
        /// Items needed.
        min_size: u64,
    },
    /// Samples are ahead of inserts.
    #[error("waiting for inserts: {} would be below min_diff {}", ShortNumber(*cursor), ShortNumber(*min_diff))]
    Inserts {
        /// The cursor after the call.
        cursor: f64,
        /// The bound.
        min_diff: f64,
    },
    /// Inserts are ahead of samples.
    #[error("waiting for samples: {} would be above max_diff {}", ShortNumber(*cursor), ShortNumber(*max_diff))]
    Samples {
        /// The cursor after the call.
        cursor: f64,
        /// The bound.
        max_diff: f64,
    },
}

/// A limiter.
#[derive(Debug, Clone, PartialEq)]
pub struct RateLimiter {
    settings: Settings,
    counts: Counts,
}

impl Settings {
    /// Returns settings with bounds at `error_buffer` around `min_size * samples_per_insert`.
    ///
    /// # Errors
    /// As [`RateLimiter::new`].
    pub fn around(samples_per_insert: f64, min_size: u64, error_buffer: f64) -> Result<Self, Error> {
        let middle = min_size as f64 * samples_per_insert;
        let settings =
            Self { samples_per_insert, min_size, min_diff: middle - error_buffer, max_diff: middle + error_buffer };
        settings.check().map(|()| settings)
    }

    fn check(&self) -> Result<(), Error> {
        let Self { samples_per_insert, min_size, min_diff, max_diff } = *self;
        if !(samples_per_insert.is_finite() && samples_per_insert > 0.0) {
            let allowed = "a positive finite number";
            return Err(Error::Range { field: "samples_per_insert", value: samples_per_insert, allowed });
        }
        if min_size == 0 {
            return Err(Error::Range { field: "min_size", value: 0.0, allowed: "at least 1" });
        }
        for (field, value) in [("min_diff", min_diff), ("max_diff", max_diff)] {
            if !value.is_finite() {
                return Err(Error::Range { field, value, allowed: "a finite number" });
            }
        }
        let (width, least) = (max_diff - min_diff, 2.0 * samples_per_insert.max(1.0));
        if width < least {
            return Err(Error::TooNarrow { width, least });
        }
        let cursor = min_size as f64 * samples_per_insert;
        if !(min_diff..=max_diff).contains(&cursor) {
            return Err(Error::Outside { cursor, min_diff, max_diff });
        }
        Ok(())
    }
}

impl RateLimiter {
    /// Creates a limiter.
    ///
    /// # Errors
    /// Settings with which inserts and samples can block each other.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        settings.check()?;
        Ok(Self { settings, counts: Counts::default() })
    }

    /// Restores a limiter from saved counts. If neither a single insert nor a single sample could proceed, the count of samples is moved so
    /// that both can; the second value is the correction in samples, 0 if none was needed.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn restore(settings: Settings, counts: Counts) -> Result<(Self, i64), Error> {
        let mut limiter = Self::new(settings)?;
        limiter.counts = counts;
        if limiter.insert(1).is_ok() || limiter.sample(1).is_ok() {
            return Ok((limiter, 0));
        }
        let middle = f64::midpoint(settings.min_diff, settings.max_diff);
        let wanted = (counts.inserts as f64 * settings.samples_per_insert - middle).max(0.0) as u64;
        limiter.counts.samples = wanted;
        Ok((limiter, wanted as i64 - counts.samples as i64))
    }

    /// Returns the counts.
    pub const fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the cursor.
    pub fn cursor(&self) -> f64 {
        self.counts.inserts as f64 * self.settings.samples_per_insert - self.counts.samples as f64
    }

    /// Returns the number of items.
    pub const fn size(&self) -> u64 {
        self.counts.inserts.saturating_sub(self.counts.deletes)
    }

    /// Checks whether `items` may be inserted now.
    ///
    /// # Errors
    /// Why the call has to wait.
    pub fn insert(&self, items: u64) -> Result<(), Wait> {
        let cursor = self.cursor() + items as f64 * self.settings.samples_per_insert;
        if self.size() + items <= self.settings.min_size || cursor <= self.settings.max_diff {
            Ok(())
        } else {
            Err(Wait::Samples { cursor, max_diff: self.settings.max_diff })
        }
    }

    /// Checks whether `items` may be sampled now.
    ///
    /// # Errors
    /// Why the call has to wait.
    pub fn sample(&self, items: u64) -> Result<(), Wait> {
        if self.size() < self.settings.min_size {
            return Err(Wait::Filling { size: self.size(), min_size: self.settings.min_size });
        }
        let cursor = self.cursor() - items as f64;
        if cursor >= self.settings.min_diff {
            Ok(())
        } else {
            Err(Wait::Inserts { cursor, min_diff: self.settings.min_diff })
        }
    }

    /// Counts what was done.
    pub const fn record(&mut self, inserted: u64, sampled: u64, deleted: u64) {
        self.counts.inserts += inserted;
        self.counts.samples += sampled;
        self.counts.deletes += deleted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn accepted_settings_never_block_both_sides(
            spi in 0.05_f64..20.0, min_size in 1_u64..50, low in -100.0_f64..100.0, width in 0.0_f64..200.0,
            steps in proptest::collection::vec((any::<bool>(), 0_u64..4), 0..300),
        ) {
            let settings = Settings { samples_per_insert: spi, min_size, min_diff: low, max_diff: low + width };
            let Ok(mut limiter) = RateLimiter::new(settings) else { return Ok(()) };
            for (insert_first, deletes) in steps {
                let (insert, sample) = (limiter.insert(1).is_ok(), limiter.sample(1).is_ok());
                prop_assert!(insert || sample, "{limiter:?}");
                let inserts = if insert_first { insert } else { insert && !sample };
                limiter.record(u64::from(inserts), u64::from(!inserts), 0);
                // Items are removed, used up and deleted at any time.
                limiter.record(0, 0, deletes.min(limiter.size()));
            }
        }

        #[test]
        fn restored_limiter_lets_a_side_proceed(inserts in 0_u64..500, samples in 0_u64..5_000, deletes in 0_u64..500) {
            let settings = Settings::around(4.0, 10, 20.0).unwrap();
            let counts = Counts { inserts, samples, deletes: deletes.min(inserts) };
            let (limiter, _) = RateLimiter::restore(settings, counts).unwrap();
            prop_assert!(limiter.insert(1).is_ok() || limiter.sample(1).is_ok(), "{limiter:?}");
        }
    }

    /// Lets one side go first for some steps; returns whether each side proceeded.
    fn sides_that_proceed(mut limiter: RateLimiter, insert_first: bool) -> [bool; 2] {
        let mut proceeded = [false; 2];
        for step in 0..4_000 {
            let allowed = [limiter.insert(1).is_ok(), limiter.sample(1).is_ok()];
            assert!(allowed[0] || allowed[1], "blocked after {step} steps: {limiter:?}");
            let inserts = if insert_first { allowed[0] } else { !allowed[1] };
            limiter.record(u64::from(inserts), u64::from(!inserts), 0);
            proceeded[usize::from(!inserts)] = true;
        }
        proceeded
    }

    #[test]
    fn limiter_restored_at_an_edge_or_outside_serves_both_sides_again() {
        // The cursor may be from 20 to 60.
        let settings = Settings::around(4.0, 10, 20.0).unwrap();
        for cursor in [-2_000_i64, 19, 20, 21, 23, 24, 56, 57, 59, 60, 61, 2_000] {
            for deletes in [0, 590, 591, 600] {
                let counts = Counts { inserts: 600, samples: (2_400 - cursor) as u64, deletes };
                let (limiter, corrected) = RateLimiter::restore(settings, counts).unwrap();
                assert_eq!(
                    (limiter.cursor(), corrected),
                    (cursor as f64, 0),
                    "counts are kept where they block no side"
                );
                for insert_first in [false, true] {
                    let sides = sides_that_proceed(limiter.clone(), insert_first);
                    assert_eq!(sides, [true; 2], "cursor {cursor}, {deletes} deletes, inserts first: {insert_first}");
                }
            }
        }
    }

    /// Whether every state that can be reached in some steps lets a side proceed: all orders of inserts, samples and deletes.
    fn is_live(settings: Settings) -> bool {
        let mut states = std::collections::BTreeSet::from([(0, 0, 0)]);
        for _ in 0..14 {
            let mut next = std::collections::BTreeSet::new();
            for &(inserts, samples, deletes) in &states {
                let limiter = RateLimiter { settings, counts: Counts { inserts, samples, deletes } };
                let (insert, sample) = (limiter.insert(1).is_ok(), limiter.sample(1).is_ok());
                if !insert && !sample {
                    return false;
                }
                next.extend(insert.then_some((inserts + 1, samples, deletes)));
                next.extend(sample.then_some((inserts, samples + 1, deletes)));
                next.extend((limiter.size() > 0).then_some((inserts, samples, deletes + 1)));
            }
            states = next;
        }
        true
    }

    #[test]
    fn small_settings_are_refused_or_live_in_every_reachable_state() {
        let (mut accepted, mut refused, mut blocked) = (0, 0, 0);
        for spi in [0.5, 1.0, 2.0] {
            for min_size in 1..=2 {
                for low in -2..=3 {
                    for width in 0..=4 {
                        let (min_diff, max_diff) = (f64::from(low), f64::from(low + width));
                        let settings = Settings { samples_per_insert: spi, min_size, min_diff, max_diff };
                        if settings.check().is_ok() {
                            accepted += 1;
                            assert!(is_live(settings), "{settings:?}");
                        } else {
                            refused += 1;
                            blocked += u32::from(!is_live(settings));
                        }
                    }
                }
            }
        }
        assert!(
            accepted > 20 && refused > 20 && blocked > 20,
            "{accepted} accepted, {refused} refused, {blocked} of them block"
        );
    }

    #[test]
    fn limiter_that_can_deadlock_is_refused() {
        assert!(matches!(Settings::around(4.0, 10, 1.0), Err(Error::TooNarrow { least: 8.0, .. })));
        let outside = Settings { samples_per_insert: 1.0, min_size: 100, min_diff: 0.0, max_diff: 50.0 };
        assert!(matches!(RateLimiter::new(outside), Err(Error::Outside { cursor: 100.0, .. })));
        assert!(Settings::around(0.0, 10, 1.0).is_err() && Settings::around(f64::NAN, 10, 1.0).is_err());
        assert!(Settings::around(1.0, 0, 10.0).unwrap_err().to_string().starts_with("min_size: 0"));
    }

    #[test]
    fn waiting_call_says_what_it_waits_for() {
        let mut limiter = RateLimiter::new(Settings::around(2.0, 4, 4.0).unwrap()).unwrap();
        assert_eq!(limiter.sample(1).unwrap_err().to_string(), "waiting for inserts: 0 of 4 items");
        limiter.record(6, 0, 0);
        assert_eq!(limiter.insert(1).unwrap_err().to_string(), "waiting for samples: 14 would be above max_diff 12");
        limiter.record(0, 8, 0);
        assert_eq!(limiter.sample(1).unwrap_err().to_string(), "waiting for inserts: 3 would be below min_diff 4");
    }
}
