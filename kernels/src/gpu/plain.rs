//! Numbers as bytes in memory order, for transfers.
#![allow(unsafe_code)] // Reinterprets numbers as bytes.

/// A number, or an array of numbers.
///
/// # Safety
/// The type has no padding, and every bit pattern is valid.
pub(super) unsafe trait Plain: Copy + Default {}

// SAFETY: integers and floats have no padding and no invalid bytes.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for u128 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f64 {}
// SAFETY: an array has the padding of its elements: none.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] where [T; N]: Default {}

/// Returns the bytes of some values.
pub(super) fn bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: the values are initialised, without padding, and borrowed as long as the result.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// Returns the bytes of some values for writing.
pub(super) fn bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes`, and every bit pattern is a valid value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
