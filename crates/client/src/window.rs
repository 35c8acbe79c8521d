//! Sequence numbers of one session: dense per partition, with a bounded window of open ones.

use engram_memory::session::WINDOW;
use engram_memory::{PartitionId, SessionId};
use parking_lot::Mutex;
use tokio::time::Instant;

/// A session id and its sequence numbers.
#[derive(Debug)]
pub(crate) struct Generation {
    pub(crate) id: SessionId,
    pub(crate) renew_at: Instant,
    windows: Mutex<Vec<Window>>,
}

/// Window of one partition.
#[derive(Debug, Clone, Copy, Default)]
struct Window {
    /// Highest assigned number.
    assigned: u64,
    /// All numbers up to here have their final response.
    answered: u64,
    /// Which numbers above `answered` have it, too; bit 0 = `answered + 1`.
    ahead: u64,
}

impl Generation {
    pub(crate) fn new(id: SessionId, renew_at: Instant, partitions: u32) -> Self {
        Self { id, renew_at, windows: Mutex::new(vec![Window::default(); partitions as usize]) }
    }

    /// Returns the next number of a partition; `None` while the whole window is open, held by a missing response.
    pub(crate) fn take(&self, partition: PartitionId) -> Option<u64> {
        let mut windows = self.windows.lock();
        let window = windows.get_mut(partition.0 as usize)?;
        if window.assigned - window.answered >= WINDOW {
            return None;
        }
        window.assigned += 1;
        Some(window.assigned)
    }

    /// Marks number `seq` as finally answered.
    pub(crate) fn answer(&self, partition: PartitionId, seq: u64) {
        let mut windows = self.windows.lock();
        let Some(window) = windows.get_mut(partition.0 as usize) else { return };
        let Some(above) = seq.checked_sub(window.answered + 1) else { return };
        window.ahead |= 1_u64.checked_shl(above as u32).unwrap_or(0);
        let done = window.ahead.trailing_ones();
        window.ahead = window.ahead.checked_shr(done).unwrap_or(0);
        window.answered += u64::from(done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_assigned_only_after_the_one_a_window_before_is_answered() {
        let id = SessionId { opened_ms: 1, random: 2 };
        let generation = Generation::new(id, Instant::now(), 2);
        let partition = PartitionId(1);
        let first: Vec<u64> = std::iter::from_fn(|| generation.take(partition)).collect();
        assert_eq!(first, (1..=WINDOW).collect::<Vec<_>>());
        (2..=WINDOW).for_each(|seq| generation.answer(partition, seq));
        assert_eq!(generation.take(partition), None, "1 is still open");
        generation.answer(partition, 1);
        let second: Vec<u64> = std::iter::from_fn(|| generation.take(partition)).collect();
        assert_eq!(second, (WINDOW + 1..=2 * WINDOW).collect::<Vec<_>>());
        assert_eq!(generation.take(PartitionId(0)), Some(1), "partitions are counted separately");
        assert_eq!(generation.take(PartitionId(2)), None, "no such partition");
    }
}
