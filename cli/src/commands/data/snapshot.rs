//! `engram snapshot`: the whole of a local cluster, to the bit.

use super::created;
use crate::args::Context;
use crate::error::problem;
use crate::local::state::{Cluster, StateDir, base};
use crate::output::{Table, bytes, count};
use crate::progress::Progress;
use crate::snapshot::{self, Storage, rfc3339};
use crate::target::{Local, Target};
use anyhow::Context as _;
use engram_api::{API_VERSION, Code, ExitCode, Problem, is_name};
use engram_memory::MAX_PARTITIONS;
use engram_snapshot::{Entry, Folder, Manifest, Of, Place};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Keep the whole of a local cluster, and bring it back
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Snapshot {
    /// Write a snapshot of the running cluster; it goes on serving
    #[command(before_help = "Examples:
  engram snapshot create
  engram snapshot create before-upgrade
  engram snapshot create --to /backup
  engram snapshot create --to s3://backups/words --s3-endpoint http://minio:9000

Each partition is kept as of one moment; partitions are as far apart as it takes to write them.")]
    Create {
        /// Its name [default: snapshot-<date>-<time>]
        name: Option<String>,
        /// Where it goes, below its name: s3://BUCKET/PREFIX, or a folder [default: snapshots in the state directory]
        #[arg(long, value_name = "PLACE")]
        to: Option<String>,
        #[command(flatten)]
        storage: Storage,
    },
    /// List the snapshots of a state directory, or of a place
    #[command(before_help = "Examples:
  engram snapshot list
  engram snapshot list -o json
  engram snapshot list --from s3://backups/words")]
    List {
        /// Where they lie: s3://BUCKET/PREFIX, or a folder [default: snapshots in the state directory]
        #[arg(long, value_name = "PLACE")]
        from: Option<String>,
        #[command(flatten)]
        storage: Storage,
    },
    /// Bring a snapshot back, in place of what is there; the cluster must be down
    #[command(before_help = "Examples:
  engram down && engram snapshot restore before-upgrade --yes
  engram snapshot restore before-upgrade --workers 3 --yes              to another number of workers
  engram snapshot restore before-upgrade --partitions 256 --yes         to another number of partitions
  engram snapshot restore /backup/before-upgrade --state-dir new --yes  to a new state directory
  engram snapshot restore nightly --from s3://backups/words --state-dir new

Everything is checked before anything is changed; the old data is kept aside until the new is in place.")]
    Restore {
        /// Name of the snapshot, or the path of its folder
        name: String,
        /// Where it lies: s3://BUCKET/PREFIX, or a folder [default: snapshots in the state directory]
        #[arg(long, value_name = "PLACE")]
        from: Option<String>,
        #[command(flatten)]
        storage: Storage,
        /// Workers to spread it over [default: as the cluster had last]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
        workers: Option<u32>,
        /// Partitions to deal it out to [default: as the cluster has]
        #[arg(long, value_name = "P", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_PARTITIONS)))]
        partitions: Option<u32>,
        /// Replace what is there without asking
        #[arg(long)]
        yes: bool,
    },
}

/// What `restore` was asked for, beside where the snapshot lies.
struct Asked {
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
                restore(&name, from, storage, Asked { workers, partitions, yes }, context).await?;
            }
        }
        Ok(ExitCode::Ok)
    }
}

/// The place that is meant, by default that of a state directory.
fn place(address: Option<String>, storage: Storage, state_dir: &Path) -> anyhow::Result<Place> {
    match address {
        Some(address) => Place::open(&address, &storage.options()),
        None => Ok(folder(snapshot::folder(state_dir))),
    }
}

fn folder(path: PathBuf) -> Place {
    Place::Folder(Folder::of_machine(path))
}

