//! Safe matrix products in f32 over the `gemm` crate.
//!
//! A product runs on the calling thread, with the inner dimension added in an order that depends on the shapes and
//! the processor alone: the same input gives the same bits on every machine with the same instruction set.
#![allow(unsafe_code, reason = "the gemm crate takes raw pointers; the bounds are checked here")]

use gemm::Parallelism;

/// A matrix within a slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Row-major and contiguous.
    pub(crate) fn new(data: &'a [f32], rows: usize, columns: usize) -> Self {
        Self::strided(data, rows, columns, columns)
    }

    /// Row-major; consecutive rows are `row_stride` values apart.
    pub(crate) fn strided(data: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(fits(data.len(), rows, columns, row_stride), "matrix exceeds its buffer");
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transposed matrix, without moving data.
    pub(crate) fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

fn fits(length: usize, rows: usize, columns: usize, row_stride: usize) -> bool {
    rows == 0 || columns == 0 || (columns <= row_stride && (rows - 1) * row_stride + columns <= length)
}

/// `out = scale * a * b`, with `out` row-major and rows `row_stride` values apart.
pub(crate) fn multiply(out: &mut [f32], row_stride: usize, a: Matrix<'_>, b: Matrix<'_>, scale: f32) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product differ");
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(fits(out.len(), m, n, row_stride), "product exceeds its buffer");
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        out.chunks_mut(row_stride).take(m).for_each(|row| row[..n].fill(0.0));
        return;
    }
    // SAFETY: `Matrix` checked that every element of `a` and `b` lies within its slice, the assertions above that the
    // inner dimensions agree and that `out` holds m rows of n values. `out` is borrowed mutably, so it overlaps neither.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            row_stride as isize,
            false,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            0.0,
            scale,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// `out[j] = sum of a[i][j]` over the rows of a row-major matrix of `out.len()` columns, rows added in order.
pub(crate) fn column_sums(out: &mut [f32], a: &[f32]) {
    out.fill(0.0);
    for row in a.chunks_exact(out.len()) {
        out.iter_mut().zip(row).for_each(|(o, x)| *o += x);
    }
}

/// `out[i] += x[i]`.
pub(crate) fn add(out: &mut [f32], x: &[f32]) {
    out.iter_mut().zip(x).for_each(|(o, x)| *o += x);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_transposed_and_strided_matrices_are_exact_on_integers() {
        let a: Vec<f32> = (0..12).map(|i| i as f32).collect(); // 3 x 4
        let b: Vec<f32> = (0..10).map(|i| (i * i) as f32).collect(); // 2 rows of 3 columns, 5 apart
        let mut out = vec![-1.0; 4 * 3];
        // out (4 x 3) = a[..2]^T (4 x 2) * b (2 x 3)
        multiply(&mut out, 3, Matrix::new(&a[..8], 2, 4).transposed(), Matrix::strided(&b, 2, 3, 5), 2.0);
        for i in 0..4 {
            for j in 0..3 {
                assert_eq!(out[i * 3 + j], 2.0 * (a[i] * b[j] + a[4 + i] * b[5 + j]));
            }
        }
    }

    #[test]
    #[should_panic(expected = "matrix exceeds its buffer")]
    fn matrix_beyond_its_buffer_is_refused() {
        let _ = Matrix::new(&[0.0; 5], 2, 3);
    }
}
