//! The cost model of all-reduce algorithms, and the choice per message size.
//!
//! The Hockney model with the cost of additions: alpha is the latency of a message, beta the time per byte on the wire, gamma the time to add a
//! byte, overhead the processor time per further message. All ranks compute the same choice from the same [`Link`].

/// An all-reduce algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// Every rank sends everything to every other; each adds in rank order.
    OneShot,
    /// Pairs exchange everything in log2(n) rounds; n must be a power of two.
    RecursiveDoubling,
    /// Recursive halving, then recursive doubling; n must be a power of two.
    HalvingDoubling,
    /// Each rank owns a part: it receives the part from all, adds in rank order, and sends the sum to all.
    Direct,
    /// Parts travel around a ring, once to add and once to distribute.
    Ring,
    /// One rank adds everything and broadcasts the sum: the baseline that others are compared with, never chosen.
    GatherBroadcast,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Self; 6] = [
        Self::OneShot,
        Self::RecursiveDoubling,
        Self::HalvingDoubling,
        Self::Direct,
        Self::Ring,
        Self::GatherBroadcast,
    ];

    /// Returns whether the algorithm works for `ranks` ranks.
    pub const fn supports(self, ranks: usize) -> bool {
        match self {
            Self::RecursiveDoubling | Self::HalvingDoubling => ranks.is_power_of_two(),
            Self::OneShot | Self::Direct | Self::Ring | Self::GatherBroadcast => true,
        }
    }

    /// Returns whether each element is added in rank order, whatever the sizes: the same bits for a fixed membership.
    pub const fn adds_in_rank_order(self) -> bool {
        matches!(self, Self::OneShot | Self::Direct | Self::GatherBroadcast)
    }

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneShot => "OneShot",
            Self::RecursiveDoubling => "RecursiveDoubling",
            Self::HalvingDoubling => "HalvingDoubling",
            Self::Direct => "Direct",
            Self::Ring => "Ring",
            Self::GatherBroadcast => "GatherBroadcast",
        }
    }

    /// Returns the algorithm with the lowest cost; with `rank_order`, of those that add in rank order.
    pub(crate) fn cheapest(ranks: usize, rank_order: bool, cost: impl Fn(Self) -> f64) -> Self {
        let allowed = |algorithm: &Self| {
            algorithm.supports(ranks)
                && (!rank_order || algorithm.adds_in_rank_order())
                && *algorithm != Self::GatherBroadcast
        };
        // Direct is always allowed. On a tie the first of the list.
        Self::ALL.into_iter().filter(allowed).fold(Self::Direct, |best, it| {
            let (new, old) = (cost(it), cost(best));
            if new < old || (new == old && it < best) { it } else { best }
        })
    }
}

/// Measured properties of the slowest link of a group.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Latency of a message in seconds.
    pub alpha: f64,
    /// Seconds per byte on the wire (full duplex).
    pub beta: f64,
    /// Seconds per byte to add.
    pub gamma: f64,
    /// Seconds of processor time per message beyond the first of a phase.
    pub overhead: f64,
}

impl Link {
    /// Loopback TCP, until measured.
    pub const LOOPBACK: Self = Self { alpha: 25e-6, beta: 1.0 / 3.6e9, gamma: 1.0 / 11e9, overhead: 8e-6 };
    /// Shared memory of one host, until measured.
    pub const SHARED_MEMORY: Self = Self { alpha: 2e-6, beta: 1.0 / 11e9, gamma: 1.0 / 11e9, overhead: 1e-6 };
    /// 25 Gbit/s Ethernet, until measured.
    pub const ETHERNET_25G: Self = Self { alpha: 25e-6, beta: 1.0 / 2.9e9, gamma: 1.0 / 20e9, overhead: 5e-6 };

