//! Ranks that are threads of one process.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{Error, Parked, Transport, Wait};
use crate::message::Tag;

/// Messages that wait for a receiver. More than the executor sends ahead (five chunks of at most ten subtrees), so that no cycle of full queues exists.
const QUEUED_MESSAGES: usize = 64;
/// How long a thread sleeps before it checks for cancellation.
const SLICE: Duration = Duration::from_millis(5);

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<(Tag, Vec<u8>)>,
    free: Vec<Vec<u8>>,
    closed: bool,
}

#[derive(Debug, Default)]
struct Mailbox {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // A panic of another thread leaves the queue whole: every change is one operation.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait_timeout(queue, SLICE).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// One rank of a group of threads.
#[derive(Debug)]
pub struct Memory {
    rank: usize,
    ranks: usize,
    /// Mailbox of each ordered pair, `from * ranks + to`.
    mailboxes: Arc<Vec<Mailbox>>,
    parked: Vec<Parked>,
}

/// Creates the transports of a group of threads. Dropping one ends its connections.
pub fn memory_group(ranks: usize) -> Vec<Memory> {
    let mailboxes: Arc<Vec<Mailbox>> = Arc::new((0..ranks * ranks).map(|_| Mailbox::default()).collect());
    let parked = || (0..ranks).map(|_| Parked::default()).collect();
    (0..ranks).map(|rank| Memory { rank, ranks, mailboxes: Arc::clone(&mailboxes), parked: parked() }).collect()
}

impl Transport for Memory {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn send(&mut self, to: usize, tag: Tag, payload: &[u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        let mailbox = &self.mailboxes[self.rank * self.ranks + to];
        let mut queue = mailbox.lock();
        while queue.messages.len() >= QUEUED_MESSAGES && !queue.closed {
            wait.idle(to)?;
            queue = mailbox.wait(queue);
        }
        if queue.closed {
            return Err(Error::Closed { rank: to, source: None });
        }
        wait.progress();
        let mut buffer = queue.free.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(payload);
        queue.messages.push_back((tag, buffer));
        mailbox.changed.notify_all();
        Ok(())
    }

    fn receive(&mut self, tag: Tag, into: &mut [u8], wait: &mut Wait<'_>) -> Result<(), Error> {
        let from = usize::from(tag.from);
        let parked = &mut self.parked[from];
        if parked.take(tag, into)? {
            return Ok(());
        }
        let mailbox = &self.mailboxes[from * self.ranks + self.rank];
        let mut queue = mailbox.lock();
        loop {
            while let Some((found, payload)) = queue.messages.pop_front() {
                wait.progress();
                mailbox.changed.notify_all();
                if found == tag && payload.len() == into.len() {
                    into.copy_from_slice(&payload);
                    queue.free.push(payload);
                    return Ok(());
                }
                parked.put(from, found, payload)?;
            }
            if parked.take(tag, into)? {
                return Ok(());
            }
            if queue.closed {
                return Err(Error::Closed { rank: from, source: None });
            }
            wait.idle(from)?;
            queue = mailbox.wait(queue);
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for peer in 0..self.ranks {
            for index in [self.rank * self.ranks + peer, peer * self.ranks + self.rank] {
                let mailbox = &self.mailboxes[index];
                mailbox.lock().closed = true;
                mailbox.changed.notify_all();
            }
        }
    }
}
