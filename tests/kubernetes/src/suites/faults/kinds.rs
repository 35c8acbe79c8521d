//! The faults, each done and undone: what it hits, how long the copies took to be whole, and what else must hold.

use super::map::Process;
use super::outcome::{Over, Promise};
use super::watch::{self, CLUSTERS};
use super::{TRIALS, WORKERS, install};
use crate::MERGE;
use crate::cluster::Cluster;
use crate::process::until;
use crate::suites::helpers::{PODS, uid};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CLAIMS: &str = "/api/v1/namespaces/default/persistentvolumeclaims?labelSelector=engram.dev%2Fcomponent%3Dworker,engram.dev%2Fcluster%3D";
const SET: &str = "/apis/apps/v1/namespaces/default/statefulsets";
const OPERATOR_PODS: &str = "/api/v1/namespaces/engram-system/pods";
/// How long the API server is away in CI.
const OUTAGE: Duration = Duration::from_secs(30);
/// Workers that a cluster grows to and shrinks from.
const MORE: usize = 5;
/// A change that goes from worker to worker.
const CHANGED: Duration = Duration::from_secs(240);

/// A kind of fault.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    pub(super) name: &'static str,
    pub(super) promise: Promise,
    pub(super) times: u32,
    /// Prepares what the fault needs, before the cluster is idle.
    pub(super) prepare: fn(&Cluster) -> Result<()>,
    pub(super) inflict: fn(&Cluster) -> Result<Over>,
}

/// How often each fault is done in CI, where time is short; the campaign repeats them.
const TIMES: u32 = 1;

impl Kind {
    const fn failure(name: &'static str, inflict: fn(&Cluster) -> Result<Over>) -> Self {
        Self { name, promise: Promise::Failure, times: TIMES, prepare: |_| Ok(()), inflict }
    }

    const fn planned(name: &'static str, inflict: fn(&Cluster) -> Result<Over>) -> Self {
        Self { promise: Promise::Planned, ..Self::failure(name, inflict) }
    }

    const fn once(self) -> Self {
        Self { times: 1, ..self }
    }
}

pub(super) const POD: Kind = Kind::failure("pod deleted", pod_deleted);
pub(super) const WORKER: Kind = Kind::failure("worker killed", worker_killed);
pub(super) const CONTAINER: Kind = Kind::failure("container killed", container_killed);
pub(super) const NODE: Kind = Kind::failure("node killed", node_killed);
pub(super) const CUT_OFF: Kind = Kind::failure("node cut off", node_cut_off);
pub(super) const OPERATOR_AND_NODE: Kind = Kind {
    prepare: lead_next_to_a_worker,
    ..Kind::failure("leading operator and a worker's node killed", operator_and_node)
};
/// In a row, without the minute in between that kubelets take to watch again.
pub(super) const NO_API: Kind = Kind::planned("API server down for 30 s", |it| no_api(it, OUTAGE, TIMES)).once();
pub(super) const NO_API_LONG: Kind =
    Kind::planned("API server down for 2 min", |it| no_api(it, Duration::from_secs(120), 1)).once();
pub(super) const SCALE: Kind = Kind::planned("scaled from 3 to 5 and back", scaled);
pub(super) const UPGRADE: Kind = Kind::planned("operator upgraded", upgraded);
pub(super) const GROWTH: Kind = Kind::planned("disks grown", disks_grown);
pub(super) const IMAGE: Kind = Kind::planned("image changed", image_changed);
pub(super) const VERSIONS: Kind = Kind::planned("workers of an earlier build, and back", versions_changed);

/// Whom a fault hits.
struct Victim {
    pod: Value,
    ordinal: u32,
    processes: Vec<Process>,
    led: usize,
}

impl Victim {
    /// The worker that leads most.
    fn busiest(cluster: &Cluster) -> Result<Self> {
        Self::busiest_of(cluster, |_| true)
    }

    /// The worker with the most primaries, of those on such nodes. The loss of one without primaries goes unnoticed.
    fn busiest_of(cluster: &Cluster, is_meant: impl Fn(u8) -> bool) -> Result<Self> {
        let map = watch::map(cluster)?;
        let pods = watch::pods(cluster)?.into_iter().filter(|pod| cluster.node_of(pod).is_ok_and(&is_meant));
        let led = |pod: &Value| map.primaries(watch::ordinal(pod));
        let pod = pods.max_by_key(led).filter(|pod| led(pod) > 0).context("no worker there leads anything")?;
        let ordinal = watch::ordinal(&pod);
        Ok(Self { processes: map.processes(ordinal), led: led(&pod), ordinal, pod })
    }

    fn name(&self) -> &str {
        name_of(&self.pod)
    }