async fn create(name: Option<String>, to: Option<String>, storage: Storage, context: &Context) -> anyhow::Result<()> {
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
    let from = to.as_ref().map(|to| format!(" --from {to}")).unwrap_or_default();
    let place = place(to, storage, &state_dir)?.below(&name);
    let shown = place.to_string();
    if place.is_taken().await? {
        let message = format!("snapshot {name} is there already: {shown}");
        return Err(Problem::new(Code::Conflicting, message).help("give another name").into());
    }
    let manifest = match &place {
        Place::Folder(folder) => {
            let folder = folder.path();
            fs::create_dir_all(folder).with_context(|| format!("failed to make {}", folder.display()))?;
            let written = async {
                let mut manifest = write(&local, &cluster, &name, folder, context).await?;
                manifest.write(folder)?;
                anyhow::Ok(manifest)
            };
            let written = written.await;
            if written.is_err() {
                // Without a manifest it is no snapshot; what stays is listed as unfinished.
                let _ = fs::remove_dir_all(folder);
            }
            written?
        }
        Place::Objects(bucket) => {
            // Beside the data of the workers, which write it: it takes the room of one snapshot until it is there.
            let folder = tempfile::Builder::new().prefix("snapshot-").tempdir_in(&state_dir);
            let folder = folder.context("failed to make a folder for the snapshot")?;
            let mut manifest = write(&local, &cluster, &name, folder.path(), context).await?;
            let mut progress = Progress::new(&context.output, "bytes", Some(manifest.bytes));
            let heard = |bytes| {
                let done = progress.done() + bytes;
                progress.set(done, "sent");
            };
            engram_snapshot::upload(&mut manifest, folder.path(), bucket, heard).await?;
            manifest
        }
    };
    show(&[(manifest, shown)], context)?;
    context.output.note(format!("bring it back:    engram down && engram snapshot restore {name}{from}"));
    Ok(())
}

/// Has the workers write all partitions into `folder`, and describes them.
async fn write(
    local: &Local,
    cluster: &Cluster,
    name: &str,
    folder: &Path,
    context: &Context,
) -> anyhow::Result<Manifest> {
    let doors = Target::Local(local.clone()).administration();
    let workers: Vec<_> = doors.into_iter().map(|(_, door)| door).collect();
    let files = snapshot::gather(&workers, cluster.spec.partitions, folder).await?;
    let mut manifest = Manifest::new(name, Of { cluster: cluster.id()?, name: &cluster.name, spec: &cluster.spec })?;
    (manifest.workers, manifest.created_ms) = (workers.len() as u32, now_ms());
    let (folder, mut progress) = (folder.to_owned(), Progress::new(&context.output, "bytes", None));
    let described = tokio::task::spawn_blocking(move || {
        for file in &files {
            manifest.add(Entry::of(&folder, file)?);
            progress.set(manifest.bytes, "checked");
        }
        anyhow::Ok(manifest)
    });
    described.await.context("the snapshot ended early")?
}

async fn list(from: Option<String>, storage: Storage, context: &Context) -> anyhow::Result<()> {
    let place = match from {
        Some(address) => Place::open(&address, &storage.options())?,
        None => place(None, storage, &state_dir(context)?)?,
    };
    let mut found = Vec::new();
    for name in place.names().await? {
        let place = place.below(&name);
        let shown = place.to_string();
        match place.manifest().await {
            Ok(Some(manifest)) => found.push((manifest, shown)),
            Ok(None) => context.output.note(format!("{shown} is unfinished: it has no manifest")),
            Err(error) => context.output.note(format!("{error:#}")),
        }
    }
    found.sort_by(|(a, _), (b, _)| (a.created_ms, &a.name).cmp(&(b.created_ms, &b.name)));
    show(&found, context)
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
        "+folder",
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
            "folder": folder,
        }));
    }
    context.output.list(&items, &table)
}

