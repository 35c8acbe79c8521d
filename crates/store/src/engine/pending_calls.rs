//! Collects answers that arrive one by one for callers that wait for all of them.

use std::collections::HashMap;

/// Called with all answers of one call, in its order.
pub(crate) type Callback<T> = Box<dyn FnOnce(Vec<T>) + Send>;

/// Identifies one outstanding answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Waiter {
    call: u64,
    index: usize,
}

struct Call<T> {
    answers: Vec<Option<T>>,
    left: usize,
    done: Callback<T>,
}

/// Calls that wait for answers.
pub(crate) struct PendingCalls<T> {
    next: u64,
    calls: HashMap<u64, Call<T>>,
}

impl<T> Default for PendingCalls<T> {
    fn default() -> Self {
        Self { next: 0, calls: HashMap::new() }
    }
}

impl<T> PendingCalls<T> {
    /// Begins a call that needs `count` answers; one that needs none completes at once.
    pub(crate) fn begin(&mut self, count: usize, done: Callback<T>) -> impl Fn(usize) -> Waiter + use<T> {
        let call = self.next;
        self.next += 1;
        if count == 0 {
            done(Vec::new());
        } else {
            let answers = (0..count).map(|_| None).collect();
            self.calls.insert(call, Call { answers, left: count, done });
        }
        move |index| Waiter { call, index }
    }

    /// Provides one answer, exactly once; calls back with the last one.
    pub(crate) fn answer(&mut self, waiter: Waiter, answer: T) {
        let call = self.calls.get_mut(&waiter.call).expect("a call remains until all its answers are given");
        let slot = &mut call.answers[waiter.index];
        assert!(slot.is_none(), "an answer is given once");
        *slot = Some(answer);
        call.left -= 1;
        if call.left == 0 {
            let call = self.calls.remove(&waiter.call).expect("the call was found above");
            (call.done)(call.answers.into_iter().map(|answer| answer.expect("no answer is outstanding")).collect());
        }
    }
}
