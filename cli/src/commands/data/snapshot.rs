//! `engram snapshot`: exact backups of a local cluster.

use super::created;
use crate::context::Context;
use crate::error::problem;
use crate::local::state::{Cluster, StateDir, base, read_owner_key};
use crate::output::{Table, bytes, count};
use crate::progress::Progress;
use crate::snapshot::{self, StorageOptions, rfc3339};
use crate::target::{Local, Target};
use anyhow::Context as _;
use engram_api::{API_VERSION, Code, ExitCode, Problem, is_name};
use engram_memory::MAX_PARTITIONS;
use engram_snapshot::{Entry, Folder, Location, Manifest, SourceCluster};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Create, list and restore snapshots of a local cluster
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Snapshot {
    /// Create a snapshot of a running cluster without interrupting service
    #[command(before_help = "Examples:
  engram snapshot create
  engram snapshot create before-upgrade
  engram snapshot create --to /backup
  engram snapshot create --to s3://backups/words --s3-endpoint http://minio:9000

Each partition is consistent in itself; partitions are written at slightly different times.")]
    Create {
        /// Name of the snapshot [default: snapshot-<date>-<time>]
        name: Option<String>,
        /// Destination: s3://BUCKET/PREFIX or a folder [default: snapshots in the state directory]
        #[arg(long, value_name = "LOCATION")]
        to: Option<String>,
        #[command(flatten)]
        storage: StorageOptions,
    },
    /// List snapshots
    #[command(before_help = "Examples:
  engram snapshot list
  engram snapshot list -o json
  engram snapshot list --from s3://backups/words")]
    List {
        /// Location: s3://BUCKET/PREFIX or a folder [default: snapshots in the state directory]
        #[arg(long, value_name = "LOCATION")]
        from: Option<String>,
        #[command(flatten)]
        storage: StorageOptions,
    },
    /// Replace the data of a stopped cluster with a snapshot
    #[command(before_help = "Examples:
  engram down && engram snapshot restore before-upgrade --yes
  engram snapshot restore before-upgrade --workers 3 --yes              restore to another number of workers
  engram snapshot restore before-upgrade --partitions 256 --yes         restore to another number of partitions
  engram snapshot restore /backup/before-upgrade --state-dir new --yes  restore to a new state directory
  engram snapshot restore nightly --from s3://backups/words --state-dir new

The snapshot is verified before any data is changed, and the old data is kept until the restore is complete.")]
    Restore {
        /// Name or folder of the snapshot
        name: String,
        /// Location: s3://BUCKET/PREFIX or a folder [default: snapshots in the state directory]
        #[arg(long, value_name = "LOCATION")]
        from: Option<String>,
        #[command(flatten)]
        storage: StorageOptions,
        /// Number of workers [default: unchanged]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
        workers: Option<u32>,
        /// Number of partitions [default: unchanged]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PARTITIONS)))]
        partitions: Option<u32>,
        /// Replace existing data without confirmation
        #[arg(short, long)]
        yes: bool,
    },
}

/// Options of `restore`, except for the location.
struct RestoreOptions {
    workers: Option<u32>,
    partitions: Option<u32>,
    yes: bool,
}

impl Snapshot {
    pub(crate) async fn run(self, context: &Context) -> anyhow::Result<ExitCode> {
        match self {
            Self::Create { name, to, storage } => create(name, to, storage, context).await?,
            Self::List { from, storage } => list(from, storage, context).await?,
            Self::Restore { name, from, storage, workers, partitions, yes } => {
                restore(&name, from, storage, RestoreOptions { workers, partitions, yes }, context).await?;
            }
        }
        Ok(ExitCode::Ok)
    }
}

/// Returns the given location, by default the snapshots of a state directory.
fn location(address: Option<String>, storage: StorageOptions, state_dir: &Path) -> anyhow::Result<Location> {
    match address {
        Some(address) => Location::open(&address, &storage.options()),
        None => Ok(folder(snapshot::folder(state_dir))),
    }
}

fn folder(path: PathBuf) -> Location {
    Location::Folder(Folder::local(path))
}

