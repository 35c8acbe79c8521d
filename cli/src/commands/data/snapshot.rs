//! `engram snapshot`: the whole of a local cluster, to the bit.

use super::created;
use crate::args::Context;
use crate::error::problem;
use crate::local::state::{Cluster, FORMAT, StateDir, base};
use crate::output::{Table, bytes, count};
use crate::progress::Progress;
use crate::snapshot::{self, Manifest, rfc3339};
use crate::target::Local;
use anyhow::Context as _;
use engram_api::{API_VERSION, Code, ExitCode, Problem, is_name};
use engram_memory::Digest;
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use futures::future::try_join_all;
use serde_json::{Value, json};
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tonic::transport::Endpoint;

/// How long a worker may take to write its part: a disk of 50 MB/s writes 90 GB in that time.
const DEADLINE: Duration = Duration::from_secs(30 * 60);
/// How long a worker of this machine may take to accept a connection.
const CONNECT: Duration = Duration::from_secs(5);

/// Keep the whole of a local cluster, and bring it back
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Snapshot {
    /// Write a snapshot of the running cluster; it goes on serving
    #[command(before_help = "Examples:
  engram snapshot create
  engram snapshot create before-upgrade

Each partition is kept as of one moment; partitions may be milliseconds apart while somebody writes.")]
    Create {
        /// Its name [default: snapshot-<date>-<time>]
        name: Option<String>,
    },
    /// List the snapshots of a state directory
    #[command(before_help = "Examples:\n  engram snapshot list\n  engram snapshot list -o json")]
    List,
    /// Bring a snapshot back, in place of what is there; the cluster must be down
    #[command(before_help = "Examples:
  engram down && engram snapshot restore before-upgrade --yes
  engram snapshot restore before-upgrade --workers 3 --yes              to another number of workers
  engram snapshot restore /backup/before-upgrade --state-dir new --yes  to a new state directory

Everything is checked before anything is changed; the old data is kept aside until the new is in place.")]
    Restore {
        /// Name of the snapshot, or the path of its folder
        name: String,
        /// Workers to spread it over [default: as the cluster had last]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
        workers: Option<u32>,
        /// Replace what is there without asking
        #[arg(long)]
        yes: bool,
    },
}

impl Snapshot {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        match self {
            Self::Create { name } => create(name, context).await?,
            Self::List => list(context)?,
            Self::Restore { name, workers, yes } => {
                let context = context.clone();
                // It reads and writes everything there is.
                let restored = tokio::task::spawn_blocking(move || restore(&name, workers, yes, &context));
                restored.await.context("the restore ended early")??;
            }
        }
        Ok(ExitCode::Ok)
    }
}

async fn create(name: Option<String>, context: &Context) -> anyhow::Result<()> {
    let local = Local::find(context)?;
    let name = name.unwrap_or_else(|| default_name(now_ms()));
    if !is_name(&name) {
        let message = format!("the name of a snapshot is {name:?}; allowed: a-z, 0-9 and -, starting with a letter");
        return Err(problem(Code::InvalidValue, message));
    }
    let state_dir = std::path::absolute(&local.folder).context("failed to find the state directory")?;
    let Some(cluster) = created(&state_dir)? else {
        return Err(problem(Code::NoLocalCluster, format!("{} has no cluster.json", state_dir.display())));
    };
    let folder = snapshot::folder(&state_dir).join(&name);
    if folder.exists() {
        let message = format!("snapshot {name} is there already: {}", folder.display());
        return Err(Problem::new(Code::Conflicting, message).help("give another name").into());
    }
    fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", folder.display()))?;
    let written = write(&local, &cluster, &name, &folder, context).await;
    let manifest = match written {
        Ok(manifest) => manifest,
        Err(error) => {
            // Without a manifest it is no snapshot; what stays is listed as unfinished.
            let _ = fs::remove_dir_all(&folder);
            return Err(error);
        }
    };
    show(&[(manifest, folder)], context)?;
    context.output.note(format!("bring it back:    engram down && engram snapshot restore {name}"));
    Ok(())
}

