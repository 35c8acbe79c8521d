//! The privacy budget of a run: charged before each round, never refunded, part of the checkpoint.

use serde::{Deserialize, Serialize};

use super::{Mechanism, pld, rdp};
use crate::error::{InvalidInput, require};

/// A budget and what was charged. Serializable: it is part of the run's state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    epsilon: f64,
    delta: f64,
    charges: Vec<(Mechanism, u64)>,
}

/// Epsilon at the budget's delta.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PrivacySpent {
    /// Upper bound by the privacy loss distribution: the value that is charged.
    pub epsilon: f64,
    /// Upper bound by Rényi divergence, for comparison.
    pub renyi_epsilon: f64,
    /// The budget less `epsilon`.
    pub remaining: f64,
    /// The fixed delta.
    pub delta: f64,
}

/// The next round does not fit the budget.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("privacy budget exhausted: the next round would spend epsilon {needed:.4} of {epsilon} at delta {delta:e}")]
pub struct BudgetExhausted {
    /// Epsilon after the round.
    pub needed: f64,
    /// The budget.
    pub epsilon: f64,
    /// The fixed delta.
    pub delta: f64,
}

impl Budget {
    /// Creates a budget.
    ///
    /// # Errors
    /// When epsilon is not above 0, or delta is not between 0 and 1/population.
    pub fn new(epsilon: f64, delta: f64, population: u64) -> Result<Self, InvalidInput> {
        require(epsilon > 0.0 && epsilon.is_finite(), "epsilon", epsilon, "above 0")?;
        require(population > 0, "population", population, "at least 1")?;
        let allowed = format!("above 0 and below 1/population, {}", 1.0 / population as f64);
        require(delta > 0.0 && delta * (population as f64) < 1.0, "delta", delta, &allowed)?;
        Ok(Self { epsilon, delta, charges: Vec::new() })
    }

    /// Charges one step of `mechanism`, before it runs. A repeated round is charged again.
    ///
    /// # Errors
    /// When the step does not fit the rest of the budget; nothing is charged then.
    pub fn charge(&mut self, mechanism: Mechanism) -> Result<(), BudgetExhausted> {
        let mut charges = self.charges.clone();
        match charges.iter_mut().find(|(charged, _)| *charged == mechanism) {
            Some((_, count)) => *count += 1,
            None => charges.push((mechanism, 1)),
        }
        let needed = pld::epsilon(&charges, self.delta);
        if needed > self.epsilon {
            return Err(BudgetExhausted { needed, epsilon: self.epsilon, delta: self.delta });
        }
        self.charges = charges;
        Ok(())
    }

    /// Returns how many further steps of `mechanism` fit the rest of the budget, at most `limit`.
    #[must_use]
    pub fn affordable(&self, mechanism: Mechanism, limit: u64) -> u64 {
        let fits = |steps: u64| {
            let mut charges = self.charges.clone();
            charges.push((mechanism, steps));
            pld::epsilon(&charges, self.delta) <= self.epsilon
        };
        if fits(limit) {
            return limit;
        }
        let (mut fit, mut excess) = (0, limit);
        while excess - fit > 1 {
            let middle = fit + (excess - fit) / 2;
            *if fits(middle) { &mut fit } else { &mut excess } = middle;
        }
        fit
    }

    /// Number of charged steps.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.charges.iter().map(|(_, count)| count).sum()
    }

    /// What was spent so far, and what remains.
    #[must_use]
    pub fn spent(&self) -> PrivacySpent {
        let epsilon = pld::epsilon(&self.charges, self.delta);
        let renyi = rdp::epsilon(&self.charges, self.delta, rdp::orders()).0;
        let renyi_epsilon = if self.charges.is_empty() { 0.0 } else { renyi };
        PrivacySpent { epsilon, renyi_epsilon, remaining: (self.epsilon - epsilon).max(0.0), delta: self.delta }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MECHANISM: Mechanism = Mechanism { sampling_rate: 0.1, noise_multiplier: 1.5 };

    #[test]
    fn no_round_starts_beyond_the_budget() {
        let mut budget = Budget::new(2.0, 1e-5, 1_000).unwrap();
        let mut rounds = 0;
        let exhausted = loop {
            match budget.charge(MECHANISM) {
                Ok(()) => rounds += 1,
                Err(exhausted) => break exhausted,
            }
        };
        assert!(rounds > 2, "{rounds}");
        assert!(exhausted.needed > 2.0);
        assert!(exhausted.to_string().starts_with("privacy budget exhausted"));
        let spent = budget.spent();
        assert!(spent.epsilon <= 2.0 && spent.renyi_epsilon > spent.epsilon);
        assert_eq!(budget.steps(), rounds, "a refused charge costs nothing");
        assert_eq!(budget.affordable(MECHANISM, 100), 0);
        assert_eq!(Budget::new(2.0, 1e-5, 1_000).unwrap().affordable(MECHANISM, 10 * rounds), rounds);
    }

    #[test]
    fn charges_survive_a_restart_and_repeated_rounds_cost_again() {
        let mut budget = Budget::new(5.0, 1e-5, 1_000).unwrap();
        budget.charge(MECHANISM).unwrap();
        let mut restored: Budget = serde_json::from_str(&serde_json::to_string(&budget).unwrap()).unwrap();
        assert_eq!(restored, budget);
        restored.charge(MECHANISM).unwrap();
        assert!(restored.spent().epsilon > budget.spent().epsilon);
        assert_eq!(restored.steps(), 2);
    }

    #[test]
    fn delta_is_below_one_in_the_population() {
        assert!(Budget::new(1.0, 1e-3, 1_000).is_err());
        assert!(Budget::new(1.0, 0.9e-3, 1_000).is_ok());
        assert!(Budget::new(0.0, 1e-5, 10).is_err());
        assert!(Budget::new(1.0, f64::NAN, 10).is_err());
        assert_eq!(Budget::new(1.0, 1e-5, 10).unwrap().spent().renyi_epsilon, 0.0);
    }
}