async fn create(
    name: Option<String>,
    to: Option<String>,
    storage: StorageOptions,
    context: &Context,
) -> anyhow::Result<()> {
    let local = Local::find(context)?;
    let name = name.unwrap_or_else(|| default_name(now_ms()));
    if !is_name(&name) {
        let message = format!("snapshot name is {name:?}; allowed: a-z, 0-9 and -, starting with a letter");
        return Err(problem(Code::InvalidValue, message));
    }
    let state_dir = std::path::absolute(&local.folder).context("failed to resolve the state directory")?;
    let Some(cluster) = created(&state_dir)? else {
        return Err(problem(Code::NoLocalCluster, format!("{} has no cluster.json", state_dir.display())));
    };
    let from = to.as_ref().map(|to| format!(" --from {to}")).unwrap_or_default();
    let location = location(to, storage, &state_dir)?.join(&name);
    let address = location.to_string();
    if location.is_occupied().await? {
        let message = format!("snapshot {name} already exists: {address}");
        return Err(Problem::new(Code::Conflicting, message).help("choose another name").into());
    }
    let manifest = match &location {
        Location::Folder(folder) => {
            let folder = folder.path();
            fs::create_dir_all(folder).with_context(|| format!("failed to create {}", folder.display()))?;
            let written = async {
                let mut manifest = write(&local, &cluster, &name, folder, context).await?;
                manifest.write(folder)?;
                anyhow::Ok(manifest)
            };
            let written = written.await;
            if written.is_err() {
                // A snapshot without manifest is listed as incomplete.
                let _ = fs::remove_dir_all(folder);
            }
            written?
        }
        Location::Objects(bucket) => {
            // Staged in the state directory, which needs space for one snapshot.
            let folder = tempfile::Builder::new().prefix("snapshot-").tempdir_in(&state_dir);
            let folder = folder.context("failed to create a staging directory")?;
            let mut manifest = write(&local, &cluster, &name, folder.path(), context).await?;
            let mut progress = Progress::new(&context.output, "bytes", Some(manifest.bytes));
            let on_progress = |bytes| {
                let done = progress.done() + bytes;
                progress.set(done, "uploaded");
            };
            engram_snapshot::upload(&mut manifest, folder.path(), bucket, on_progress).await?;
            manifest
        }
    };
    show(&[(manifest, address)], context)?;
    context.output.note(format!("to restore it: engram down && engram snapshot restore {name}{from}"));
    Ok(())
}

/// Has the workers write all partitions to `folder` and returns the manifest.
async fn write(
    local: &Local,
    cluster: &Cluster,
    name: &str,
    folder: &Path,
    context: &Context,
) -> anyhow::Result<Manifest> {
    let admin_endpoints = Target::Local(local.clone()).admin_endpoints();
    let workers: Vec<_> = admin_endpoints.into_iter().map(|(_, endpoint)| endpoint).collect();
    let files = snapshot::collect(&workers, cluster.spec.partitions, folder, &read_owner_key(&local.folder)).await?;
    let mut manifest =
        Manifest::new(name, SourceCluster { cluster: cluster.id()?, name: &cluster.name, spec: &cluster.spec })?;
    (manifest.workers, manifest.created_ms) = (workers.len() as u32, now_ms());
    let (folder, mut progress) = (folder.to_owned(), Progress::new(&context.output, "bytes", None));
    let described = tokio::task::spawn_blocking(move || {
        for file in &files {
            manifest.add(Entry::of(&folder, file)?);
            progress.set(manifest.bytes, "verified");
        }
        anyhow::Ok(manifest)
    });
    described.await.context("the snapshot task failed")?
}

async fn list(from: Option<String>, storage: StorageOptions, context: &Context) -> anyhow::Result<()> {
    let location = match from {
        Some(address) => Location::open(&address, &storage.options())?,
        None => location(None, storage, &state_dir(context)?)?,
    };
    let mut snapshots = Vec::new();
    for name in location.names().await? {
        let location = location.join(&name);
        let address = location.to_string();
        match location.manifest().await {
            Ok(Some(manifest)) => snapshots.push((manifest, address)),
            Ok(None) => context.output.note(format!("{address} is incomplete: it has no manifest")),
            Err(error) => context.output.note(format!("{error:#}")),
        }
    }
    snapshots.sort_by(|(a, _), (b, _)| (a.created_ms, &a.name).cmp(&(b.created_ms, &b.name)));
    show(&snapshots, context)
}

fn show(snapshots: &[(Manifest, String)], context: &Context) -> anyhow::Result<()> {
    let mut table = Table::new(&[
        "snapshot",
        "created",
        ">memories",
        ">size",
        "digest",
        "+cluster",
        "+>workers",
        "+>partitions",
        "+location",
    ]);
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
            manifest.partitions.to_string(),
            folder.clone(),
        ]);
        items.push(json!({
            "name": manifest.name, "created": rfc3339(manifest.created_ms), "memories": manifest.memories,
            "bytes": manifest.bytes, "digest": manifest.digest, "cluster": manifest.cluster,
            "clusterName": manifest.cluster_name, "workers": manifest.workers, "partitions": manifest.partitions,
            "location": folder,
        }));
    }
    context.output.list(&items, &table)
}

