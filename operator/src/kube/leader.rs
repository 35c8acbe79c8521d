//! Leader election: reads and writes the Lease; [`crate::kube::lease`] decides.

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client, Config};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::context::Key;
use crate::kube::lease::{DURATION_MS, Election, LeaseAction, LeaseView, PERIOD_MS};

/// Deadline of a Lease request: several fit into the renew deadline.
const DEADLINE: Duration = Duration::from_secs(2);

/// Leadership of this process.
pub(crate) struct Leadership {
    me: String,
    election: Mutex<Election>,
    started: Instant,
    /// Whether there is no election and this process is always the leader.
    is_election_disabled: bool,
    leads: watch::Sender<bool>,
}

impl Leadership {
    pub(crate) fn new(pod: &str, elected: bool) -> Self {
        // A restarted pod of the same name is another process: the lease of its predecessor must expire.
        let identity = format!("{pod}_{:08x}", Timestamp::now().as_nanosecond() as u32 ^ std::process::id());
        let election = Mutex::new(Election::new(identity.clone()));
        Self {
            me: identity,
            election,
            started: Instant::now(),
            is_election_disabled: !elected,
            leads: watch::Sender::new(!elected),
        }
    }

    fn election(&self) -> MutexGuard<'_, Election> {
        self.election.lock()
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Returns whether this process is the leader.
    pub(crate) fn is_leader(&self) -> bool {
        self.is_election_disabled || self.election().is_leader(self.now_ms())
    }

    /// Notifies of leadership changes.
    pub(crate) fn changes(&self) -> watch::Receiver<bool> {
        self.leads.subscribe()
    }

    fn publish(&self) {
        let leads = self.is_leader();
        let changed = self.leads.send_if_modified(|published| std::mem::replace(published, leads) != leads);
        if changed {
            tracing::info!(leads, holder = self.me, "leadership");
        }
    }
}

/// Runs the election until `stopped`, then releases the Lease.
pub(crate) async fn run_election(
    mut config: Config,
    place: Key,
    leadership: Arc<Leadership>,
    mut stopped: watch::Receiver<bool>,
) -> Result<()> {
    // A hidden retry would make a renewal older than it appears.
    config.default_retry = false;
    let client = Client::try_from(config).context("failed to create a client of the API server")?;
    let api: Api<Lease> = Api::namespaced(client, &place.namespace);
    let mut ticks = tokio::time::interval(Duration::from_millis(PERIOD_MS));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            _ = stopped.wait_for(|stopped| *stopped) => break,
        }
        if let Err(error) = try_renew(&api, &place.name, &leadership).await {
            tracing::warn!(%error, lease = %place, "failed to renew lease");
        }
        leadership.publish();
    }
    if leadership.is_leader() {
        leadership.election().lost();
        if let Err(error) = release(&api, &place.name, &leadership.me).await {
            tracing::warn!(%error, "failed to release lease; it will expire");
        }
    }
    leadership.publish();
    Ok(())
}

async fn try_renew(api: &Api<Lease>, name: &str, leadership: &Leadership) -> Result<()> {
    let lease = timeout(DEADLINE, api.get_opt(name)).await.context("no response")??;
    let view = lease.as_ref().map(view);
    let verdict = leadership.election().decide(view.as_ref(), leadership.now_ms());
    let sent_ms = leadership.now_ms();
    let written = match (verdict, lease) {
        (LeaseAction::Wait, _) => {
            leadership.election().lost();
            return Ok(());
        }
        (LeaseAction::Create, _) | (_, None) => {
            let lease = Lease {
                metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
                spec: Some(lease_spec(&leadership.me, None)),
            };
            timeout(DEADLINE, api.create(&PostParams::default(), &lease)).await
        }
        (LeaseAction::Renew | LeaseAction::Claim, Some(mut lease)) => {
            lease.spec = Some(lease_spec(&leadership.me, lease.spec.take()));
            // Replaces the resource version that was read: of concurrent claims one fails.
            timeout(DEADLINE, api.replace(name, &PostParams::default(), &lease)).await
        }
    };
    match written.context("no response")? {
        Ok(_) => {
            leadership.election().renewed(sent_ms);
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 409 => {
            leadership.election().lost();
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

async fn release(api: &Api<Lease>, name: &str, me: &str) -> Result<()> {
    let mut lease = timeout(DEADLINE, api.get(name)).await.context("no response")??;
    let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_deref() == Some(me)) else {
        return Ok(());
    };
    spec.holder_identity = Some(String::new());
    timeout(DEADLINE, api.replace(name, &PostParams::default(), &lease)).await.context("no response")??;
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

/// Returns the Lease spec for its holder. The times are informational: clocks are never compared.
fn lease_spec(me: &str, old: Option<LeaseSpec>) -> LeaseSpec {
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
