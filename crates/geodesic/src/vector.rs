//! The hot loops: matrix products over the `gemm` crate, and tanh and its derivative over slices.
//!
//! A product runs on the calling thread. The element-wise loops contain no fused operations, so every vector width
//! gives the same bits.
#![allow(unsafe_code, reason = "gemm takes raw pointers, and wider instructions are selected at run time")]

use gemm::Parallelism;

/// A row-major matrix within a slice, possibly seen transposed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    data: &'a [f64],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    pub(crate) fn new(data: &'a [f64], rows: usize, columns: usize) -> Self {
        assert_eq!(data.len(), rows * columns, "matrix differs from its buffer");
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// `out += a b`, or `out = a b` if `accumulate` is false; `out` is row-major.
pub(crate) fn multiply(out: &mut [f64], a: Matrix<'_>, b: Matrix<'_>, accumulate: bool) {
    assert_eq!(a.columns, b.rows, "inner dimensions of a product differ");
    assert_eq!(out.len(), a.rows * b.columns, "product differs from its buffer");
    assert!(a.rows > 0 && a.columns > 0 && b.columns > 0, "matrices of a product must not be empty");
    // SAFETY: `Matrix::new` checked that every element of `a` and `b` lies within its slice, the assertions above that
    // the inner dimensions agree and that `out` holds the product. `out` is borrowed mutably, so it overlaps neither.
    unsafe {
        gemm::gemm(
            a.rows,
            b.columns,
            a.columns,
            out.as_mut_ptr(),
            1,
            b.columns as isize,
            accumulate,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// `out += a b` in f32; all row-major, `a` with `inner` columns.
pub(crate) fn multiply_f32(out: &mut [f32], a: &[f32], b: &[f32], inner: usize) {
    let (rows, columns) = (a.len() / inner, b.len() / inner);
    assert!(rows > 0 && columns > 0, "matrices of a product must not be empty");
    assert_eq!((a.len(), b.len()), (rows * inner, inner * columns), "matrix differs from its buffer");
    assert_eq!(out.len(), rows * columns, "product differs from its buffer");
    // SAFETY: the assertions above say that `a`, `b` and `out` hold row-major matrices of these shapes. `out` is borrowed mutably, so it
    // overlaps neither.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            inner,
            out.as_mut_ptr(),
            1,
            columns as isize,
            true,
            a.as_ptr(),
            1,
            inner as isize,
            b.as_ptr(),
            1,
            columns as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

/// Defines a function whose loop is compiled for several instruction sets, the widest available being called.
macro_rules! widest {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $kind:ty),*) $body:block) => {
        $(#[$doc])*
        pub(crate) fn $name($($argument: $kind),*) {
            #[inline(always)]
            fn portable($($argument: $kind),*) $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512dq")]
                fn avx512($($argument: $kind),*) {
                    portable($($argument),*);
                }
                #[target_feature(enable = "avx2")]
                fn avx2($($argument: $kind),*) {
                    portable($($argument),*);
                }
                if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
                    // SAFETY: the processor has the instructions that the function was compiled for.
                    return unsafe { avx512($($argument),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has the instructions that the function was compiled for.
                    return unsafe { avx2($($argument),*) };
                }
            }
            portable($($argument),*);
        }
    };
}

widest! {
    /// Replaces every value by its hyperbolic tangent; absolute error below 3e-16.
    tanh(values: &mut [f64]) {
        for x in values {
            *x = tanh_one(*x);
        }
    }
}

widest! {
    /// As [`tanh`] in f32; absolute error below 2e-7.
    tanh_f32(values: &mut [f32]) {
        for x in values {
            *x = tanh_one_f32(*x);
        }
    }
}

widest! {
    /// `delta[i] *= 1 - y[i]^2`: the adjoint of tanh from its output.
    tanh_adjoint(delta: &mut [f64], y: &[f64]) {
        for (d, &y) in delta.iter_mut().zip(y) {
            *d *= 1.0 - y * y;
        }
    }
}

widest! {
    /// `delta[r][j] = adjoint[r] * weight[j] * (1 - y[r][j]^2)`, rows of `weight.len()` values.
    last_layer_adjoint(delta: &mut [f64], adjoint: &[f64], weight: &[f64], y: &[f64]) {
        let width = weight.len();
        for ((d, y), &a) in delta.chunks_exact_mut(width).zip(y.chunks_exact(width)).zip(adjoint) {
            for ((d, &y), &w) in d.iter_mut().zip(y).zip(weight) {
                *d = a * w * (1.0 - y * y);
            }
        }
    }
}

widest! {
    /// `out[j] += sum over rows of scale[r] * a[r][j]`, rows added in order.
    add_scaled_rows(out: &mut [f64], a: &[f64], scale: &[f64]) {
        for (row, &s) in a.chunks_exact(out.len()).zip(scale) {
            for (o, &x) in out.iter_mut().zip(row) {
                *o += s * x;
            }
        }
    }
}

widest! {
    /// `out[j] += sum over rows of a[r][j]`, rows added in order.
    add_rows(out: &mut [f64], a: &[f64]) {
        for row in a.chunks_exact(out.len()) {
            for (o, &x) in out.iter_mut().zip(row) {
                *o += x;
            }
        }
    }
}

/// Adding and subtracting this rounds a number of moderate size to an integer, which then sits in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
const LN_2_HIGH: f64 = 6.931_471_803_691_238e-1;
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;

/// `tanh x = sign(x) (1 - 2 / (exp(2 |x|) + 1))`, without branches.
#[inline(always)]
fn tanh_one(x: f64) -> f64 {
    // Above 20 the result is 1 to rounding. NaN stays NaN.
    let magnitude = x.abs();
    let y = 2.0 * if magnitude > 20.0 { 20.0 } else { magnitude };
    let shifted = y * std::f64::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (y - n * LN_2_HIGH) - n * LN_2_LOW;
    // Taylor series of exp on |r| <= ln(2) / 2: the first term left out is below 5e-18.
    let mut p = 1.0 / 6_227_020_800.0;
    for c in TAYLOR {
        p = p * r + c;
    }
    let power = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1023 << 52));
    let e = p * power;
    (1.0 - 2.0 / (e + 1.0)).copysign(x)
}

