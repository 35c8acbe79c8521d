//! The first process of the container: starts the worker, passes orders to stop on, and reports the worker's end to the coordinators.
//!
//! Invariants: what it reports it has seen: the worker has ended, and was this very incarnation; it ends after the report, with the
//! worker's status, so that the kubelet sees what there is to see and starts the next one; it keeps nothing on disk.

use super::identity::Identity;
use super::socket;
use crate::exit;
use crate::options::Options;
use crate::supervise::{ASK, member, report_death};
use anyhow::{Context as _, Result};
use engram_client::Network;
use engram_identity::{Expected, Role};
use engram_proto::v1::{MemberId, WorkerStatusRequest};
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

/// How long the worker may take to stop in order: less than the kubelet waits, so that the end can still be reported.
const STOP: Duration = Duration::from_secs(52);
/// How long the report may hold up the end: a coordinator that is not there learns of it from silence.
const REPORT: Duration = Duration::from_secs(2);

/// Runs a worker with these options, with a certificate where there is an `identity` to get one for, until it ends or this process is told to stop, and returns the status to end with.
///
/// # Errors
/// The worker cannot be started or watched.
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
        tokio::spawn(identity.keep(Arc::clone(&keys)));
        network = Network::secured(keys, Expected::any(Role::Coordinator));
    }
    let options = &options;
    let (status, known, process_id) = loop {
        let mut child = start(options).await?;
        let process_id = child.id().context("a process that was just started has an id")?;
        let known = Known::of(options);
        let status = tokio::select! {
            ended = child.wait() => ended,
            _ = terminate.recv() => stop(&mut child, process_id).await,
            _ = interrupt.recv() => stop(&mut child, process_id).await,
        };
        let status = status.context("failed to wait for the worker")?;
        if status.code() != Some(exit::AGAIN) {
            break (status, known, process_id);
        }
        tracing::info!("the worker begins again");
    };
    let ended = exit::described(status);
    if status.success() {
        tracing::info!("the worker has stopped");
    } else {
        tracing::error!(ended, "the worker has ended");
        super::tell_kubelet(&format!("the worker ended: {ended}"));
    }
    // Before it could say who it was, it was nobody whose end anyone waits for.
    if let Some(member) = known.member() {
        report(options, &network, &member, process_id, &ended).await;
    }
    Ok(code(status))
}

/// Starts the worker, which reads its options from its standard input.
async fn start(options: &Options) -> Result<Child> {
    let program = std::env::current_exe().context("failed to find this program")?;
    let mut command = Command::new(program);
    command.args(["serve", "--config", "-"]).stdin(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().context("failed to start the worker")?;
    let mut stdin = child.stdin.take().context("the worker's standard input was piped")?;
    let text = serde_json::to_vec(options).context("failed to write the worker's options")?;
    // A worker that ended before it read them is told of by its status.
    if let Err(error) = stdin.write_all(&text).await {
        tracing::warn!(%error, "the worker did not read its options");
    }
    Ok(child)
}

/// Has the worker stop in order; it is killed when that takes too long.
async fn stop(child: &mut Child, process_id: u32) -> std::io::Result<ExitStatus> {
    tracing::info!("told to stop");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(process_id).map_err(std::io::Error::other)?);
    // It was not waited for yet, so the id is still its own, ended or not.
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM)?;
    if let Ok(ended) = timeout(STOP, child.wait()).await {
        return ended;
    }
    tracing::error!("the worker did not stop within {} s and is killed", STOP.as_secs());
    child.start_kill()?;
    child.wait().await
}

/// Who the worker is, once it has said so.
struct Known {
    told: watch::Receiver<Option<MemberId>>,
    asking: tokio::task::AbortHandle,
}

impl Known {
    fn of(options: &Options) -> Self {
        let (tell, told) = watch::channel(None);
        let socket = options.state_dir.join(socket::NAME);
        let admin = own(options.listen.admin);
        // Under TLS the port is not for a worker's own certificate; the socket is there a moment later, and asks for none.
        let by_socket = options.tls.is_some();
        let asking = tokio::spawn(async move {
            let member =
                if by_socket { member_behind(&socket).await } else { member(admin, &Network::default()).await };
            drop(tell.send(Some(member)));
        });
        let asking = asking.abort_handle();
        Self { told, asking }
    }

    fn member(&self) -> Option<MemberId> {
        self.told.borrow().clone()
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        self.asking.abort();
    }
}

/// Where this machine reaches a listener of its own.
const fn own(listener: SocketAddr) -> SocketAddr {
    let ip = match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listener.port())
}

/// Asks the worker behind a socket who it is, until it says so.
async fn member_behind(socket: &Path) -> MemberId {
    loop {
        let asked = async {
            let mut client = socket::connect(socket).await.ok()?;
            client.get_worker_status(WorkerStatusRequest {}).await.ok()?.into_inner().member
        };
        if let Ok(Some(member)) = timeout(REPORT, asked).await {
            return member;
        }
        sleep(ASK).await;
    }
}

/// Tells all coordinators, at every address that their names stand for.
async fn report(options: &Options, network: &Network, member: &MemberId, process_id: u32, ended: &str) {
    let tell = |address: String| async move {
        let told = report_death(&address, network, options.cluster, member, process_id, ended.to_owned()).await;
        match told {
            Ok(()) => tracing::info!(coordinator = address, "reported the worker's end"),
            Err(status) => tracing::warn!(coordinator = address, reason = status.message(), "nobody took the report"),
        }
    };
    let name = |name: &String| {
        let name = name.clone();
        async move {
            match lookup_host(&name).await {
                Ok(found) => drop(join_all(found.map(|address| tell(address.to_string()))).await),
                Err(error) => tracing::warn!(name, %error, "the name of the coordinators is not known"),
            }
        }
    };
    if timeout(REPORT, join_all(options.coordinators.iter().map(name))).await.is_err() {
        tracing::warn!("not every coordinator took the report in time");
    }
}

/// What this process ends with: as a shell tells of a signal.
fn code(status: ExitStatus) -> i32 {
    use std::os::unix::process::ExitStatusExt as _;
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default())
}
