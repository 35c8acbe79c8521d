//! What is started once per key: members of runs.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Holds the value of a key, or is locked while it is started.
type Slot<V> = Arc<tokio::sync::Mutex<Option<V>>>;

/// Values by key. One that is started delays callers of the same key only.
pub(super) struct Slots<K, V> {
    slots: Mutex<BTreeMap<K, Slot<V>>>,
    is_open: fn(&V) -> bool,
}

impl<K: Ord + Copy, V: Clone> Slots<K, V> {
    /// Creates it without values; a value of which `is_open` is false is forgotten.
    pub(super) fn new(is_open: fn(&V) -> bool) -> Self {
        Self { slots: Mutex::default(), is_open }
    }

    /// Returns the value of a key, waiting for one that is being started.
    pub(super) async fn get(&self, key: K) -> Option<V> {
        let slot = self.slots.lock().get(&key).cloned()?;
        let value = slot.lock().await;
        value.clone().filter(self.is_open)
    }

    /// Returns the value of a key, which is started if there is none.
    ///
    /// # Errors
    /// That of `start`.
    pub(super) async fn get_or_start<E>(&self, key: K, start: impl Future<Output = Result<V, E>>) -> Result<V, E> {
        let slot = {
            let mut slots = self.slots.lock();
            slots.retain(|_, slot| !self.is_over(slot));
            Arc::clone(slots.entry(key).or_default())
        };
        let mut value = slot.lock().await;
        if let Some(value) = value.as_ref().filter(|it| (self.is_open)(it)) {
            return Ok(value.clone());
        }
        let started = start.await?;
        *value = Some(started.clone());
        Ok(started)
    }

    /// Whether a slot has no open value and no caller waits for one.
    fn is_over(&self, slot: &Slot<V>) -> bool {
        let is_open = |slot: &Slot<V>| slot.try_lock().is_ok_and(|value| value.as_ref().is_some_and(self.is_open));
        // Callers get slots under the lock of the map, which is held.
        Arc::strong_count(slot) == 1 && !is_open(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::sync::oneshot;
    use tokio::time::timeout;

    const SOON: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn slow_start_delays_no_other_key() {
        let slots = Arc::new(Slots::<u8, u8>::new(|value| *value < 100));
        let (release, released) = oneshot::channel();
        let (began, begun) = oneshot::channel();
        let first = tokio::spawn({
            let slots = Arc::clone(&slots);
            let start = async move {
                began.send(()).unwrap();
                released.await
            };
            async move { slots.get_or_start(1, start).await }
        });
        begun.await.unwrap();
        let other = timeout(SOON, slots.get_or_start(2, async { Ok::<_, ()>(22) })).await;
        assert_eq!(other.expect("it does not wait for the first key"), Ok(22));
        let same = tokio::spawn({
            let slots = Arc::clone(&slots);
            async move { slots.get_or_start(1, async { Err("started twice") }).await }
        });
        release.send(11).unwrap();
        assert_eq!(first.await.unwrap(), Ok(11));
        assert_eq!(same.await.unwrap(), Ok(11));
        assert_eq!((slots.get(1).await, slots.get(3).await), (Some(11), None));
    }

    #[tokio::test]
    async fn failed_start_and_closed_value_are_started_again() {
        let slots = Slots::<u8, u8>::new(|value| *value < 100);
        assert_eq!(slots.get_or_start(1, async { Err("failed") }).await, Err("failed"));
        assert_eq!(slots.get_or_start(1, async { Ok::<_, ()>(100) }).await, Ok(100));
        assert_eq!(slots.get(1).await, None);
        assert_eq!(slots.get_or_start(1, async { Ok::<_, ()>(1) }).await, Ok(1));
        assert_eq!(slots.get_or_start(2, async { Ok::<_, ()>(200) }).await, Ok(200));
        assert_eq!(slots.get_or_start(3, async { Ok::<_, ()>(3) }).await, Ok(3));
        assert_eq!(slots.slots.lock().keys().copied().collect::<Vec<_>>(), [1, 3]);
    }
}
