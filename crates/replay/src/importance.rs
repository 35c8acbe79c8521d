//! Importance weights: `v_i = (N p_i / T)^-beta`, divided by the largest, which belongs to the smallest positive priority.

use crate::plan::Plan;

/// A linear schedule of beta.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Beta {
    /// Value at step 0, in [0, 1].
    pub start: f64,
    /// Value from `steps` on, in [0, 1].
    pub end: f64,
    /// Steps of the ramp.
    pub steps: u64,
}

impl Beta {
    /// Returns beta at a step.
    pub fn at(&self, step: u64) -> f64 {
        if step >= self.steps {
            return self.end;
        }
        self.start + (self.end - self.start) * (step as f64 / self.steps as f64)
    }
}

/// Returns the importance weight in (0, 1] of an item with a positive priority.
///
/// The number of items and the sum of priorities cancel in the ratio to the largest weight: `(smallest / p_i)^beta`.
///
/// # Panics
/// The priority is 0: such an item is never drawn.
pub fn weight(plan: &Plan, priority: u32, beta: f64) -> f64 {
    assert!(priority > 0, "an item with priority 0 is never drawn");
    (f64::from(plan.smallest()) / f64::from(priority)).powf(beta)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PartitionSum;
    use engram_memory::PartitionId;

    #[test]
    fn weight_equals_the_definition_and_the_smallest_priority_has_one() {
        let sum = |partition, total, items, smallest| PartitionSum {
            partition: PartitionId(partition),
            total,
            items,
            smallest,
        };
        // Priorities 2, 10 and 4, 4 over two partitions.
        let plan = Plan::new(vec![sum(0, 12, 2, 2), sum(1, 8, 2, 4)]).unwrap();
        let raw = |priority: f64| (4.0 * priority / 20.0_f64).powf(-0.4);
        for priority in [2, 4, 10] {
            let expected = raw(f64::from(priority)) / raw(2.0);
            assert!((weight(&plan, priority, 0.4) - expected).abs() < 1e-12);
        }
        assert_eq!(weight(&plan, 2, 0.7), 1.0);
        assert_eq!(weight(&plan, 10, 0.0), 1.0);
    }

    #[test]
    fn beta_rises_linearly_and_stays() {
        let beta = Beta { start: 0.4, end: 1.0, steps: 10 };
        assert_eq!([beta.at(0), beta.at(5), beta.at(10), beta.at(99)], [0.4, 0.7, 1.0, 1.0]);
        assert_eq!(Beta { start: 0.4, end: 1.0, steps: 0 }.at(0), 1.0);
    }
}
