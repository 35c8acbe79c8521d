//! Viterbi decoding: the most probable state sequence of a hidden Markov model, as max-plus products.

use crate::attention::best;
use crate::{Error, Matrix};

/// A hidden Markov model in natural logarithms of probabilities. Missing entries are impossible.
#[derive(Debug, Clone, PartialEq)]
pub struct HiddenMarkovModel {
    prior: Vec<f32>,
    /// `transition[from][to]`, transposed: row `to`.
    into: Matrix,
    /// `emission[state][symbol]`.
    emission: Matrix,
}

/// A decoded state sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Path {
    /// One state per observation.
    pub states: Vec<u32>,
    /// Logarithm of the joint probability of states and observations.
    pub score: f32,
}

impl HiddenMarkovModel {
    /// Creates a model of n states and m symbols from log-probabilities: `prior` (n), `transition` (n x n, from x to) and `emission`
    /// (n x m).
    ///
    /// # Errors
    /// Shapes that do not fit; a prior that is NaN or positive infinity.
    pub fn new(prior: Vec<f32>, transition: &Matrix, emission: Matrix) -> Result<Self, Error> {
        let states = prior.len();
        if states == 0 {
            return Err(Error::Empty("prior"));
        }
        Error::dimension("rows of the transition matrix", transition.rows(), states)?;
        Error::dimension("columns of the transition matrix", transition.columns(), states)?;
        Error::dimension("rows of the emission matrix", emission.rows(), states)?;
        let prior = Matrix::new("prior", 1, states, prior)?.entries().to_vec();
        Ok(Self { prior, into: transition.transposed(), emission })
    }

    /// Returns the most probable state sequence. Ties go to the lowest state.
    ///
    /// # Errors
    /// No observation; a symbol out of range; no sequence with a probability above zero.
    pub fn decode(&self, observations: &[u32]) -> Result<Path, Error> {
        let (states, symbols) = (self.prior.len(), self.emission.columns());
        let (&first, rest) = observations.split_first().ok_or(Error::Empty("observations"))?;
        if let Some(&symbol) = observations.iter().find(|&&symbol| symbol as usize >= symbols) {
            return Err(Error::Dimension {
                what: "symbols up to the largest",
                found: symbol as usize + 1,
                expected: symbols,
            });
        }
        let emitted = |state: usize, symbol: u32| self.emission.row(state)[symbol as usize];
        let mut values: Vec<f32> = (0..states).map(|state| self.prior[state] + emitted(state, first)).collect();
        reachable(&values, 0)?;
        let mut pointers = Vec::with_capacity(rest.len() * states);
        let mut sums = vec![0.0; states];
        for (step, &symbol) in rest.iter().enumerate() {
            let mut next = Vec::with_capacity(states);
            for state in 0..states {
                for (sum, (value, edge)) in sums.iter_mut().zip(values.iter().zip(self.into.row(state))) {
                    *sum = value + edge;
                }
                let (from, value) = best(&sums).unwrap_or((0, f32::NEG_INFINITY));
                pointers.push(from);
                next.push(value + emitted(state, symbol));
            }
            reachable(&next, step + 1)?;
            values = next;
        }
        let (last, score) = best(&values).expect("a state is reachable");
        let mut path = vec![last];
        for step in (0..rest.len()).rev() {
            let state = *path.last().expect("it starts with the last state");
            path.push(pointers[step * states + state as usize]);
        }
        path.reverse();
        Ok(Path { states: path, score })
    }
}

fn reachable(values: &[f32], step: usize) -> Result<(), Error> {
    best(values).map(|_| ()).ok_or(Error::Unreachable { step })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tries every sequence; ties go to the sequence that the back pointers prefer, so scores are compared.
    fn exhaustive(prior: &[f32], transition: &Matrix, emission: &Matrix, observations: &[u32]) -> f32 {
        let states = prior.len();
        let mut best = f32::NEG_INFINITY;
        for code in 0..states.pow(observations.len() as u32) {
            let (mut code, mut score, mut last) = (code, 0.0_f32, None);
            for &symbol in observations {
                let state = code % states;
                code /= states;
                // The same order of additions as the decoder.
                score = last.map_or(prior[state], |from: usize| score + transition.row(from)[state]);
                score += emission.row(state)[symbol as usize];
                last = Some(state);
            }
            best = best.max(score);
        }
        best
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn decoded_score_equals_exhaustive_search(
            entries in proptest::collection::vec(prop_oneof![5 => -6.0_f32..0.0, 1 => Just(f32::NEG_INFINITY)], 3 + 9 + 12),
            observations in proptest::collection::vec(0_u32..4, 6),
        ) {
            let transition = Matrix::new("transition", 3, 3, entries[3..12].to_vec()).unwrap();
            let emission = Matrix::new("emission", 3, 4, entries[12..].to_vec()).unwrap();
            let expected = exhaustive(&entries[..3], &transition, &emission, &observations);
            let model = HiddenMarkovModel::new(entries[..3].to_vec(), &transition, emission.clone()).unwrap();
            match model.decode(&observations) {
                Ok(path) => {
                    prop_assert_eq!(path.score, expected);
                    let mut score = entries[path.states[0] as usize] + emission.row(path.states[0] as usize)[observations[0] as usize];
                    for (pair, &symbol) in path.states.windows(2).zip(&observations[1..]) {
                        score += transition.row(pair[0] as usize)[pair[1] as usize];
                        score += emission.row(pair[1] as usize)[symbol as usize];
                    }
                    prop_assert_eq!(score, expected);
                }
                Err(error) => {
                    prop_assert_eq!(expected, f32::NEG_INFINITY);
                    let is_unreachable = matches!(error, Error::Unreachable { .. });
                    prop_assert!(is_unreachable);
                }
            }
        }
    }

    #[test]
    fn prior_decides_the_first_state() {
        let even = Matrix::new("even", 2, 2, vec![-0.7; 4]).unwrap();
        let decode =
            |prior: Vec<f32>| HiddenMarkovModel::new(prior, &even, even.clone()).unwrap().decode(&[0]).unwrap();
        assert_eq!(decode(vec![-2.0, -0.1]).states, [1]);
        assert_eq!(decode(vec![-0.1, -2.0]).states, [0]);
        assert!(HiddenMarkovModel::new(vec![0.0], &even, even.clone()).is_err());
    }
}
