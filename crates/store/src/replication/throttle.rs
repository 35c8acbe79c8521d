//! Limits state transfers: bytes per second on the network, and a share of the engine's time. Both yield to writes.
//!
//! Pure: takes time and write latencies, decides whether a transfer may proceed.
//!
//! The [`Throttle`] is a byte budget. The baseline latency of writes is measured while no transfer is active. Transfers start with
//! an eighth of the budget, and double it while writes are not slowed down: installing a transfer blocks writes at the follower,
//! and a short transfer at full speed could end before the throttle reacts. While transfers more than double the write latency,
//! the budget is halved repeatedly, down to a sixteenth, and then recovers step by step. A sixteenth always remains, since an
//! under-replicated partition is the greater risk.

/// Milliseconds between evaluations of the budget: some log batches under load.
const EVALUATE_MS: u64 = 250;
/// Number of parts of the complete budget.
const PARTS: u64 = 16;
/// Initial budget of transfers while there are writes.
const FIRST_PARTS: u64 = PARTS / 8;
/// Milliseconds of budget that may accumulate while nothing is sent: 1.5 times the longest sleep of the engine.
const SAVED_MS: u64 = 75;
/// Weight of an evaluation in the baseline, without and with active transfers: half-lives of 3 s and 3 min. It also adapts during
/// transfers, since load may rise permanently.
const WEIGHTS: (f64, f64) = (1.0 / 16.0, 1.0 / 1024.0);
/// Writes count as slowed down above this multiple of the baseline latency.
const SLOWDOWN_FACTOR: f64 = 2.0;

/// After work for a transfer the engine serves only calls for this multiple of the work's duration.
const PAUSE_FACTOR: u64 = 7;

/// Share of the engine's or the disk's time for transfers. The engine is blocked while it exports or installs state. If there are
/// calls it pauses transfers after each, so that they take at most an eighth of its time; a pausing follower delays the sender. The
/// same limits the disk time of writes other than the log.
#[derive(Debug, Default)]
pub(crate) struct TimeShare {
    paused_until_ms: u64,
    /// Calls served at the end of the last work.
    served: u64,
}

impl TimeShare {
    pub(crate) const fn may_work(&self, now_ms: u64) -> bool {
        now_ms >= self.paused_until_ms
    }

    /// Records work from `from_ms` until `now_ms`, and the total number of calls served.
    pub(crate) const fn charge(&mut self, from_ms: u64, now_ms: u64, served: u64) {
        let pause_ms =
            if served == self.served { 0 } else { now_ms.saturating_sub(from_ms).saturating_mul(PAUSE_FACTOR) };
        let until_ms = now_ms.saturating_add(pause_ms);
        // Work without duration does not shorten a pause.
        let paused_until_ms = if until_ms > self.paused_until_ms { until_ms } else { self.paused_until_ms };
        *self = Self { paused_until_ms, served };
    }
}

/// Byte budget of a store for transfers.
#[derive(Debug)]
pub(crate) struct Throttle {
    bytes_per_s: u64,
    parts: u64,
    /// Whether the current transfers have slowed down writes: the budget then rises slowly.
    slowed_writes: bool,
    /// Bytes that may be sent; negative after a larger chunk.
    credit: i64,
    credited_ms: u64,
    evaluated_ms: u64,
    /// Number of writes and their total microseconds at the last evaluation.
    last_totals: (u64, u64),
    /// Baseline microseconds of a write without transfers.
    baseline_us: Option<f64>,
}