/// As [`tanh_one`] in f32.
#[inline(always)]
fn tanh_one_f32(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    // Above 10 the result is 1 to rounding.
    let magnitude = x.abs();
    let y = 2.0 * if magnitude > 10.0 { 10.0 } else { magnitude };
    let shifted = y * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts, the first with few digits, so that its product with n is exact.
    let r = (y - n * 0.693_359_4) + n * 2.121_944_4e-4;
    let mut p = 1.0 / 5_040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + c;
    }
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    (1.0 - 2.0 / (p * power + 1.0)).copysign(x)
}

/// 1/12! down to 1/0!.
const TAYLOR: [f64; 13] = [
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
    1.0,
    1.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tanh_agrees_with_the_standard_library_to_rounding() {
        let inputs: Vec<f64> =
            (-4000..=4000).map(|i| f64::from(i) * 0.00731).chain([1e-9, -1e-300, 0.0, 700.0, -1e9]).collect();
        let mut values = inputs.clone();
        tanh(&mut values);
        for (x, y) in inputs.iter().zip(&values) {
            assert!((y - x.tanh()).abs() < 3e-16, "tanh({x}) = {y}");
        }
    }

    #[test]
    fn tanh_in_f32_agrees_with_the_standard_library() {
        let x: Vec<f32> = (0..4001).map(|i| (i - 2000) as f32 * 0.006).collect();
        let mut y = x.clone();
        tanh_f32(&mut y);
        for (x, y) in x.iter().zip(&y) {
            assert!((f64::from(*y) - f64::from(*x).tanh()).abs() < 2e-7, "tanh {x} = {y}");
        }
    }

    #[test]
    fn products_of_transposed_matrices_are_exact_on_integers() {
        let a: Vec<f64> = (0..6).map(f64::from).collect(); // 3 x 2
        let b: Vec<f64> = (0..12).map(|i| f64::from(i * i)).collect(); // 3 x 4
        let mut out = vec![1.0; 8];
        multiply(&mut out, Matrix::new(&a, 3, 2).transposed(), Matrix::new(&b, 3, 4), true);
        for i in 0..2 {
            for j in 0..4 {
                let expected: f64 = (0..3).map(|k| a[k * 2 + i] * b[k * 4 + j]).sum();
                assert_eq!(out[i * 4 + j], 1.0 + expected);
            }
        }
    }
}
