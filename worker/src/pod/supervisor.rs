//! First process of the container: starts the worker, forwards stop signals, and reports the worker's death to the coordinators.
//!
//! Invariants: it reports only the death of the incarnation that it waited for; it exits after the report, with the worker's
//! status, so that the kubelet sees the cause and restarts the container; it writes nothing to disk.

use super::identity::Identity;
use super::socket;
use crate::lifecycle::exit;
use crate::lifecycle::supervise::{POLL_INTERVAL, member, report_death};
use crate::options::Options;
use anyhow::{Context as _, Result};
use engram_client::Network;
use engram_identity::{ExpectedPeer, Role};
use engram_proto::v1::{GetWorkerStatusRequest, MemberId};
use futures::future::join_all;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::net::lookup_host;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// Time for an orderly stop of the worker: less than the kubelet waits, so that the death can still be reported.
const STOP_DEADLINE: Duration = Duration::from_secs(52);
/// Maximum duration of the report: unreachable coordinators learn of the death from silence.
const REPORT_DEADLINE: Duration = Duration::from_secs(2);

/// Runs a worker with these options, with a certificate if there is an `identity` to obtain one for, until it exits or this process
/// is asked to stop. Returns the exit status.
///
/// # Errors
/// The worker failed to start, or cannot be waited for.
pub async fn supervise(mut options: Options, identity: Option<Identity>) -> Result<i32> {
    let mut terminate = signal(SignalKind::terminate()).context("failed to listen for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to listen for signals")?;
    let mut network = Network::default();
    if let Some(identity) = identity {
        let keys = tokio::select! {
            keys = identity.obtain() => keys,
            _ = terminate.recv() => return Ok(0),
            _ = interrupt.recv() => return Ok(0),
        };
        options.tls = Some(identity.tls(&keys));
        tokio::spawn(identity.renew_when_due(Arc::clone(&keys)));
        network = Network::with_tls(keys, ExpectedPeer::any(Role::Coordinator));
    }
    let options = &options;
    let (status, worker, process_id) = loop {
        let mut child = start(options).await?;
        let process_id = child.id().context("a process that was just started has an id")?;
        let worker = WorkerIdentity::of(options);
        let status = tokio::select! {
            status = child.wait() => status,
            _ = terminate.recv() => stop(&mut child, process_id).await,
            _ = interrupt.recv() => stop(&mut child, process_id).await,
        };
        let status = status.context("failed to wait for the worker")?;
        if status.code() != Some(exit::RESTART) {
            break (status, worker, process_id);
        }
        tracing::info!("restarting the worker");
    };
    let status_text = exit::description(status);
    if status.success() {
        tracing::info!("the worker has stopped");
    } else {
        tracing::error!(status = status_text, "the worker exited");
        super::write_termination_message(&format!("the worker exited: {status_text}"));
    }
    // A worker that never announced its member id has no death to report.
    if let Some(member) = worker.member() {
        report(options, &network, &member, process_id, &status_text).await;
    }
    Ok(exit_code(status))
}

/// Starts the worker, which reads its options from standard input.
async fn start(options: &Options) -> Result<Child> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let mut command = Command::new(program);
    command.args(["serve", "--config", "-"]).stdin(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().context("failed to start the worker")?;
    let mut stdin = child.stdin.take().context("the worker's standard input was piped")?;
    let text = serde_json::to_vec(options).context("failed to write the worker's options")?;
    // If the worker exited before it read them, its exit status has the reason.
    if let Err(error) = stdin.write_all(&text).await {
        tracing::warn!(%error, "the worker did not read its options");
    }
    Ok(child)
}

/// Stops the worker in order; kills it after the deadline.
async fn stop(child: &mut Child, process_id: u32) -> std::io::Result<ExitStatus> {
    tracing::info!("stop requested");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(process_id).map_err(std::io::Error::other)?);
    // It has not been waited for yet, so the process id is still its own.
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
    if let Ok(status) = timeout(STOP_DEADLINE, child.wait()).await {
        return status;
    }
    tracing::error!("the worker did not stop within {} s and is killed", STOP_DEADLINE.as_secs());
    child.start_kill()?;
    child.wait().await
}

/// Member id of the worker, once it has announced it.
struct WorkerIdentity {
    member: watch::Receiver<Option<MemberId>>,
    poller: tokio::task::AbortHandle,
}

impl WorkerIdentity {
    fn of(options: &Options) -> Self {
        let (sender, receiver) = watch::channel(None);
        let socket = options.state_dir.join(socket::NAME);
        let admin = local_address(options.listen.admin);
        // Under TLS the port rejects a worker's own certificate; the socket, available a moment later, requires none.
        let by_socket = options.tls.is_some();
        let poller = tokio::spawn(async move {
            let member =
                if by_socket { member_behind(&socket).await } else { member(admin, &Network::default()).await };
            drop(sender.send(Some(member)));
        });
        let poller = poller.abort_handle();
        Self { member: receiver, poller }
    }

    fn member(&self) -> Option<MemberId> {
        self.member.borrow().clone()
    }
}

impl Drop for WorkerIdentity {
    fn drop(&mut self) {
        self.poller.abort();
    }
}

/// Returns the address at which this machine reaches its own listener.
const fn local_address(listener: SocketAddr) -> SocketAddr {
    let ip = match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listener.port())
}

/// Polls the worker behind a socket for its member id.
async fn member_behind(socket: &Path) -> MemberId {
    loop {
        let response = async {
            let mut client = socket::connect(socket).await.ok()?;
            client.get_worker_status(GetWorkerStatusRequest {}).await.ok()?.into_inner().member
        };
        if let Ok(Some(member)) = timeout(REPORT_DEADLINE, response).await {
            return member;
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Reports the death to all coordinators, at every address of their names.
async fn report(options: &Options, network: &Network, member: &MemberId, process_id: u32, status_text: &str) {
    let report_to = |address: String| async move {
        let result = report_death(&address, network, options.cluster, member, process_id, status_text.to_owned()).await;
        match result {
            Ok(()) => tracing::info!(coordinator = address, "reported worker death"),
            Err(status) => {
                tracing::warn!(coordinator = address, reason = status.message(), "coordinator rejected death report");
            }
        }
    };
    let report_to_name = |name: &String| {
        let name = name.clone();
        async move {
            match lookup_host(&name).await {
                Ok(addresses) => drop(join_all(addresses.map(|address| report_to(address.to_string()))).await),
                Err(error) => tracing::warn!(name, %error, "failed to resolve coordinator name"),
            }
        }
    };
    if timeout(REPORT_DEADLINE, join_all(options.coordinators.iter().map(report_to_name))).await.is_err() {
        tracing::warn!("timed out reporting worker death to all coordinators");
    }
}

/// Returns the exit code of this process; for a signal as a shell does.
fn exit_code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt as _;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}