async fn write(
    local: &Local,
    cluster: &Cluster,
    name: &str,
    folder: &Path,
    context: &Context,
) -> anyhow::Result<Manifest> {
    let text = folder.to_str().with_context(|| format!("the path {} is not UTF-8", folder.display()))?;
    let workers = &local.endpoints.workers;
    let asked = workers.iter().map(|worker| ask(worker.admin, text.to_owned()));
    let replies = try_join_all(asked).await?;
    // A digest of the whole is known only if none of the workers was written to meanwhile.
    let digests: Option<Vec<u128>> =
        replies.iter().map(|reply| reply.digest.as_ref().try_into().ok().map(u128::from_be_bytes)).collect();
    let mut total = digests.map(|digests| {
        let mut total = Digest::default();
        digests.into_iter().for_each(|digest| total.merge(Digest(digest)));
        total
    });
    let mut manifest = Manifest::new(name, cluster)?;
    manifest.workers = workers.len() as u32;
    manifest.created_ms = now_ms();
    manifest.digest = total.take().map(|digest| digest.to_string());
    let expected: u64 = replies.iter().map(|reply| reply.bytes).sum();
    let (folder, mut progress) = (folder.to_owned(), Progress::new(&context.output, "bytes", Some(expected)));
    let described = tokio::task::spawn_blocking(move || {
        let mut files: Vec<String> = Vec::new();
        for entry in fs::read_dir(&folder)? {
            let name = entry?.file_name().into_string().ok();
            files.extend(name.filter(|name| engram_store::snapshot_file::parse_name(name).is_some()));
        }
        files.sort_unstable();
        for file in &files {
            manifest.add(&folder, file)?;
            progress.set(manifest.bytes, "checked");
        }
        manifest.write(&folder)?;
        anyhow::Ok(manifest)
    });
    let manifest = described.await.context("the snapshot ended early")??;
    let partitions: u32 = replies.iter().map(|reply| reply.partitions).sum();
    anyhow::ensure!(
        manifest.files.len() == partitions as usize,
        "the workers wrote {partitions} partitions, and {} files are there",
        manifest.files.len()
    );
    Ok(manifest)
}

async fn ask(admin: SocketAddr, folder: String) -> anyhow::Result<v1::CreateSnapshotReply> {
    let ask = async {
        let channel = Endpoint::from_shared(format!("http://{admin}"))?.connect_timeout(CONNECT).connect().await?;
        let mut client =
            AdminServiceClient::new(channel).max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES);
        let answer = client.create_snapshot(v1::CreateSnapshotRequest { folder }).await;
        let reply = answer.map_err(|status| match v1::Problem::from_status(&status) {
            Some(problem) => anyhow::Error::new(engram_client::Error::Refused(Box::new(problem))),
            None => anyhow::anyhow!("{}", status.message()),
        })?;
        anyhow::Ok(reply.into_inner())
    };
    let answer = tokio::time::timeout(DEADLINE, ask).await;
    answer.map_err(anyhow::Error::from).flatten().with_context(|| format!("the worker at {admin} wrote no snapshot"))
}

fn list(context: &Context) -> anyhow::Result<()> {
    let folder = snapshot::folder(&state_dir(context)?);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries.collect::<Result<Vec<_>, _>>()?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error).with_context(|| format!("failed to list {}", folder.display())),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.path();
        match Manifest::read(&path) {
            Ok(Some(manifest)) => found.push((manifest, path)),
            Ok(None) => context.output.note(format!("{} is unfinished: it has no manifest", path.display())),
            Err(error) => context.output.note(format!("{error:#}")),
        }
    }
    found.sort_by(|(a, _), (b, _)| (a.created_ms, &a.name).cmp(&(b.created_ms, &b.name)));
    show(&found, context)
}

fn show(snapshots: &[(Manifest, PathBuf)], context: &Context) -> anyhow::Result<()> {
    let mut table =
        Table::new(&["snapshot", "created", ">memories", ">size", "digest", "+cluster", "+>workers", "+folder"]);
    let mut items: Vec<Value> = Vec::new();
    for (manifest, folder) in snapshots {
        table.row([
            manifest.name.clone(),
            rfc3339(manifest.created_ms),
            count(manifest.memories),
            bytes(manifest.bytes),
            manifest.digest.clone().unwrap_or_else(|| "-".into()),
            manifest.cluster_name.clone(),
            manifest.workers.to_string(),
            folder.display().to_string(),
        ]);
        items.push(json!({
            "name": manifest.name, "created": rfc3339(manifest.created_ms), "memories": manifest.memories,
            "bytes": manifest.bytes, "digest": manifest.digest, "cluster": manifest.cluster,
            "clusterName": manifest.cluster_name, "workers": manifest.workers, "partitions": manifest.partitions,
            "folder": folder,
        }));
    }
    context.output.list(&items, &table)
}