async fn restore(
    name: &str,
    from: Option<String>,
    storage: StorageOptions,
    options: RestoreOptions,
    context: &Context,
) -> anyhow::Result<()> {
    let state_dir = state_dir(context)?;
    let path = Path::new(name);
    let (location, name) = match (from, path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (None, Some(parent), Some(last)) if name.contains('/') => (folder(parent.to_owned()), last),
        (from, ..) => (location(from, storage, &state_dir)?, name),
    };
    if name.contains('/') {
        let message = format!("{name:?} is not a snapshot name; with --from give a name without slashes");
        return Err(problem(Code::InvalidValue, message));
    }
    let location = location.join(name);
    let address = location.to_string();
    let Some(manifest) = location.manifest().await? else {
        let reason = match location.is_occupied().await? {
            true => format!("snapshot {name} is incomplete: {address} has no manifest.json"),
            false => format!("snapshot {name} not found: nothing at {address}"),
        };
        return Err(problem(Code::SnapshotUnusable, reason));
    };
    // Holds the lock until the end, so that the cluster stays stopped.
    let mut state = StateDir::hold(&state_dir)?;
    let existing = created(state.folder())?;
    if let Some(cluster) = &existing
        && !options.yes
    {
        let message = format!(
            "state directory {} contains cluster {}; restoring {name} replaces its memories",
            state_dir.display(),
            cluster.name
        );
        return Err(Problem::new(Code::Conflicting, message).help("confirm with --yes").into());
    }
    let mut cluster = match existing {
        Some(cluster) => cluster,
        None => snapshot::cluster_of(&manifest)?,
    };
    let workers = options.workers.unwrap_or(cluster.spec.workers);
    cluster.spec.partitions = options.partitions.unwrap_or(cluster.spec.partitions);
    let (id, shape) = (cluster.id()?, engram_snapshot::shape_of(&cluster.spec));
    manifest.check_owner(&address, id)?;
    manifest.check_shape(&address, shape)?;
    let download = match &location {
        Location::Folder(_) => None,
        Location::Objects(_) => Some(download(&manifest, &location, state.folder(), context).await?),
    };
    let folder = match (&location, &download) {
        (Location::Folder(folder), _) => folder.path().to_owned(),
        (_, Some(download)) => download.path().to_owned(),
        (Location::Objects(_), None) => unreachable!("snapshots in object storage are downloaded first"),
    };
    let (output, capacity) = (context.output, cluster.spec.capacity.memories);
    // Blocking: reads and writes all data.
    let restored = tokio::task::spawn_blocking(move || {
        let destination = snapshot::Destination { state_dir: state.folder(), cluster: id, shape, capacity, workers };
        let backup = snapshot::Backup { folder: &folder, location: &address, manifest: &manifest };
        let work = backup.work(destination);
        let mut progress = Progress::new(&output, "bytes", Some(work));
        let restored = snapshot::restore(backup, destination, |bytes| {
            let done = progress.done() + bytes;
            progress.set(done, if done > manifest.bytes { "copied" } else { "verified" });
        })?;
        drop(progress);
        (cluster.spec.workers, cluster.memories) = (restored.workers, restored.memories);
        state.save(&cluster)?;
        anyhow::Ok((restored, cluster.spec.partitions))
    });
    let (restored, partitions) = restored.await.context("the restore task failed")??;
    drop(download);
    let digest = restored.digest.to_string();
    let mut table = Table::new(&["snapshot", ">memories", ">workers", ">partitions", "digest"]);
    let (memories, workers) = (count(restored.memories), restored.workers);
    table.row([name.to_owned(), memories, workers.to_string(), partitions.to_string(), digest.clone()]);
    let object = json!({
        "apiVersion": API_VERSION, "kind": "Restored", "snapshot": name, "memories": restored.memories,
        "workers": workers, "partitions": partitions, "digest": digest, "stateDir": state_dir,
    });
    context.output.object(&object, &table)?;
    let state_dir = state_dir.display();
    context.output.note(format!(
        "start the cluster: engram up FILE --state-dir {state_dir} (workers: {workers}, partitions: {partitions})"
    ));
    Ok(())
}

/// Downloads a snapshot into the state directory.
async fn download(
    manifest: &Manifest,
    location: &Location,
    state_dir: &Path,
    context: &Context,
) -> anyhow::Result<tempfile::TempDir> {
    let folder = tempfile::Builder::new().prefix("snapshot-").tempdir_in(state_dir);
    let folder = folder.context("failed to create a staging directory")?;
    let mut progress = Progress::new(&context.output, "bytes", Some(manifest.bytes));
    let on_progress = |bytes| {
        let done = progress.done() + bytes;
        progress.set(done, "downloaded");
    };
    engram_snapshot::download(manifest, location, folder.path(), on_progress).await?;
    Ok(folder)
}

/// Returns the state directory, whether its cluster runs or not.
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
    let mut clusters: Vec<PathBuf> = entries.filter(|path| path.join("cluster.json").is_file()).collect();
    match clusters.len() {
        1 => Ok(clusters.remove(0)),
        0 => Err(problem(Code::NoLocalCluster, format!("no local cluster found in {}", base.display()))),
        _ => {
            Err(problem(Code::NoLocalCluster, "several local clusters exist; select one with --cluster or --state-dir"))
        }
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
    fn default_names_are_valid() {
        assert_eq!(super::default_name(1_795_281_135_000), "snapshot-20261121-171215");
        assert!(engram_api::is_name(&super::default_name(0)));
    }
}