impl Throttle {
    /// `bytes_per_s` = 0: no limit.
    pub(crate) const fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s,
            parts: PARTS,
            slowed_writes: false,
            credit: 0,
            credited_ms: 0,
            evaluated_ms: 0,
            last_totals: (0, 0),
            baseline_us: None,
        }
    }

    pub(crate) const fn is_due(&self, now_ms: u64) -> bool {
        now_ms >= self.evaluated_ms + EVALUATE_MS
    }

    /// Adjusts the budget, given the total number of writes and their microseconds. Returns the number of writes since the last
    /// evaluation.
    pub(crate) fn evaluate(&mut self, now_ms: u64, writes: (u64, u64), is_transferring: bool) -> u64 {
        self.evaluated_ms = now_ms;
        let (count, us) = (writes.0.saturating_sub(self.last_totals.0), writes.1.saturating_sub(self.last_totals.1));
        self.last_totals = writes;
        // Without writes none is slowed down.
        let recent_us = if count == 0 { 0.0 } else { us as f64 / count as f64 };
        let slowed = is_transferring && self.baseline_us.is_some_and(|baseline| recent_us > SLOWDOWN_FACTOR * baseline);
        self.slowed_writes = is_transferring && (self.slowed_writes || slowed);
        self.parts = match (is_transferring, slowed) {
            (false, _) if count == 0 => PARTS,
            (false, _) => FIRST_PARTS,
            (true, true) => (self.parts / 2).max(1),
            (true, false) if self.slowed_writes => (self.parts + 1).min(PARTS),
            (true, false) => (self.parts * 2).min(PARTS),
        };
        if count > 0 {
            let weight = if is_transferring { WEIGHTS.1 } else { WEIGHTS.0 };
            let baseline = self.baseline_us.get_or_insert(recent_us);
            *baseline += weight * (recent_us - *baseline);
        }
        count
    }

    /// Whether a chunk may be sent now.
    pub(crate) fn may_send(&mut self, now_ms: u64) -> bool {
        if self.bytes_per_s == 0 {
            return true;
        }
        let rate = self.bytes_per_s.saturating_mul(self.parts) / PARTS;
        let bytes_in = |ms: u64| i64::try_from(rate.saturating_mul(ms) / 1_000).unwrap_or(i64::MAX);
        let passed_ms = now_ms.saturating_sub(self.credited_ms);
        let earned = bytes_in(passed_ms);
        // Less than a byte is not lost: it is earned with the next millisecond.
        if earned > 0 || passed_ms > 1_000 {
            self.credit = self.credit.saturating_add(earned).min(bytes_in(SAVED_MS).max(1));
            self.credited_ms = now_ms;
        }
        self.credit > 0
    }

    /// Charges a sent chunk.
    pub(crate) fn charge(&mut self, bytes: usize) {
        self.credit = self.credit.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 1 << 20;

    /// Bytes sent within `ms` milliseconds.
    fn sent_in(throttle: &mut Throttle, now_ms: &mut u64, ms: u64, step_ms: u64) -> u64 {
        let (end, mut sent) = (*now_ms + ms, 0);
        while *now_ms < end {
            while throttle.may_send(*now_ms) {
                throttle.charge(PIECE);
                sent += PIECE as u64;
            }
            *now_ms += step_ms;
        }
        sent
    }

    #[test]
    fn transfers_take_an_eighth_of_the_engine_time_under_load() {
        let (mut share, mut now_ms, mut served) = (TimeShare::default(), 0, 0);
        // Time spent on transfers in 8 s, at this number of calls per millisecond.
        let mut worked_ms = |calls: u64| {
            let (end_ms, mut worked_ms) = (now_ms + 8_000, 0);
            while now_ms < end_ms {
                let ms = if share.may_work(now_ms) { 10 } else { 1 };
                served += calls * ms;
                if ms == 10 {
                    share.charge(now_ms, now_ms + ms, served);
                    worked_ms += ms;
                }
                now_ms += ms;
            }
            worked_ms
        };
        assert_eq!(worked_ms(1), 1_000);
        assert!(worked_ms(0) > 7_800, "without calls there are no pauses");
        assert_eq!(worked_ms(1), 1_000);
    }

    #[test]
    fn work_without_duration_does_not_shorten_a_pause() {
        let mut share = TimeShare::default();
        share.charge(0, 10, 1);
        share.charge(20, 20, 2);
        assert!(!share.may_work(79) && share.may_work(80));
    }

    #[test]
    fn transfers_keep_the_rate_at_any_poll_interval_and_accumulate_little_budget() {
        for step_ms in [1, 10, 50] {
            let (mut throttle, mut now_ms) = (Throttle::new(32 << 20), 1_000);
            let first = sent_in(&mut throttle, &mut now_ms, 10_000, step_ms);
            assert!((310 << 20..=330 << 20).contains(&first), "{} MiB in 10 s", first >> 20);
            now_ms += 60_000;
            let burst = sent_in(&mut throttle, &mut now_ms, 1, 1);
            assert!(burst <= 4 << 20, "{burst} bytes after a pause");
        }
        let (mut slow, mut now_ms) = (Throttle::new(100), 0);
        assert_eq!(sent_in(&mut slow, &mut now_ms, 60_000, 1), PIECE as u64, "a chunk larger than the credit is sent");
        let (mut free, now_ms) = (Throttle::new(0), 0);
        (0..1_000).for_each(|_| free.charge(PIECE));
        assert!(free.may_send(now_ms));
    }

    #[test]
    fn transfers_start_slowly_under_writes_and_yield_while_writes_are_slowed_down() {
        let mut throttle = Throttle::new(16 << 20);
        let (mut now_ms, mut writes) = (0, (0, 0));
        let mut evaluate = |throttle: &mut Throttle, us: u64, is_transferring| {
            now_ms += EVALUATE_MS;
            assert!(throttle.is_due(now_ms));
            if us > 0 {
                writes = (writes.0 + 100, writes.1 + 100 * us);
            }
            throttle.evaluate(now_ms, writes, is_transferring);
            throttle.parts
        };
        // Transfers before there is a baseline are not limited.
        assert_eq!(evaluate(&mut throttle, 9_000, true), 16);
        assert_eq!(evaluate(&mut throttle, 0, false), 16, "without writes there is no limit");
        (0..120)
            .for_each(|_| assert_eq!(evaluate(&mut throttle, 1_000, false), 2, "writes alone are never slowed down"));
        let rising_budget: Vec<u64> = (0..4).map(|_| evaluate(&mut throttle, 1_900, true)).collect();
        assert_eq!(rising_budget, [4, 8, 16, 16]);
        let falling: Vec<u64> = (0..6).map(|_| evaluate(&mut throttle, 2_500, true)).collect();
        assert_eq!(falling, [8, 4, 2, 1, 1, 1]);
        assert_eq!(evaluate(&mut throttle, 0, true), 2, "not slowed down now, but in the evaluation before");
        let rising: Vec<u64> = (0..15).map(|_| evaluate(&mut throttle, 1_500, true)).collect();
        assert_eq!((rising[0], rising[13], rising[14]), (3, 16, 16));
        // A permanent load becomes the baseline after some minutes.
        let slow = (0..4_000).filter(|_| evaluate(&mut throttle, 3_000, true) == 1).count();
        assert!((200..1_200).contains(&slow), "{slow} evaluations");
        assert_eq!(throttle.parts, 16);
    }
}
