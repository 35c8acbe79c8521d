//! What a member receives, in order; and what it answers although it waits for its engine.

use crate::training::host::Inbound;
use engram_proto::v1;
use engram_proto::v1::training_order::Order;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, interval_at};

/// A sign of life that is due while a member waits.
#[derive(Debug, PartialEq)]
pub(super) enum SignOfLife {
    /// The answer to a probe.
    Answer(v1::GroupProbe),
    /// A report.
    Report,
}

/// Messages for a member.
pub(super) struct Inbox {
    messages: mpsc::Receiver<Inbound>,
    /// Messages that arrived while the member waited, at most as many as the queue has.
    deferred: VecDeque<Inbound>,
}

impl Inbox {
    pub(super) const fn new(messages: mpsc::Receiver<Inbound>) -> Self {
        Self { messages, deferred: VecDeque::new() }
    }

    /// Returns the next message; `None` after the last one.
    pub(super) async fn next(&mut self) -> Option<Inbound> {
        match self.deferred.pop_front() {
            Some(message) => Some(message),
            None => self.messages.recv().await,
        }
    }

    /// Waits for an answer of the engine, `None` without one. Meanwhile passes signs of life to `show`, and defers all other messages.
    pub(super) async fn wait_for<T>(
        &mut self,
        mut answer: oneshot::Receiver<T>,
        report_every: Duration,
        mut show: impl FnMut(SignOfLife),
    ) -> Option<T> {
        let mut reports = interval_at(Instant::now() + report_every, report_every);
        loop {
            let has_room = self.deferred.len() < self.messages.max_capacity();
            tokio::select! {
                biased;
                answer = &mut answer => return answer.ok(),
                Some(message) = self.messages.recv(), if has_room => match message {
                    Inbound::Order(Order::Probe(probe)) => show(SignOfLife::Answer(probe)),
                    other => self.deferred.push_back(other),
                },
                _ = reports.tick() => show(SignOfLife::Report),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn probes_are_answered_and_reports_sent_while_the_engine_finishes_a_step() {
        let (sender, messages) = mpsc::channel(8);
        let (mut inbox, (applied, answer)) = (Inbox::new(messages), oneshot::channel());
        let probe = v1::GroupProbe {};
        sender.send(Inbound::Order(Order::Stop(v1::StopTraining { complete: true }))).await.unwrap();
        sender.send(Inbound::Order(Order::Probe(probe))).await.unwrap();
        let (mut applied, mut shown) = (Some(applied), Vec::new());
        let show = |sign| {
            shown.push(sign);
            // The engine ends once the member has answered and reported.
            if shown.len() == 3 {
                applied.take().unwrap().send(7).unwrap();
            }
        };
        assert_eq!(inbox.wait_for(answer, Duration::from_millis(5), show).await, Some(7));
        assert_eq!(shown, [SignOfLife::Answer(probe), SignOfLife::Report, SignOfLife::Report]);
        // What changes the member comes later, in order.
        sender.send(Inbound::Order(Order::Stop(v1::StopTraining { complete: false }))).await.unwrap();
        drop(sender);
        for expected in [true, false] {
            let message = inbox.next().await;
            let found = matches!(message, Some(Inbound::Order(Order::Stop(stop))) if stop.complete == expected);
            assert!(found, "complete: {expected}");
        }
        assert!(inbox.next().await.is_none());
        let (applied, answer) = oneshot::channel::<u64>();
        drop(applied);
        assert_eq!(inbox.wait_for(answer, Duration::from_millis(5), |_| ()).await, None);
    }
}