    fn description(&self) -> String {
        format!("worker {}, which led {}", self.ordinal, self.led)
    }
}

fn name_of(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().unwrap_or_default()
}

/// How often a pod's container was started again.
fn starts(pod: &Value) -> u64 {
    pod["status"]["containerStatuses"][0]["restartCount"].as_u64().unwrap_or(0)
}

fn pod_deleted(cluster: &Cluster) -> Result<Over> {
    let victim = Victim::busiest(cluster)?;
    let began = Instant::now();
    cluster.api().delete(&format!("{PODS}/{}", victim.name()), None)?;
    let whole = watch::whole(cluster, began, &victim.processes)?;
    until("another pod", watch::WHOLE, || {
        Ok(cluster.api().find(&format!("{PODS}/{}", victim.name()))?.filter(|pod| uid(pod) != uid(&victim.pod)))
    })?;
    Ok(Over { whole, note: victim.description() })
}

/// The worker alone: the container's first process lives on for a moment, and reports the death to the coordinators.
fn worker_killed(cluster: &Cluster) -> Result<Over> {
    let victim = Victim::busiest(cluster)?;
    let began = Instant::now();
    cluster.kill_children("default", victim.name(), "worker")?;
    restarted(cluster, &victim, began)
}

/// All processes of the container at once: no process is left to report it.
fn container_killed(cluster: &Cluster) -> Result<Over> {
    let victim = Victim::busiest(cluster)?;
    let began = Instant::now();
    cluster.kill_container("default", victim.name(), "worker")?;
    restarted(cluster, &victim, began)
}

fn restarted(cluster: &Cluster, victim: &Victim, began: Instant) -> Result<Over> {
    let whole = watch::whole(cluster, began, &victim.processes)?;
    until("the container to be started again", watch::WHOLE, || {
        let pod = cluster.api().get(&format!("{PODS}/{}", victim.name()))?;
        ensure!(uid(&pod) == uid(&victim.pod), "the pod is another one");
        Ok((starts(&pod) > starts(&victim.pod)).then_some(()))
    })?;
    Ok(Over { whole, note: victim.description() })
}

fn node_killed(cluster: &Cluster) -> Result<Over> {
    // One without an operator, where its worker leads anything: the other kind is a fault of its own.
    let operators = watch::operators(cluster)?.iter().map(|pod| cluster.node_of(pod)).collect::<Result<Vec<_>>>()?;
    let victim = Victim::busiest_of(cluster, |node| !operators.contains(&node));
    node_lost(cluster, &victim.or_else(|_| Victim::busiest(cluster))?)
}

/// Makes the leading operator one on a node with a primary: another leader steps down.
fn lead_next_to_a_worker(cluster: &Cluster) -> Result<()> {
    let mut stopped = String::new();
    until("an operator to lead on a node with a primary", watch::WHOLE, || {
        let leader = watch::leader(cluster)?;
        let is_next_to = worker_on_node_of(cluster, &leader).is_ok();
        // The pod that comes in the place of one that went may be as quick as the other operator.
        if !is_next_to && uid(&leader) != stopped {
            stopped = uid(&leader);
            cluster.api().delete(&format!("{OPERATOR_PODS}/{}", name_of(&leader)), None)?;
        }
        Ok(is_next_to.then_some(()))
    })
}

fn operator_and_node(cluster: &Cluster) -> Result<Over> {
    node_lost(cluster, &worker_on_node_of(cluster, &watch::leader(cluster)?)?)
}

/// The worker on the node of another pod.
fn worker_on_node_of(cluster: &Cluster, pod: &Value) -> Result<Victim> {
    let node = cluster.node_of(pod)?;
    Victim::busiest_of(cluster, |it| it == node)
}

/// Kills a worker's node, and brings it back once the others have all copies.
fn node_lost(cluster: &Cluster, victim: &Victim) -> Result<Over> {
    let node = cluster.node_of(&victim.pod)?;
    let on_it = |pod: &Value| cluster.node_of(pod).is_ok_and(|it| it == node);
    let pods = watch::pods(cluster)?.into_iter().chain(watch::operators(cluster)?);
    let before: Vec<(String, u64)> = pods.filter(on_it).map(|pod| (uid(&pod), starts(&pod))).collect();
    let began = Instant::now();
    cluster.kill_node(node)?;
    let whole = watch::whole(cluster, began, &victim.processes);
    // Whatever came of it: the next fault wants four nodes.
    cluster.add_node(node)?;
    // Their loss may not be noticed yet.
    until("the pods of the node to be started again", watch::WHOLE, || {
        let now: Vec<Value> = watch::pods(cluster)?.into_iter().chain(watch::operators(cluster)?).collect();
        let old = |(of, count): &(String, u64)| now.iter().any(|pod| uid(pod) == *of && starts(pod) == *count);
        Ok((!before.iter().any(old)).then_some(()))
    })?;
    Ok(Over { whole: whole?, note: format!("n{node} with {}", victim.description()) })
}

