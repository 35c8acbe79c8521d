//! The Lease: who of several replicas writes. [`crate::lease`] judges, this reads and writes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, Config};
use tokio::sync::watch;
use tokio::time::timeout;

use super::Key;
use crate::lease::{DURATION_MS, Election, LeaseView, PERIOD_MS, Verdict};

/// Longest request about the Lease: several fit into the time that a holder leads after its last renewal.
const DEADLINE: Duration = Duration::from_secs(2);

/// Whether this process writes.
pub(super) struct Leadership {
    me: String,
    election: Mutex<Election>,
    began: Instant,
    /// There is no election: this process always writes.
    alone: bool,
    leads: watch::Sender<bool>,
}

impl Leadership {
    pub(super) fn new(pod: &str, elected: bool) -> Self {
        // A pod that is started anew under its old name is another process: what it held before has to run out.
        let me = format!("{pod}_{:08x}", Timestamp::now().as_nanosecond() as u32 ^ std::process::id());
        let election = Mutex::new(Election::new(me.clone()));
        Self { me, election, began: Instant::now(), alone: !elected, leads: watch::Sender::new(!elected) }
    }

    fn election(&self) -> MutexGuard<'_, Election> {
        self.election.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    /// Whether this process may write now.
    pub(super) fn leads(&self) -> bool {
        self.alone || self.election().leads(self.now_ms())
    }

    /// Changes of it.
    pub(super) fn changes(&self) -> watch::Receiver<bool> {
        self.leads.subscribe()
    }

    fn publish(&self) {
        let leads = self.leads();
        let changed = self.leads.send_if_modified(|told| std::mem::replace(told, leads) != leads);
        if changed {
            tracing::info!(leads, holder = self.me, "leadership");
        }
    }
}

/// Takes part in the election until `stopped`, then gives the Lease back.
pub(super) async fn take_part(
    mut config: Config,
    place: Key,
    leadership: Arc<Leadership>,
    mut stopped: watch::Receiver<bool>,
) -> Result<()> {
    // A retry that nobody sees would make a renewal older than it looks.
    config.default_retry = false;
    let client = Client::try_from(config).context("failed to make a client of the API server")?;
    let api: Api<Lease> = Api::namespaced(client, &place.namespace);
    let mut ticks = tokio::time::interval(Duration::from_millis(PERIOD_MS));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = stopped.wait_for(|stopped| *stopped) => break,
        }
        if let Err(error) = step(&api, &place.name, &leadership).await {
            tracing::warn!(%error, lease = %place, "the lease was not reached");
        }
        leadership.publish();
    }
    if leadership.leads() {
        leadership.election().lost();
        if let Err(error) = give_back(&api, &place.name, &leadership.me).await {
            tracing::warn!(%error, "the lease was not given back: it has to run out");
        }
    }
    leadership.publish();
    Ok(())
}

async fn step(api: &Api<Lease>, name: &str, leadership: &Leadership) -> Result<()> {
    let found = timeout(DEADLINE, api.get_opt(name)).await.context("no answer")??;
    let view = found.as_ref().map(view);
    let verdict = leadership.election().judge(view.as_ref(), leadership.now_ms());
    let sent_ms = leadership.now_ms();
    let written = match (verdict, found) {
        (Verdict::Wait, _) => {
            leadership.election().lost();
            return Ok(());
        }
        (Verdict::Create, _) | (_, None) => {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
                spec: Some(held(&leadership.me, None)),
            };
            timeout(DEADLINE, api.create(&PostParams::default(), &lease)).await
        }
        (Verdict::Renew | Verdict::Claim, Some(mut lease)) => {
            lease.spec = Some(held(&leadership.me, lease.spec.take()));
            // With the resource version that was read: of two that claim it one is refused.
            timeout(DEADLINE, api.replace(name, &PostParams::default(), &lease)).await
        }
    };
    match written.context("no answer")? {
        Ok(_) => {
            leadership.election().written(sent_ms);
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 409 => {
            leadership.election().lost();
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

async fn give_back(api: &Api<Lease>, name: &str, me: &str) -> Result<()> {
    let mut lease = timeout(DEADLINE, api.get(name)).await.context("no answer")??;
    let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_deref() == Some(me)) else {
        return Ok(());
    };
    spec.holder_identity = Some(String::new());
    timeout(DEADLINE, api.replace(name, &PostParams::default(), &lease)).await.context("no answer")??;
    Ok(())
}

fn view(lease: &Lease) -> LeaseView {
    let spec = lease.spec.as_ref();
    let seconds = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
    LeaseView {
        holder: spec.and_then(|spec| spec.holder_identity.clone()),
        duration_ms: seconds.map_or(DURATION_MS, |seconds| seconds * 1_000),
        resource_version: lease.metadata.resource_version.clone().unwrap_or_default(),
    }
}

/// The Lease as its holder writes it. The times are for people: nobody compares clocks.
fn held(me: &str, old: Option<LeaseSpec>) -> LeaseSpec {
    let old = old.unwrap_or_default();
    let renews = old.holder_identity.as_deref() == Some(me);
    let now = Some(MicroTime(Timestamp::now()));
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: Some((DURATION_MS / 1_000) as i32),
        acquire_time: if renews { old.acquire_time } else { now.clone() },
        renew_time: now,
        lease_transitions: Some(old.lease_transitions.unwrap_or(0) + i32::from(!renews)),
        ..LeaseSpec::default()
    }
}
