//! How much copies of state may take: bytes per second of the network, and of the engine's time, both giving way to writes.
//!
//! Pure: time and the latency of writes come in, and whether more may be sent or taken over goes out.
//!
//! The [`Throttle`] is a budget of bytes. What writes take without copies is
//! learned while none are sent. Copies begin with an eighth of the budget, and double it while writes take no longer: a follower
//! that takes over what it is sent has no time for writes, and all may be over before anybody could react. While they make writes
//! take more than twice as long the budget is halved, again and again down to a sixteenth, and comes back step by step. A
//! sixteenth stays, since a partition without a second copy is the greater danger.

/// How often the budget is judged, in milliseconds: some log batches under load.
const JUDGE_MS: u64 = 250;
/// The budget in parts; so many are all of it.
const PARTS: u64 = 16;
/// The budget that copies begin with where somebody writes.
const FIRST_PARTS: u64 = PARTS / 8;
/// Budget that may be saved up while nothing is sent, in milliseconds: what the engine may sleep, and half of it.
const SAVED_MS: u64 = 75;
/// Weight of a judgement in what is usual, while no copies are sent and while they are: half of it in 3 s, and in 3 min. With
/// them it moves too, since load may rise for good.
const WEIGHTS: (f64, f64) = (1.0 / 16.0, 1.0 / 1024.0);
/// Writes count as slowed when they take so many times what is usual.
const SLOWED: f64 = 2.0;

/// So many times as long as it worked for a copy, the engine is there for others only.
const REST: u64 = 7;

/// Somebody's time for copies. The engine's: while it exports one, or takes one over, it does nothing else, and calls wait. Where somebody
/// calls it rests from copies after each, so that they take an eighth of it at most; a follower that rests holds up who sends. And the
/// disk's, for what is written of them beside the log.
#[derive(Debug, Default)]
pub(crate) struct Share {
    rests_until_ms: u64,
    /// Calls served when work for a copy was last over.
    served: u64,
}

impl Share {
    pub(crate) const fn may_work(&self, now_ms: u64) -> bool {
        now_ms >= self.rests_until_ms
    }

    /// It worked for a copy until now, and has served so many calls since the start.
    pub(crate) const fn worked(&mut self, from_ms: u64, now_ms: u64, served: u64) {
        let rest_ms = if served == self.served { 0 } else { now_ms.saturating_sub(from_ms).saturating_mul(REST) };
        let until_ms = now_ms.saturating_add(rest_ms);
        // A rest that was begun is not cut short by what took no time.
        let rests_until_ms = if until_ms > self.rests_until_ms { until_ms } else { self.rests_until_ms };
        *self = Self { rests_until_ms, served };
    }
}

/// The budget of a store for copies.
#[derive(Debug)]
pub(crate) struct Throttle {
    bytes_per_s: u64,
    parts: u64,
    /// These copies have slowed writes before: the budget rises with care.
    braked: bool,
    /// Bytes that may be sent; below 0 after a piece that was larger.
    credit: i64,
    credited_ms: u64,
    judged_ms: u64,
    /// Writes so far, and their microseconds, when it was judged last.
    seen: (u64, u64),
    /// Microseconds that a write takes without copies.
    usual_us: Option<f64>,
}

