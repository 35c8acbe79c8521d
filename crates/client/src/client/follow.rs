//! A client that nobody uses hears of every change of the map all the same.
//!
//! What it knows of addresses would otherwise be as old as its last call that failed. Where all workers were replaced meanwhile, one
//! after the other and each in good order, nobody whom it knows is left, and the next call would wait for connections to processes
//! that are gone.

use super::Core;
use engram_proto::v1;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::sleep;

/// How long a worker may keep an answer that brings nothing new.
const KEPT: Duration = Duration::from_secs(25);
/// And how long it may take over it.
const DEADLINE: Duration = Duration::from_secs(30);
/// Between two answers, at most: a map that changes again and again is not heard more often.
const PAUSE: Duration = Duration::from_millis(100);
/// The same after many that did not come.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

impl Core {
    /// Follows the map from now on, as long as somebody has this client.
    pub(super) fn follow(self: &Arc<Self>) {
        let task = tokio::spawn(follow(Arc::downgrade(self)));
        if self.follower.set(task.abort_handle()).is_err() {
            task.abort();
        }
    }

    /// Where to ask next: another living worker than the one before, or else an endpoint.
    fn another(&self, before: &str) -> Option<String> {
        let map = self.map.borrow().clone();
        let alive = map.iter().flat_map(|map| map.workers.values()).filter(|worker| worker.alive);
        let addresses = alive.map(|worker| worker.address(self.options.plane));
        let mut addresses: Vec<&str> = addresses.filter(|it| !it.is_empty() && *it != before).collect();
        if addresses.is_empty() {
            addresses.extend(self.options.endpoints.iter().map(String::as_str));
        }
        let chosen = rand::random_range(0..addresses.len().max(1));
        addresses.get(chosen).map(|address| (*address).to_owned())
    }
}

/// Waits at one worker for news, and goes to another when there were none for a while, or it does not answer.
async fn follow(client: Weak<Core>) {
    let (mut address, mut brought_news) = (String::new(), false);
    // What was heard last; 0 = nothing.
    let (mut version, mut stamp) = (0, 0);
    let mut pause = PAUSE;
    loop {
        sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
        let Some(core) = client.upgrade() else { return };
        if !brought_news {
            let Some(another) = core.another(&address) else { return };
            address = another;
        }
        let question = v1::PartitionMapRequest { newer_than: version, wait_ms: KEPT.as_millis() as u32, known: stamp };
        let asked = core.question(&address, question, DEADLINE);
        // Whoever drops the client waits for nobody.
        drop(core);
        let answer = match asked {
            Ok(asked) => asked.await,
            Err(failure) => Err(failure),
        };
        let Some(core) = client.upgrade() else { return };
        let heard = answer.and_then(|reply| {
            let stamp = reply.stamp;
            core.map_of(&address, reply).map(|map| (stamp, map))
        });
        match heard {
            Ok((said, map)) => {
                brought_news = said != stamp || map.version > version;
                (version, stamp) = (map.version, said);
                core.set_map(map);
                pause = PAUSE;
            }
            Err(failure) => {
                tracing::debug!(worker = address, why = failure.problem.message, "the map is followed elsewhere");
                brought_news = false;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}