fn restore(name: &str, workers: Option<u32>, yes: bool, context: &Context) -> anyhow::Result<()> {
    let state_dir = state_dir(context)?;
    let folder = if name.contains('/') { PathBuf::from(name) } else { snapshot::folder(&state_dir).join(name) };
    if !folder.is_dir() {
        return Err(problem(
            Code::SnapshotUnusable,
            format!("there is no snapshot {name}: {} is not a folder", folder.display()),
        ));
    }
    let Some(manifest) = Manifest::read(&folder)? else {
        let message = format!("snapshot {name} was never finished: {} has no manifest.json", folder.display());
        return Err(problem(Code::SnapshotUnusable, message));
    };
    // Held until the end: the cluster is down, and stays down.
    let mut held = StateDir::hold(&state_dir)?;
    let known = created(held.folder())?;
    if let Some(cluster) = &known
        && !yes
    {
        let message = format!(
            "state directory {} holds cluster {}; restoring {name} replaces its memories",
            state_dir.display(),
            cluster.name
        );
        return Err(Problem::new(Code::Conflicting, message).help("say that it is meant:    --yes").into());
    }
    let mut cluster = match known {
        Some(cluster) => cluster,
        None => manifest.to_cluster(FORMAT)?,
    };
    let workers = workers.unwrap_or(cluster.spec.workers);
    let mut progress = Progress::new(&context.output, "bytes", Some(2 * manifest.bytes));
    let into = snapshot::Into {
        state_dir: held.folder(),
        cluster: cluster.id()?,
        shape: snapshot::shape_of(&cluster.spec),
        workers,
    };
    let restored = snapshot::restore(&folder, &manifest, into, |bytes| {
        let done = progress.done() + bytes;
        progress.set(done, if done > manifest.bytes { "copied" } else { "checked" });
    })?;
    drop(progress);
    (cluster.spec.workers, cluster.memories) = (restored.workers, restored.memories);
    held.keep(&cluster)?;
    let digest = restored.digest.to_string();
    let mut table = Table::new(&["snapshot", ">memories", ">workers", "digest"]);
    table.row([name.to_owned(), count(restored.memories), restored.workers.to_string(), digest.clone()]);
    let object = json!({
        "apiVersion": API_VERSION, "kind": "Restored", "snapshot": manifest.name, "memories": restored.memories,
        "workers": restored.workers, "digest": digest, "stateDir": state_dir,
    });
    context.output.object(&object, &table)?;
    context.output.note(format!("start it: engram up FILE --state-dir {} (workers: {workers})", state_dir.display()));
    Ok(())
}

/// The state directory that is meant, whether its cluster runs or not.
fn state_dir(context: &Context) -> anyhow::Result<PathBuf> {
    if let Some(folder) = &context.state_dir {
        return Ok(folder.clone());
    }
    if let Some(name) = &context.cluster {
        return Ok(base()?.join(name));
    }
    if let Ok(local) = Local::find(context) {
        return Ok(local.folder);
    }
    let base = base()?;
    let entries = fs::read_dir(&base).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut known: Vec<PathBuf> = entries.filter(|path| path.join("cluster.json").is_file()).collect();
    match known.len() {
        1 => Ok(known.remove(0)),
        0 => Err(problem(Code::NoLocalCluster, format!("no local cluster was ever started below {}", base.display()))),
        _ => Err(problem(
            Code::NoLocalCluster,
            "there are several local clusters; name one with --cluster or --state-dir",
        )),
    }
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// `snapshot-20261121-171215`.
fn default_name(now_ms: u64) -> String {
    let digits: String = rfc3339(now_ms).chars().filter(char::is_ascii_digit).collect();
    format!("snapshot-{}-{}", &digits[..8], &digits[8..])
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_default_name_is_a_name() {
        assert_eq!(super::default_name(1_795_281_135_000), "snapshot-20261121-171215");
        assert!(engram_api::is_name(&super::default_name(0)));
    }
}
