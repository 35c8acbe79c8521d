//! The largest mean weight of a cycle: the eigenvalue of an irreducible max-plus matrix.

use crate::{Error, Matrix};

/// Returns the largest mean weight of a cycle by Karp's theorem; `None` if the graph has no cycle.
///
/// Source: R. M. Karp, "A characterization of the minimum cycle mean in a digraph", 1978. Every node is a start with weight 0, so the graph
/// need not be strongly connected. Computed in f64.
///
/// # Errors
/// The matrix is not square.
pub fn cycle_mean(edges: &Matrix) -> Result<Option<f64>, Error> {
    Error::dimension("columns of a square matrix", edges.columns(), edges.rows())?;
    let nodes = edges.rows();
    // walks[k][v]: heaviest walk of exactly k edges that ends in v.
    let mut walks = vec![vec![0.0_f64; nodes]];
    for _ in 0..nodes {
        let last = walks.last().expect("the walks of no edge are there");
        let mut next = vec![f64::NEG_INFINITY; nodes];
        for (from, &weight) in last.iter().enumerate() {
            for (to, &edge) in edges.row(from).iter().enumerate() {
                next[to] = next[to].max(weight + f64::from(edge));
            }
        }
        walks.push(next);
    }
    let (longest, shorter) = walks.split_last().expect("there is at least one level");
    let mean_of = |node: usize| -> f64 {
        let means =
            shorter.iter().enumerate().map(|(edges, walk)| (longest[node] - walk[node]) / (nodes - edges) as f64);
        means.fold(f64::INFINITY, f64::min)
    };
    let ends = (0..nodes).filter(|&node| longest[node] > f64::NEG_INFINITY);
    let best = ends.map(mean_of).fold(f64::NEG_INFINITY, f64::max);
    Ok((best > f64::NEG_INFINITY).then_some(best))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::power;

    #[test]
    fn cycle_mean_equals_the_growth_of_matrix_powers() {
        let none = f32::NEG_INFINITY;
        // Cycles: 0-1 with mean (2 + 3) / 2, 2 with mean 1, 0-1-2 with mean (2 - 1 + 4) / 3.
        let edges = vec![none, 2.0, none, 3.0, none, -1.0, 4.0, none, 1.0];
        let matrix = Matrix::new("edges", 3, 3, edges).unwrap();
        let mean = cycle_mean(&matrix).unwrap().unwrap();
        assert!((mean - 2.5).abs() < 1e-12, "{mean}");
        // The heaviest closed walk of 2k edges grows by the cycle mean per edge.
        let grown = power(&matrix, 40, 1).unwrap().row(0)[0] - power(&matrix, 20, 1).unwrap().row(0)[0];
        assert!((f64::from(grown) / 20.0 - mean).abs() < 1e-6);
    }

    #[test]
    fn graph_without_cycle_has_no_mean() {
        let none = f32::NEG_INFINITY;
        let chain = Matrix::new("edges", 2, 2, vec![none, 5.0, none, none]).unwrap();
        assert_eq!(cycle_mean(&chain).unwrap(), None);
        assert!(cycle_mean(&Matrix::missing(2, 3)).is_err());
    }
}
