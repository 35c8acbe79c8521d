//! What bounds the requests of a worker: calls in flight, unread answers, requests that wait for a partition.

use crate::lifecycle::activation;
use crate::observability::cpu_pressure::CpuPressure;
use crate::service::read::AnswerBytes;
use crate::write::admission::Admission;
use tokio::sync::Semaphore;

/// Limits of the requests of one worker.
pub(crate) struct Limits {
    admission: Admission,
    answer_bytes: AnswerBytes,
    waiting: Semaphore,
}

impl Limits {
    /// Creates the limits; without `has_pressure`, processors are never seen as busy.
    pub(crate) fn new(has_pressure: bool) -> Self {
        let pressure = if has_pressure { CpuPressure::of_process() } else { CpuPressure::unknown() };
        Self {
            admission: Admission::new(pressure),
            answer_bytes: AnswerBytes::default(),
            waiting: Semaphore::new(activation::MAX_WAITING),
        }
    }

    /// Limits of reads and writes in flight.
    pub(crate) const fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Bytes of answers of several pages that clients have not read yet.
    pub(crate) const fn answer_bytes(&self) -> &AnswerBytes {
        &self.answer_bytes
    }

    /// Permits for requests that wait for a partition that is being activated.
    pub(crate) const fn waiting(&self) -> &Semaphore {
        &self.waiting
    }
}
