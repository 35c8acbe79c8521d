//! Volumes for claims of the class `local`: a folder on the pod's node, deleted with its claim.
//!
//! Growth is a stand-in: the capacity of volume and claim say more, no file system grows and no size is enforced.

use crate::http::{Api, MERGE};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::Duration;

const CLASS: &str = "local";
const CLAIMS: &str = "/api/v1/persistentvolumeclaims";
const VOLUMES: &str = "/api/v1/persistentvolumes";
/// Interval between full lists of claims, and between attempts to watch them.
const LOOK: Duration = Duration::from_millis(100);
/// Maximum time without a full list: a broken watch may have missed a change.
const ANYWAY: Duration = Duration::from_secs(10);
/// How long the server lets a watch last.
const WATCH_SECONDS: u32 = 240;

/// Serves claims until it is ended; volumes are folders below `folder`.
///
/// Looks when something has changed: lists of all claims several times a second would be a fifth of what the API server is asked.
pub fn run(api: &Api, folder: &Path) {
    let (change, changes) = mpsc::sync_channel(1);
    for kind in [CLAIMS, VOLUMES] {
        let (api, change) = (api.clone(), change.clone());
        thread::spawn(move || watch(&api, kind, &change));
    }
    loop {
        let looked = look(api, folder);
        thread::sleep(LOOK);
        match looked {
            Ok(()) => drop(changes.recv_timeout(ANYWAY)),
            // No API server, or a conflict: the next pass retries.
            Err(error) => println!("again: {error:#}"),
        }
    }
}

/// Reports each change of a kind of objects, and all existing objects at first.
fn watch(api: &Api, kind: &str, change: &SyncSender<()>) {
    loop {
        let ended = api.watch(&format!("{kind}?watch=true&timeoutSeconds={WATCH_SECONDS}"), |_| {
            // One pending report is enough.
            let _ = change.try_send(());
            Ok(())
        });
        if let Err(error) = ended {
            println!("again: {error:#}");
        }
        thread::sleep(LOOK);
    }
}

fn look(api: &Api, folder: &Path) -> Result<()> {
    let of_class = |list: Value| -> Vec<Value> {
        let all = list["items"].as_array().cloned().unwrap_or_default();
        all.into_iter().filter(|it| it["spec"]["storageClassName"] == CLASS).collect()
    };
    let volumes = of_class(api.get(VOLUMES)?);
    let by_name: HashMap<&str, &Value> =
        volumes.iter().filter_map(|it| Some((it["metadata"]["name"].as_str()?, it))).collect();
    for claim in of_class(api.get(CLAIMS)?) {
        let uid = claim["metadata"]["uid"].as_str().context("a claim has no uid")?;
        let node = claim["metadata"]["annotations"]["volume.kubernetes.io/selected-node"].as_str();
        match (by_name.get(volume_name(uid).as_str()), node) {
            (None, Some(node)) => provision(api, folder, &claim, uid, node)?,
            (Some(volume), _) if claim["status"]["phase"] == "Bound" => grow(api, &claim, volume)?,
            _ => {}
        }
    }
    for volume in &volumes {
        let released = volume["status"]["phase"] == "Released";
        if released && volume["spec"]["persistentVolumeReclaimPolicy"] == "Delete" {
            remove(api, folder, volume)?;
        }
    }
    Ok(())
}

fn volume_name(claim: &str) -> String {
    format!("pvc-{claim}")
}

fn provision(api: &Api, folder: &Path, claim: &Value, uid: &str, node: &str) -> Result<()> {
    let path = folder.join(node).join(uid);
    fs::create_dir_all(&path)?;
    let (metadata, spec) = (&claim["metadata"], &claim["spec"]);
    let term = json!({"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]});
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {
            "name": volume_name(uid), "annotations": {"pv.kubernetes.io/provisioned-by": "engram.test/local"}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "storageClassName": CLASS,
            "persistentVolumeReclaimPolicy": "Delete",
            "volumeMode": "Filesystem",
            // Not hostPath: kubelet gives `local` volumes the pod's group.
            "local": {"path": path},
            "claimRef": {
                "apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": metadata["namespace"],
                "name": metadata["name"], "uid": uid},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}},
        },
    });
    api.create(VOLUMES, &volume).map(drop)
}

fn grow(api: &Api, claim: &Value, volume: &Value) -> Result<()> {
    let size = &claim["spec"]["resources"]["requests"]["storage"];
    let text = |it: &Value| it.as_str().unwrap_or_default().to_owned();
    if volume["spec"]["capacity"]["storage"] != *size {
        let change = json!({"spec": {"capacity": {"storage": size}}});
        api.patch(&format!("{VOLUMES}/{}", text(&volume["metadata"]["name"])), MERGE, &change)?;
    }
    if claim["status"]["capacity"]["storage"] != *size {
        let [namespace, name] = ["namespace", "name"].map(|it| text(&claim["metadata"][it]));
        let change = json!({"status": {"capacity": {"storage": size}, "conditions": null}});
        api.patch(&format!("/api/v1/namespaces/{namespace}/persistentvolumeclaims/{name}/status"), MERGE, &change)?;
    }
    Ok(())
}

fn remove(api: &Api, folder: &Path, volume: &Value) -> Result<()> {
    let path = Path::new(volume["spec"]["local"]["path"].as_str().context("a volume has no path")?);
    // An object could name any folder; only our own are removed.
    if path.starts_with(folder) && path.exists() {
        fs::remove_dir_all(path)?;
    }
    let name = volume["metadata"]["name"].as_str().context("a volume has no name")?;
    api.delete(&format!("{VOLUMES}/{name}"), None)
}