fn node_cut_off(cluster: &Cluster) -> Result<Over> {
    let victim = Victim::busiest(cluster)?;
    let node = cluster.node_of(&victim.pod)?;
    let began = Instant::now();
    cluster.partition_node(node)?;
    let whole = watch::whole(cluster, began, &victim.processes);
    cluster.heal_node(node)?;
    Ok(Over { whole: whole?, note: format!("n{node} with {}", victim.description()) })
}

/// Without the API server nothing is changed, and reads and writes of memories continue.
fn no_api(cluster: &Cluster, time: Duration, times: u32) -> Result<Over> {
    let (pods, terms) = (watch::identities(cluster)?, watch::map(cluster)?.terms());
    let addresses = watch::pods(cluster)?;
    let mut notes = Vec::new();
    let mut over = Duration::ZERO;
    let mut back = Instant::now();
    for _ in 0..times {
        cluster.stop_api()?;
        // It is this long that is asked for.
        std::thread::sleep(time);
        let readiness = watch::ready_by_themselves(cluster, &addresses);
        cluster.start_api()?;
        back = Instant::now();
        readiness?;
        over = over.max(watch::whole(cluster, back, &[])?);
        let acts = (acts(cluster)? - back).as_secs_f64();
        notes.push(format!("the operator acts {acts:.1} s after its return"));
    }
    // Nodes and pods are reported as not Ready until every kubelet and controller watches again. A worker says what it is all the while.
    watch::settled_but(cluster, WORKERS, || watch::ready_by_themselves(cluster, &addresses))?;
    notes.push(format!("kubelets after {:.1} s", back.elapsed().as_secs_f64()));
    ensure!(watch::identities(cluster)? == pods, "a pod was replaced or restarted");
    ensure!(watch::map(cluster)?.terms() == terms, "partitions changed hands");
    Ok(Over { whole: over, note: notes.join("; ") })
}

/// Wants something of the operator, and says when it was done: what a status said before it looked again is worth nothing.
fn acts(cluster: &Cluster) -> Result<Instant> {
    const MARK: &str = "asked";
    let service = format!("/api/v1/namespaces/default/services/{TRIALS}");
    let before = cluster.api().get(&service)?["metadata"]["annotations"][MARK].as_str().map_or(0, str::len);
    let asked = "x".repeat(before + 1);
    edit(cluster, &json!({ "service": { "annotations": { MARK: asked } } }))?;
    until("the operator to act", watch::WHOLE, || {
        Ok((cluster.api().get(&service)?["metadata"]["annotations"][MARK] == asked).then(Instant::now))
    })
}

fn edit(cluster: &Cluster, spec: &Value) -> Result<()> {
    cluster.api().patch(&format!("{CLUSTERS}/{TRIALS}"), MERGE, &json!({ "spec": spec })).map(drop)
}

fn scaled(cluster: &Cluster) -> Result<Over> {
    let began = Instant::now();
    let to = |workers: usize| -> Result<Duration> {
        let began = Instant::now();
        edit(cluster, &json!({ "workers": workers }))?;
        until(&format!("{workers} workers with their share"), CHANGED, || {
            let map = watch::map(cluster)?;
            let takes_part = |ordinal: u32| !map.processes(ordinal).is_empty();
            let others = (workers..MORE).any(|it| takes_part(it as u32));
            let all = (0..workers).all(|it| takes_part(it as u32));
            let pods = watch::pods(cluster)?.len();
            ensure!(all && !others && pods == workers, "{pods} pods; all have copies: {all}, others have: {others}");
            Ok(Some(()))
        })?;
        watch::settled(cluster, workers)?;
        Ok(began.elapsed())
    };
    let (up, down) = (to(MORE)?, to(WORKERS)?);
    let note = format!("up in {:.1} s, down in {:.1} s", up.as_secs_f64(), down.as_secs_f64());
    Ok(Over { whole: began.elapsed(), note })
}

