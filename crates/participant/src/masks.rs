//! The client's part of secure aggregation over the wire.

use crate::participant::Participant;
use crate::{Error, refused};
use engram_federated::secure::{ClientMessage, CohortSettings, SecureClient, ServerMessage};
use engram_proto::v1;

/// Wait of one call for the next message of the server, in milliseconds.
const WAIT_MS: u32 = 20_000;

/// Masks an update and sends it; returns when the sum of its round is known.
///
/// The secrets live in this call: a client that is interrupted has dropped out of the round, and never masks another update with them.
pub(crate) async fn submit(
    participant: &Participant,
    task: &v1::FederatedTask,
    update: &[f32],
    loss: Option<f64>,
) -> Result<(), Error> {
    let settings = CohortSettings::decode(&task.cohort)?;
    let own = participant.keys().identity_key();
    let client = settings.clients.iter().find(|(_, key)| **key == own).map(|(client, _)| *client);
    let client = client.ok_or(Error::Protocol("cohort"))?;
    let values = clipped(update, task.clip);
    let mut state = SecureClient::new(settings, client, rand::random(), *participant.keys().identity())?;
    let mut message = Some(state.advertise());
    let mut received = 0;
    loop {
        let is_input = matches!(message, Some(ClientMessage::Input(_)));
        let request = v1::ExchangeMasksRequest {
            caller: participant.caller(),
            task: task.number,
            message: message.as_ref().map(ClientMessage::encode).unwrap_or_default().into(),
            received,
            wait_ms: WAIT_MS,
            loss: loss.filter(|_| is_input),
        };
        let answer = participant.client().federated_exchange(request).await?;
        refused(answer.refusal)?;
        if answer.complete {
            return Ok(());
        }
        if answer.message.is_empty() {
            // Nothing new yet: what was sent is known to the server.
            message = None;
            continue;
        }
        received += 1;
        let server = ServerMessage::decode(&answer.message)?;
        message = Some(match server {
            ServerMessage::Shares(_) => state.mask(&server, &values, 1)?,
            other => state.step(other)?,
        });
    }
}

/// Clips to a Euclidean norm; 0 = none.
fn clipped(update: &[f32], norm: f64) -> Vec<f32> {
    let length = update.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if norm <= 0.0 || length <= norm {
        return update.to_vec();
    }
    update.iter().map(|value| (f64::from(*value) * norm / length) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_are_clipped_before_they_are_masked() {
        assert_eq!(clipped(&[3.0, 4.0], 1.0), [0.6, 0.8]);
        assert_eq!(clipped(&[0.3, 0.4], 1.0), [0.3, 0.4]);
        assert_eq!(clipped(&[3.0, 4.0], 0.0), [3.0, 4.0]);
    }
}
