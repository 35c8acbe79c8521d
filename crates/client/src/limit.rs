//! A time limit of the caller, below the deadlines of the options: the error at its end says what failed last.

use tokio::time::Instant;

tokio::task_local! {
    static LIMIT: Instant;
}

/// Runs `future` with `limit` as the latest deadline of its calls.
pub async fn within<F: Future>(limit: Instant, future: F) -> F::Output {
    LIMIT.scope(limit, future).await
}

/// Returns the earlier one of a deadline and the caller's limit.
pub(crate) fn limited(deadline: Instant) -> Instant {
    LIMIT.try_with(|limit| deadline.min(*limit)).unwrap_or(deadline)
}