/// Every disk by one size more: the claims, and what a claim of a further worker would ask for. Pods keep running on them.
fn disks_grown(cluster: &Cluster) -> Result<Over> {
    const GIBIBYTES: &str = "Gi";
    let (pods, before) = (watch::identities(cluster)?, claims(cluster)?);
    let asked = cluster.api().get(&format!("{CLUSTERS}/{TRIALS}"))?["spec"]["storage"]["size"].take();
    let number = asked.as_str().and_then(|it| it.strip_suffix(GIBIBYTES)?.parse::<u32>().ok());
    let size = format!("{}{GIBIBYTES}", number.with_context(|| format!("a size of {asked}"))? + 1);
    let began = Instant::now();
    edit(cluster, &json!({ "storage": { "size": size } }))?;
    until("all disks to be larger", CHANGED, || {
        let now = claims(cluster)?;
        let grown = now.iter().filter(|claim| claim["status"]["capacity"]["storage"] == size).count();
        ensure!(grown == WORKERS && now.len() == WORKERS, "{grown} of {} disks have {size}", now.len());
        let set = cluster.api().get(&format!("{SET}/{TRIALS}-worker"))?;
        let template = &set["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"];
        ensure!(*template == size, "a further worker would get {template}");
        Ok(Some(()))
    })?;
    let took = began.elapsed().as_secs_f64();
    let whole = watch::whole(cluster, began, &[])?;
    watch::settled(cluster, WORKERS)?;
    ensure!(watch::identities(cluster)? == pods, "a worker was replaced or restarted");
    let identity = |claim: &Value| claim["metadata"]["uid"].clone();
    let now = claims(cluster)?;
    ensure!(now.iter().map(identity).eq(before.iter().map(identity)), "a disk is another one");
    Ok(Over { whole, note: format!("{WORKERS} disks have {size} after {took:.1} s, and no worker was restarted") })
}

/// The claims of the workers, by name.
fn claims(cluster: &Cluster) -> Result<Vec<Value>> {
    let mut claims = cluster.api().get(&format!("{CLAIMS}{TRIALS}"))?;
    let mut claims = claims["items"].as_array_mut().map(std::mem::take).context("no list of claims")?;
    claims.sort_by(|a, b| name_of(a).cmp(name_of(b)));
    Ok(claims)
}

/// Another template of the operator's pods, and another image that it would give to new workers.
fn upgraded(cluster: &Cluster) -> Result<Over> {
    let (pods, terms) = (watch::identities(cluster)?, watch::map(cluster)?.terms());
    let before: Vec<String> = watch::operators(cluster)?.iter().map(uid).collect();
    // Each of several upgrades of one release is one.
    let build = format!("worker.image.tag=2,podAnnotations.build={}", before.concat());
    let began = Instant::now();
    install::helm(cluster, &build)?;
    until("other operators", watch::WHOLE, || {
        let now = watch::operators(cluster)?;
        Ok((now.len() == 2 && now.iter().all(|pod| !before.contains(&uid(pod)))).then_some(()))
    })?;
    until("the new operator to offer its image", watch::WHOLE, || {
        Ok(watch::condition(&watch::status(cluster)?, "UpdateAvailable").0.then_some(()))
    })?;
    let whole = watch::whole(cluster, began, &[])?;
    watch::settled(cluster, WORKERS)?;
    ensure!(watch::identities(cluster)? == pods, "a worker was replaced or restarted");
    let now = watch::map(cluster)?.terms();
    let moved = terms.iter().zip(&now).filter(|(before, now)| before != now).count();
    Ok(Over { whole, note: format!("no worker was restarted, {moved} partitions changed hands") })
}

fn image_changed(cluster: &Cluster) -> Result<Over> {
    let before = watch::pods(cluster)?;
    let now = &before.first().context("there is no worker")?["spec"]["containers"][0]["image"];
    let tag = if *now == format!("{}:2", install::WORKER) { "1" } else { "2" };
    let whole = changed_to(cluster, tag)?;
    Ok(Over { whole, note: format!("{WORKERS} workers, one after the other") })
}

/// Every worker in between speaks with one of the other build, and opens what that has written.
fn versions_changed(cluster: &Cluster) -> Result<Over> {
    let (back, on) = (changed_to(cluster, install::EARLIER)?, changed_to(cluster, "1")?);
    let seconds = (back.as_secs_f64(), on.as_secs_f64());
    Ok(Over { whole: back.max(on), note: format!("downgraded in {:.1} s, upgraded in {:.1} s", seconds.0, seconds.1) })
}

/// Gives all workers the image of this tag, one after the other, and waits until the cluster is idle.
fn changed_to(cluster: &Cluster, tag: &str) -> Result<Duration> {
    let image = format!("{}:{tag}", install::WORKER);
    let began = Instant::now();
    edit(cluster, &json!({ "image": image }))?;
    until("all workers to run it", CHANGED, || {
        let pods = watch::pods(cluster)?;
        let running = pods.iter().filter(|pod| pod["spec"]["containers"][0]["image"] == image).count();
        ensure!(running == WORKERS, "{running} of {WORKERS} workers run {image}");
        Ok(Some(()))
    })?;
    watch::settled(cluster, WORKERS)?;
    Ok(began.elapsed())
}
