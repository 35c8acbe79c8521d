//! Numbers as bytes, as they lie in memory: what goes to a device and comes back.
#![allow(unsafe_code)] // Numbers are looked at as bytes.

/// A number, or an array of them: without padding, and any bytes are one.
///
/// # Safety
/// Both must hold.
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
// SAFETY: an array has the padding of its elements: none.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] where [T; N]: Default {}

/// The bytes of some values.
pub(super) fn bytes<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: the values are initialised, without padding, and borrowed as long as the result.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of some values, to be replaced.
pub(super) fn bytes_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as in `bytes`, and any bytes are values.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}
