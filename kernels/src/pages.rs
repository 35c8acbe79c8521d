//! Memory on huge pages.
#![allow(unsafe_code)] // A call of the system, which only advises.

/// What a huge page has at least, on the processors whose systems have them.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Asks the system to back these by huge pages where they are not backed yet, and it has some: who writes to thousands of places in
/// turn meets more pages of 4 KiB than the processor remembers the addresses of.
pub(crate) fn ask_for_huge<T>(values: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        use std::ffi::{c_int, c_void};
        const MADV_HUGEPAGE: c_int = 14;
        unsafe extern "C" {
            fn madvise(address: *mut c_void, length: usize, advice: c_int) -> c_int;
        }
        let (address, length) = (values.as_mut_ptr(), size_of_val(values));
        let skipped = address.addr().next_multiple_of(HUGE_PAGE) - address.addr();
        let whole = length.saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
        if whole > 0 {
            // SAFETY: these pages lie inside of what is borrowed, and the advice changes no byte of them. Without it all is
            // slower, so what the call says does not matter.
            unsafe { madvise(address.cast::<u8>().add(skipped).cast::<c_void>(), whole, MADV_HUGEPAGE) };
        }
    }
    let _ = values;
}
