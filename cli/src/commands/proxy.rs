//! Hidden command `proxy`: connections to the workers of a cluster for another process of this user. The Python package reaches clusters in
//! Kubernetes through it.
//!
//! `proxy.json` in the folder has the cluster id, the addresses of the workers, and the names of the other files. A connection to `socket`
//! sends `host:port` and a line feed, gets `ok` or an error in one line, and then is a connection to this address. With TLS, `ca.pem` has the
//! certificates that sign the workers', and `token` the current token of calls. Ends when standard input closes.

use crate::context::Context;
use crate::error::failure;
use crate::route::Route;
use crate::target::{Access, Target};
use anyhow::Context as _;
use engram_api::ExitCode;
use serde::Serialize;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, copy_bidirectional};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// Connections at a time: a client has one per worker, and at most 100 workers.
const CONNECTIONS: usize = 1024;
/// Longest request: a host name and a port.
const REQUEST_BYTES: u64 = 300;
/// Interval of checks whether the token was renewed: the renewal has no notification, and takes place minutes before the token expires.
const TOKEN_INTERVAL: Duration = Duration::from_secs(5);

/// Serve connections to the workers of a cluster on a Unix socket
#[derive(Debug, clap::Args)]
pub(crate) struct Proxy {
    /// Folder for the socket and the credentials; only its owner may have access
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
}

/// Contents of `proxy.json`.
#[derive(Serialize)]
struct Description {
    cluster: String,
    endpoints: Vec<String>,
    socket: PathBuf,
    /// Absent without TLS.
    ca: Option<PathBuf>,
    /// Absent without TLS.
    token: Option<PathBuf>,
}

pub(crate) async fn run(arguments: &Proxy, context: &Context) -> anyhow::Result<ExitCode> {
    let folder = &arguments.folder;
    let mode = fs::metadata(folder).with_context(|| format!("--folder {}", folder.display()))?.permissions().mode();
    if mode & 0o077 != 0 {
        let message =
            format!("--folder {} has mode {:o}; required: no access for others", folder.display(), mode & 0o777);
        return Err(failure(ExitCode::Usage, message));
    }
    let target = Target::find(context).await?;
    let Access { cluster, endpoints, ca } = target.access().await?;
    let (route, socket) = (target.route(), folder.join("socket"));
    let listener = UnixListener::bind(&socket).with_context(|| format!("failed to listen on {}", socket.display()))?;
    let token = ca.is_some().then(|| folder.join("token"));
    if let Some(path) = &token {
        write(path, &current_token(&route)?)?;
    }
    let ca = ca.map(|pem| write(&folder.join("ca.pem"), &pem).map(|()| folder.join("ca.pem"))).transpose()?;
    let description = Description { cluster: cluster.to_string(), endpoints, socket, ca, token: token.clone() };
    write(&folder.join("proxy.json"), &serde_json::to_string(&description)?)?;
    tokio::select! {
        result = accept(listener, route.clone()) => result?,
        result = copy_renewed_token(token.as_deref(), &route) => result?,
        // Data is of no meaning, and a failure is as good as the end.
        _ = closed_input() => {}
    }
    Ok(ExitCode::Ok)
}

async fn closed_input() -> io::Result<u64> {
    tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await
}

async fn accept(listener: UnixListener, route: Route) -> anyhow::Result<()> {
    let permits = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let permit = Arc::clone(&permits).acquire_owned().await.context("the semaphore is never closed")?;
        let (stream, _) = listener.accept().await.context("failed to accept a connection")?;
        let route = route.clone();
        tokio::spawn(async move {
            // A failed connection is reported to its client, and a broken one by its end.
            let _ = serve(stream, &route).await;
            drop(permit);
        });
    }
}

async fn serve(stream: UnixStream, route: &Route) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    let mut address = String::new();
    (&mut stream).take(REQUEST_BYTES).read_line(&mut address).await?;
    match route.open(address.trim_end()).await {
        Ok(mut opened) => {
            stream.write_all(b"ok\n").await?;
            copy_bidirectional(&mut stream, &mut opened).await.map(drop)
        }
        Err(error) => {
            let text = format!("{:#}", route.explain(error.into())).replace('\n', " ");
            stream.write_all(format!("{text}\n").as_bytes()).await
        }
    }
}

/// Writes the token again when it was renewed; without a token it never returns.
async fn copy_renewed_token(path: Option<&Path>, route: &Route) -> anyhow::Result<()> {
    let Some(path) = path else { return std::future::pending().await };
    let mut written = current_token(route)?;
    loop {
        tokio::time::sleep(TOKEN_INTERVAL).await;
        let token = current_token(route)?;
        if token != written {
            write(path, &token)?;
            written = token;
        }
    }
}

fn current_token(route: &Route) -> anyhow::Result<String> {
    let header = route.network().authorization();
    let header = header.as_ref().and_then(|header| header.to_str().ok());
    let token = header.and_then(|header| header.strip_prefix("Bearer ")).context("there is no token of the cluster")?;
    Ok(token.to_owned())
}

/// Replaces a file that only the owner can read.
fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    let next = path.with_extension("next");
    let written =
        OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&next).and_then(|mut file| {
            file.set_permissions(Permissions::from_mode(0o600))?;
            file.write_all(text.as_bytes())?;
            fs::rename(&next, path)
        });
    written.with_context(|| format!("failed to write {}", path.display()))
}
