//! Attention in which one key takes everything.

use crate::Matrix;

/// Returns the winning column of each row: the largest score, the lowest column on a tie; `None` if every score is missing.
pub fn winner_takes_all(scores: &Matrix) -> Vec<Option<u32>> {
    (0..scores.rows()).map(|row| best(scores.row(row)).map(|(column, _)| column)).collect()
}

/// Returns index and value of the first largest entry; `None` if all are missing.
pub(crate) fn best(row: &[f32]) -> Option<(u32, f32)> {
    let mut winner = None;
    let mut value = f32::NEG_INFINITY;
    for (column, &score) in (0..).zip(row) {
        if score > value {
            (winner, value) = (Some(column), score);
        }
    }
    winner.map(|column| (column, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_has_one_winner_the_lowest_on_ties() {
        let none = f32::NEG_INFINITY;
        let scores = Matrix::new("scores", 3, 3, vec![2.0, 2.0, 2.0, -9.0, -7.0, -7.0, none, none, none]).unwrap();
        assert_eq!(winner_takes_all(&scores), [Some(0), Some(1), None]);
    }
}