async fn restore(
    name: &str,
    from: Option<String>,
    storage: Storage,
    asked: Asked,
    context: &Context,
) -> anyhow::Result<()> {
    let state_dir = state_dir(context)?;
    let path = Path::new(name);
    let (place, name) = match (from, path.parent(), path.file_name().and_then(|name| name.to_str())) {
        (None, Some(parent), Some(last)) if name.contains('/') => (folder(parent.to_owned()), last),
        (from, ..) => (place(from, storage, &state_dir)?, name),
    };
    if name.contains('/') {
        let message = format!("{name:?} is no name of a snapshot, which --from takes");
        return Err(problem(Code::InvalidValue, message));
    }
    let place = place.below(name);
    let whence = place.to_string();
    let Some(manifest) = place.manifest().await? else {
        let what = match place.is_taken().await? {
            true => format!("snapshot {name} was never finished: {whence} has no manifest.json"),
            false => format!("there is no snapshot {name}: nothing is at {whence}"),
        };
        return Err(problem(Code::SnapshotUnusable, what));
    };
    // Held until the end: the cluster is down, and stays down.
    let mut held = StateDir::hold(&state_dir)?;
    let known = created(held.folder())?;
    if let Some(cluster) = &known
        && !asked.yes
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
        None => snapshot::cluster_of(&manifest)?,
    };
    let workers = asked.workers.unwrap_or(cluster.spec.workers);
    cluster.spec.partitions = asked.partitions.unwrap_or(cluster.spec.partitions);
    let (id, shape) = (cluster.id()?, engram_snapshot::shape_of(&cluster.spec));
    manifest.check_owner(&whence, id)?;
    manifest.check_shape(&whence, shape)?;
    let fetched = match &place {
        Place::Folder(_) => None,
        Place::Objects(_) => Some(fetch(&manifest, &place, held.folder(), context).await?),
    };
    let folder = match (&place, &fetched) {
        (Place::Folder(folder), _) => folder.path().to_owned(),
        (_, Some(fetched)) => fetched.path().to_owned(),
        (Place::Objects(_), None) => unreachable!("what lies in a storage was fetched"),
    };
    let (output, capacity) = (context.output, cluster.spec.capacity.memories);
    // It reads and writes everything there is.
    let restored = tokio::task::spawn_blocking(move || {
        let into = snapshot::Into { state_dir: held.folder(), cluster: id, shape, capacity, workers };
        let from = snapshot::From { folder: &folder, whence: &whence, manifest: &manifest };
        let work = from.work(into);
        let mut progress = Progress::new(&output, "bytes", Some(work));
        let restored = snapshot::restore(from, into, |bytes| {
            let done = progress.done() + bytes;
            progress.set(done, if done > manifest.bytes { "copied" } else { "checked" });
        })?;
        drop(progress);
        (cluster.spec.workers, cluster.memories) = (restored.workers, restored.memories);
        held.keep(&cluster)?;
        anyhow::Ok((restored, cluster.spec.partitions))
    });
    let (restored, partitions) = restored.await.context("the restore ended early")??;
    drop(fetched);
    let digest = restored.digest.to_string();
    let mut table = Table::new(&["snapshot", ">memories", ">workers", ">partitions", "digest"]);
    let (kept, workers) = (count(restored.memories), restored.workers);
    table.row([name.to_owned(), kept, workers.to_string(), partitions.to_string(), digest.clone()]);
    let object = json!({
        "apiVersion": API_VERSION, "kind": "Restored", "snapshot": name, "memories": restored.memories,
        "workers": workers, "partitions": partitions, "digest": digest, "stateDir": state_dir,
    });
    context.output.object(&object, &table)?;
    let state_dir = state_dir.display();
    context.output.note(format!(
        "start it: engram up FILE --state-dir {state_dir} (workers: {workers}, partitions: {partitions})"
    ));
    Ok(())
}

/// Fetches a snapshot into a folder beside the state that it is to replace.
async fn fetch(
    manifest: &Manifest,
    place: &Place,
    state_dir: &Path,
    context: &Context,
) -> anyhow::Result<tempfile::TempDir> {
    let folder = tempfile::Builder::new().prefix("snapshot-").tempdir_in(state_dir);
    let folder = folder.context("failed to make a folder for the snapshot")?;
    let mut progress = Progress::new(&context.output, "bytes", Some(manifest.bytes));
    let heard = |bytes| {
        let done = progress.done() + bytes;
        progress.set(done, "fetched");
    };
    engram_snapshot::download(manifest, place, folder.path(), heard).await?;
    Ok(folder)
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
