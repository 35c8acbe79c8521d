//! The task of a run's driver, whose end can be waited for.

use tokio::sync::watch;
use tokio::task::AbortHandle;

/// A started driver.
pub(super) struct DriverTask {
    task: AbortHandle,
    running: watch::Receiver<bool>,
}

impl DriverTask {
    /// Starts a driver; `ended` is notified of its end.
    pub(super) fn spawn(ended: watch::Sender<()>, driver: impl Future<Output = ()> + Send + 'static) -> Self {
        let (signal, running) = watch::channel(true);
        let end = EndSignal { ended, signal };
        let task = tokio::spawn(async move {
            let _end = end;
            driver.await;
        });
        Self { task: task.abort_handle(), running }
    }

    pub(super) fn abort(&self) {
        self.task.abort();
    }

    pub(super) fn is_finished(&self) -> bool {
        !*self.running.borrow()
    }

    /// Returns a receiver that changes to false when the driver has ended.
    pub(super) fn running(&self) -> watch::Receiver<bool> {
        self.running.clone()
    }
}

/// Announces the end of a driver when dropped, also if it is aborted or panics.
struct EndSignal {
    ended: watch::Sender<()>,
    signal: watch::Sender<bool>,
}

impl Drop for EndSignal {
    fn drop(&mut self) {
        self.signal.send_replace(false);
        self.ended.send_replace(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::future::BoxFuture;
    use std::future::{pending, ready};

    async fn panicking() {
        panic!("a driver");
    }

    #[tokio::test]
    async fn the_end_of_a_driver_is_announced_however_it_ends() {
        let drivers: [(BoxFuture<'static, ()>, bool); 3] =
            [(Box::pin(ready(())), false), (Box::pin(panicking()), false), (Box::pin(pending()), true)];
        for (driver, is_aborted) in drivers {
            let (ended, mut ends) = watch::channel(());
            let task = DriverTask::spawn(ended, driver);
            assert!(!task.is_finished());
            if is_aborted {
                task.abort();
            }
            task.running().wait_for(|running| !running).await.unwrap();
            assert!(task.is_finished());
            ends.changed().await.unwrap();
        }
    }
}
