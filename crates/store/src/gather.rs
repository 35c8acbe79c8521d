//! Answers that come one by one, given to who waits for all of them.

use std::collections::HashMap;

/// What is called with all answers of one call, in its order.
pub(crate) type Done<T> = Box<dyn FnOnce(Vec<T>) + Send>;

/// One answer that is owed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Waiter {
    call: u64,
    index: usize,
}

struct Call<T> {
    answers: Vec<Option<T>>,
    left: usize,
    done: Done<T>,
}

/// The calls that wait for answers.
pub(crate) struct Gather<T> {
    next: u64,
    calls: HashMap<u64, Call<T>>,
}

impl<T> Default for Gather<T> {
    fn default() -> Self {
        Self { next: 0, calls: HashMap::new() }
    }
}

impl<T> Gather<T> {
    /// Begins a call that needs `count` answers; it is done at once when there are none.
    pub(crate) fn begin(&mut self, count: usize, done: Done<T>) -> impl Fn(usize) -> Waiter + use<T> {
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

    /// Gives one answer; calls back when it was the last one owed. Each is given once.
    pub(crate) fn answer(&mut self, waiter: Waiter, answer: T) {
        let call = self.calls.get_mut(&waiter.call).expect("a call stays until all its answers are given");
        let place = &mut call.answers[waiter.index];
        assert!(place.is_none(), "an answer is given once");
        *place = Some(answer);
        call.left -= 1;
        if call.left == 0 {
            let call = self.calls.remove(&waiter.call).expect("it was just there");
            (call.done)(call.answers.into_iter().map(|answer| answer.expect("none is left")).collect());
        }
    }
}
