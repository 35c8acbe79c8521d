//! Random numbers of the operating system, from a seed: session ids, retry jitter, the order of hash tables.
//!
//! Each library asks the operating system by itself; all of them call the function of the C library that this one
//! replaces. Other threads than the simulation's get real random numbers, as do all threads before the seed is set.
#![allow(unsafe_code, reason = "a function of the C library can be replaced by one that has its name and nothing else")]

use engram_memory::mix64;
use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::io::Read as _;

thread_local! {
    /// The next number of this thread; `None` = ask the operating system.
    static NEXT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Sets the seed of this thread. Call it before anything asks for random numbers.
pub(crate) fn seed(seed: u64) {
    NEXT.set(Some(mix64(seed)));
}

/// Fills `length` bytes at `buffer`, like getrandom(2).
///
/// # Safety As for the function of the C library: `buffer` is valid for writes of `length` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getrandom(buffer: *mut c_void, length: usize, _flags: c_uint) -> isize {
    if buffer.is_null() || length == 0 {
        return 0;
    }
    // SAFETY: the caller says that it may be written; zeroed first, since a slice must not show what was never written.
    let bytes = unsafe {
        buffer.cast::<u8>().write_bytes(0, length);
        std::slice::from_raw_parts_mut(buffer.cast::<u8>(), length)
    };
    match NEXT.try_with(Cell::get).ok().flatten() {
        Some(mut next) => {
            for chunk in bytes.chunks_mut(8) {
                next = next.wrapping_add(0x9e37_79b9_7f4a_7c15);
                chunk.copy_from_slice(&mix64(next).to_le_bytes()[..chunk.len()]);
            }
            NEXT.set(Some(next));
        }
        None => {
            let filled = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(bytes));
            if filled.is_err() {
                return -1;
            }
        }
    }
    isize::try_from(length).unwrap_or(isize::MAX)
}