    /// Returns the predicted seconds of an all-reduce of `bytes` over `ranks`.
    pub fn seconds(&self, algorithm: Algorithm, ranks: usize, bytes: usize) -> f64 {
        let Self { alpha, beta, gamma, overhead } = *self;
        if ranks < 2 {
            return 0.0;
        }
        let (n, size) = (ranks as f64, bytes as f64);
        let rounds = f64::from(ranks.next_power_of_two().trailing_zeros());
        let further = (n - 2.0) * overhead;
        let share = (n - 1.0) / n;
        match algorithm {
            Algorithm::OneShot => alpha + further + (n - 1.0) * size * (beta + gamma),
            Algorithm::RecursiveDoubling => rounds * (alpha + size * (beta + gamma)),
            Algorithm::HalvingDoubling => 2.0 * rounds * alpha + share * size * (2.0 * beta + gamma),
            Algorithm::Direct => 2.0 * (alpha + further) + share * size * (2.0 * beta + gamma),
            Algorithm::Ring => 2.0 * (n - 1.0) * alpha + share * size * (2.0 * beta + gamma),
            Algorithm::GatherBroadcast => 2.0 * (alpha + further) + (n - 1.0) * size * (2.0 * beta + gamma),
        }
    }

    /// Returns the cheapest algorithm that keeps the promise: with `rank_order`, only those that add in rank order.
    pub fn choose(&self, ranks: usize, bytes: usize, rank_order: bool) -> Algorithm {
        Algorithm::cheapest(ranks, rank_order, |algorithm| self.seconds(algorithm, ranks, bytes))
    }

    /// Returns the smallest bucket in bytes whose fixed cost is at most a tenth: `9 alpha_total / (2 (n - 1) / n beta)`.
    pub fn bucket_bytes(&self, ranks: usize) -> f64 {
        let n = ranks.max(2) as f64;
        let fixed = 2.0 * (self.alpha + (n - 2.0) * self.overhead);
        9.0 * fixed / (2.0 * (n - 1.0) / n * self.beta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: usize = 1 << 20;

    #[test]
    fn choice_follows_the_published_table() {
        let loopback = Link::LOOPBACK;
        let small = loopback.choose(2, 4_096, false);
        assert!(matches!(small, Algorithm::RecursiveDoubling | Algorithm::OneShot), "{small:?}");
        assert_eq!(loopback.choose(4, 64 << 10, false), Algorithm::RecursiveDoubling);
        assert_eq!(loopback.choose(4, 16 * MB, false), Algorithm::Direct);
        assert_eq!(loopback.choose(16, 16 * MB, false), Algorithm::HalvingDoubling);
        assert_eq!(Link::SHARED_MEMORY.choose(8, 64 << 10, false), Algorithm::HalvingDoubling);
        assert_eq!(Link::ETHERNET_25G.choose(8, 4_096, false), Algorithm::OneShot);
    }

    #[test]
    fn rank_order_restricts_the_choice() {
        for ranks in 2..20 {
            for bytes in [64, 4_096, 1 << 16, MB, 64 * MB] {
                let chosen = Link::LOOPBACK.choose(ranks, bytes, true);
                assert!(
                    chosen.adds_in_rank_order() && chosen != Algorithm::GatherBroadcast,
                    "{ranks} {bytes} {chosen:?}"
                );
                assert!(Link::LOOPBACK.choose(ranks, bytes, false).supports(ranks));
            }
        }
    }

    #[test]
    fn gather_broadcast_costs_n_times_as_much_at_large_sizes() {
        for (ranks, factor) in [(2_usize, 2.0), (4, 4.0), (8, 8.0)] {
            let ratio = Link::LOOPBACK.seconds(Algorithm::GatherBroadcast, ranks, 64 * MB)
                / Link::LOOPBACK.seconds(Algorithm::Direct, ranks, 64 * MB);
            assert!((ratio / factor - 1.0).abs() < 0.1, "{ranks}: {ratio}");
        }
    }

    #[test]
    fn bucket_size_matches_the_worked_example() {
        let bytes = Link::LOOPBACK.bucket_bytes(2);
        assert!((bytes / 1.6e6 - 1.0).abs() < 0.05, "{bytes}");
    }
}
