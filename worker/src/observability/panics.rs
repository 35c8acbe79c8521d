//! Counts panics of this process, caught or not: of calls, tasks and threads.

use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Counts panics from now on, in addition to what the current panic hook does.
pub fn count_panics() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            report(info);
        }));
    });
}

/// Returns the number of panics counted.
pub(crate) fn count() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

/// Returns the message of a caught panic.
pub(crate) fn message(payload: &(dyn std::any::Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_any_thread_is_counted() {
        count_panics();
        let before = count();
        let payload = std::thread::spawn(|| panic!("a panic of a test")).join().unwrap_err();
        assert!(count() > before);
        assert_eq!(message(&*payload), "a panic of a test");
    }
}