impl Throttle {
    /// `bytes_per_s` = 0: no limit.
    pub(crate) const fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s,
            parts: PARTS,
            braked: false,
            credit: 0,
            credited_ms: 0,
            judged_ms: 0,
            seen: (0, 0),
            usual_us: None,
        }
    }

    pub(crate) const fn is_due(&self, now_ms: u64) -> bool {
        now_ms >= self.judged_ms + JUDGE_MS
    }

    /// Judges by all writes so far, their number and their microseconds, when it is due. Returns the number of writes since the last
    /// time.
    pub(crate) fn judge(&mut self, now_ms: u64, writes: (u64, u64), copying: bool) -> u64 {
        self.judged_ms = now_ms;
        let (count, us) = (writes.0.saturating_sub(self.seen.0), writes.1.saturating_sub(self.seen.1));
        self.seen = writes;
        // Without writes nobody is slowed.
        let recent_us = if count == 0 { 0.0 } else { us as f64 / count as f64 };
        let slowed = copying && self.usual_us.is_some_and(|usual| recent_us > SLOWED * usual);
        self.braked = copying && (self.braked || slowed);
        self.parts = match (copying, slowed) {
            (false, _) if count == 0 => PARTS,
            (false, _) => FIRST_PARTS,
            (true, true) => (self.parts / 2).max(1),
            (true, false) if self.braked => (self.parts + 1).min(PARTS),
            (true, false) => (self.parts * 2).min(PARTS),
        };
        if count > 0 {
            let weight = if copying { WEIGHTS.1 } else { WEIGHTS.0 };
            let usual = self.usual_us.get_or_insert(recent_us);
            *usual += weight * (recent_us - *usual);
        }
        count
    }

    /// Whether a piece may be sent now.
    pub(crate) fn may_send(&mut self, now_ms: u64) -> bool {
        if self.bytes_per_s == 0 {
            return true;
        }
        let rate = self.bytes_per_s.saturating_mul(self.parts) / PARTS;
        let over = |ms: u64| i64::try_from(rate.saturating_mul(ms) / 1_000).unwrap_or(i64::MAX);
        let passed_ms = now_ms.saturating_sub(self.credited_ms);
        let earned = over(passed_ms);
        // What is less than a byte is not lost: it is earned with the next millisecond.
        if earned > 0 || passed_ms > 1_000 {
            self.credit = self.credit.saturating_add(earned).min(over(SAVED_MS).max(1));
            self.credited_ms = now_ms;
        }
        self.credit > 0
    }

    /// A piece was sent.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.credit = self.credit.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 1 << 20;

    /// Bytes that go out in so many milliseconds.
    fn sent_in(throttle: &mut Throttle, now_ms: &mut u64, ms: u64, step_ms: u64) -> u64 {
        let (end, mut sent) = (*now_ms + ms, 0);
        while *now_ms < end {
            while throttle.may_send(*now_ms) {
                throttle.sent(PIECE);
                sent += PIECE as u64;
            }
            *now_ms += step_ms;
        }
        sent
    }

    #[test]
    fn copies_take_an_eighth_of_the_engine_where_somebody_calls() {
        let (mut share, mut now_ms, mut served) = (Share::default(), 0, 0);
        // How long it works for copies in 8 s, when it is called so often each millisecond.
        let mut worked_ms = |calls: u64| {
            let (end_ms, mut worked_ms) = (now_ms + 8_000, 0);
            while now_ms < end_ms {
                let ms = if share.may_work(now_ms) { 10 } else { 1 };
                served += calls * ms;
                if ms == 10 {
                    share.worked(now_ms, now_ms + ms, served);
                    worked_ms += ms;
                }
                now_ms += ms;
            }
            worked_ms
        };
        assert_eq!(worked_ms(1), 1_000);
        assert!(worked_ms(0) > 7_800, "where nobody calls, nobody waits");
        assert_eq!(worked_ms(1), 1_000);
    }

    #[test]
    fn a_rest_is_not_cut_short_by_what_takes_no_time() {
        let mut share = Share::default();
        share.worked(0, 10, 1);
        share.worked(20, 20, 2);
        assert!(!share.may_work(79) && share.may_work(80));
    }

    #[test]
    fn copies_go_out_at_the_rate_however_often_it_is_asked_and_nothing_is_saved_up_for_long() {
        for step_ms in [1, 10, 50] {
            let (mut throttle, mut now_ms) = (Throttle::new(32 << 20), 1_000);
            let first = sent_in(&mut throttle, &mut now_ms, 10_000, step_ms);
            assert!((310 << 20..=330 << 20).contains(&first), "{} MiB in 10 s", first >> 20);
            now_ms += 60_000;
            let burst = sent_in(&mut throttle, &mut now_ms, 1, 1);
            assert!(burst <= 4 << 20, "{burst} bytes after a pause");
        }
        let (mut slow, mut now_ms) = (Throttle::new(100), 0);
        assert_eq!(sent_in(&mut slow, &mut now_ms, 60_000, 1), PIECE as u64, "a piece goes out in debt");
        let (mut free, now_ms) = (Throttle::new(0), 0);
        (0..1_000).for_each(|_| free.sent(PIECE));
        assert!(free.may_send(now_ms));
    }

    #[test]
    fn copies_begin_slowly_where_somebody_writes_and_give_way_while_writes_take_more_than_twice_as_long() {
        let mut throttle = Throttle::new(16 << 20);
        let (mut now_ms, mut writes) = (0, (0, 0));
        let mut judged = |throttle: &mut Throttle, us: u64, copying| {
            now_ms += JUDGE_MS;
            assert!(throttle.is_due(now_ms));
            if us > 0 {
                writes = (writes.0 + 100, writes.1 + 100 * us);
            }
            throttle.judge(now_ms, writes, copying);
            throttle.parts
        };
        // Copies before anything is known of writes: nothing is judged by them.
        assert_eq!(judged(&mut throttle, 9_000, true), 16);
        assert_eq!(judged(&mut throttle, 0, false), 16, "where nobody writes, nobody waits");
        (0..120).for_each(|_| assert_eq!(judged(&mut throttle, 1_000, false), 2, "writes alone are never too slow"));
        let begun: Vec<u64> = (0..4).map(|_| judged(&mut throttle, 1_900, true)).collect();
        assert_eq!(begun, [4, 8, 16, 16]);
        let falling: Vec<u64> = (0..6).map(|_| judged(&mut throttle, 2_500, true)).collect();
        assert_eq!(falling, [8, 4, 2, 1, 1, 1]);
        assert_eq!(judged(&mut throttle, 0, true), 2, "nobody is slowed, but was a moment ago");
        let rising: Vec<u64> = (0..15).map(|_| judged(&mut throttle, 1_500, true)).collect();
        assert_eq!((rising[0], rising[13], rising[14]), (3, 16, 16));
        // A load that stays is usual after some minutes.
        let slow = (0..4_000).filter(|_| judged(&mut throttle, 3_000, true) == 1).count();
        assert!((200..1_200).contains(&slow), "{slow} judgements");
        assert_eq!(throttle.parts, 16);
    }
}
