//! Devices by process: `engram edge` while its server is away, while other clients move the model on, and while the network alters what it receives.

use super::federated::{keys, manifest, model, named, participants, task, wait_for_success};
use engram_client::{Client, Options};
use engram_participant::Error;
use engram_tests::{Cluster, ClusterBuilder, DEADLINE, binary, cluster_manifest, wait_for};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Values of a model: three updates are more than the MiB that the queue may have.
const VALUES: usize = 100_000;
const ONE_MIB: [&str; 2] = ["--queue-mib", "1"];
/// Notes that it trains, waits until it may go on, and returns a model of ones.
const TRAIN: &str = "grep version task.json >> ../trained\nuntil [ -e ../go ]; do sleep 0.05; done\ncp ../ones.f32 trained.f32\necho '{\"samples\": 1}' > result.json\n";
/// Queued updates are sent without it.
const NO_TRAINING: &str = "touch ../trained-again; exit 1";
/// Attempts without a server that are waited for.
const ATTEMPTS: u32 = 3;
const RUNS: [&str; 3] = ["alpha", "beta", "gamma"];

fn run_of_one(name: &str, rounds: usize) -> String {
    let clients = "clients: { population: 4, perRound: 4, minimum: 4 }";
    manifest(name, rounds, "    lease: 86400s\n    deadline: 86400s\n")
        .replace(clients, "clients: { population: 1, perRound: 1 }")
        .replace("shape: [4]", &format!("shape: [{VALUES}]"))
}

fn submit(cluster: &Cluster, name: &str, text: &str) {
    let file = cluster.file(&format!("{name}.yaml"), text);
    cluster.engram(&["run", &file, "--no-wait"]).exits_with(0);
}

/// Files of a device.
struct State(PathBuf);

impl State {
    fn new(folder: &Path) -> Self {
        fs::create_dir_all(folder).expect("failed to create a folder");
        let state = Self(folder.to_owned());
        fs::write(state.0.join("ones.f32"), 1.0_f32.to_le_bytes().repeat(VALUES)).expect("failed to write a file");
        state
    }

    fn trained(&self) -> usize {
        fs::read_to_string(self.0.join("trained")).map_or(0, |text| text.lines().count())
    }

    fn let_go(&self) {
        fs::write(self.0.join("go"), "").expect("failed to write a file");
    }

    fn hold(&self) {
        fs::remove_file(self.0.join("go")).expect("failed to remove a file");
    }

    fn queued(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.0.join("queue")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|it| it == "update")).collect()
    }

    fn queued_bytes(&self) -> u64 {
        self.queued().iter().map(|path| path.metadata().map_or(0, |metadata| metadata.len())).sum()
    }

    /// A copy, as a backup of the device's disk.
    fn copy(&self, folder: &Path) -> Self {
        let copy = Self::new(folder);
        fs::create_dir_all(folder.join("queue")).expect("failed to create a folder");
        let files = self.queued().into_iter().chain(["keys.json", "model-key"].map(|name| self.0.join(name)));
        for file in files {
            let name = file.strip_prefix(&self.0).expect("the file is of this device");
            fs::copy(&file, folder.join(name)).expect("failed to copy a file");
        }
        copy
    }
}

/// A running `engram edge`.
struct Device {
    process: Child,
    log: PathBuf,
}

impl Device {
    /// Starts the device, which ends with the first update that is acknowledged.
    fn start(state: &State, run: &str, endpoint: &str, bounds: &[&str], program: &str) -> Self {
        let log = state.0.with_extension(format!("{run}.log"));
        let file = fs::File::create(&log).expect("failed to create the log");
        let folder = state.0.display().to_string();
        let mut command = Command::new(binary());
        command.args(["edge", "--run", run, "--client", "car", "--state", &folder, "--endpoint", endpoint]);
        command.args(bounds).args(["--updates", "1", "--", "sh", "-c", program]);
        command.stdin(Stdio::null()).stdout(file.try_clone().expect("failed to clone a file handle")).stderr(file);
        Self { process: command.spawn().expect("failed to start the device"), log }
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    #[track_caller]
    fn logs(&self, text: &str) {
        assert!(self.text().contains(text), "no {text:?} in the log:\n{}", self.text());
    }

    fn wait_for_log(&self, text: &str) {
        wait_for(text, DEADLINE, || self.text().contains(text).then_some(()));
    }

    #[track_caller]
    fn exits(&mut self) -> ExitStatus {
        let process = &mut self.process;
        wait_for("the device to exit", DEADLINE, || process.try_wait().expect("failed to wait for the device"))
    }

    #[track_caller]
    fn succeeds(mut self) {
        let status = self.exits();
        assert!(status.success(), "{status}\n{}", self.text());
        self.logs("acknowledged");
    }
}

impl Drop for Device {
    /// As a power failure.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- {}\n{}", self.log.display(), self.text());
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn endpoint(cluster: &Cluster, worker: usize) -> String {
    let endpoints = cluster.endpoints().expect("the cluster is running");
    endpoints["workers"][worker]["client"].as_str().expect("a worker has an address").to_owned()
}

/// A cluster whose workers have the same addresses after a restart: below the ports that other clusters choose.
fn cluster_at_fixed_ports() -> ClusterBuilder {
    const PORTS: std::ops::Range<u16> = 4_000..8_000;
    let start = PORTS.start + (std::process::id() % 50) as u16 * 30;
    let is_free = |base: &u16| (*base..*base + 30).all(|port| TcpListener::bind(("127.0.0.1", port)).is_ok());
    let base = (start..PORTS.end).step_by(30).find(is_free).expect("no free ports");
    ClusterBuilder::new(&cluster_manifest("fed", 2, "  partitions: 4\n")).with(&["--port-base", &base.to_string()])
}

#[test]
fn queued_updates_outlive_server_and_device_within_their_bounds_and_count_once() {
    let mut cluster = cluster_at_fixed_ports().start();
    let address = endpoint(&cluster, 0);
    let folder = cluster.folder().join("device");
    let state = State::new(&folder);
    for run in RUNS {
        submit(&cluster, run, &run_of_one(run, 2));
    }
    // Three runs one after another: each gets its task, then all of the server is killed while the device trains.
    let mut device = None;
    for (number, run) in RUNS.into_iter().enumerate() {
        let started = Device::start(&state, run, &address, &ONE_MIB, TRAIN);
        wait_for("training", DEADLINE, || (state.trained() == number + 1).then_some(()));
        let stopped = cluster.kill_all(DEADLINE);
        state.let_go();
        started.wait_for_log(&format!("attempt {} to reach run {run} failed", if number == 0 { ATTEMPTS } else { 1 }));
        if number == 0 {
            check_pauses(&started.text());
            assert_eq!(state.queued().len(), 1);
        }
        if number + 1 == RUNS.len() {
            started.logs("update of task 0 of run alpha dropped");
            started.logs("the queue is full, and the oldest update makes room");
            bound_by_number(&state, &folder.with_file_name("small"), &address);
            device = Some(started);
        } else {
            // A power failure of the device.
            drop(started);
        }
        state.hold();
        assert!(state.queued_bytes() <= 1 << 20, "{} bytes are queued", state.queued_bytes());
        cluster = stopped.start();
    }
    assert_eq!(state.queued().len(), 2, "two of three updates fit");
    let backup = State(folder.with_file_name("small"));
    // The device that waited sends its update, and no other one; the next one sends what the first left.
    device.expect("the last device runs").succeeds();
    assert_eq!(state.queued().len(), 1);
    Device::start(&state, "beta", &address, &ONE_MIB, NO_TRAINING).succeeds();
    assert_eq!((state.queued().len(), state.trained()), (0, RUNS.len()));
    // The same update again, from a copy of the queue that was made before.
    Device::start(&backup, "gamma", &address, &ONE_MIB, NO_TRAINING).succeeds();
    assert!(backup.queued().is_empty() && !backup.0.join("trained-again").exists());
    // What was dropped is computed again, under the same lease.
    state.let_go();
    Device::start(&state, "alpha", &address, &ONE_MIB, TRAIN).succeeds();
    assert_eq!(state.trained(), RUNS.len() + 1);
    for run in RUNS {
        let status = wait_for("the version", DEADLINE, || named(&cluster, run).filter(|run| run["epoch"] == 1));
        assert_eq!(status["updates"].as_u64(), Some(1), "{status}");
        let model = cluster.client(async |client| model(&client, run).await);
        assert!(model.len() == VALUES && model.iter().all(|value| *value == 1.0), "{run} counts its update once");
    }
    cluster.stop();
}

/// The pauses that the device printed are random parts of bounds that double.
fn check_pauses(log: &str) {
    for attempt in 1..=ATTEMPTS {
        let line = log.lines().find(|line| line.starts_with(&format!("warning: attempt {attempt} ")));
        let line = line.unwrap_or_else(|| panic!("attempt {attempt} is not in the log:\n{log}"));
        assert!(line.contains("1 updates queued"), "{line}");
        let (_, rest) = line.split_once("retrying in ").expect("the line has a pause");
        let (pause, rest) = rest.split_once(" of at most ").expect("the line has a bound");
        let (bound, _) = rest.split_once(" s: ").expect("the line has a unit and a cause");
        let (pause, bound): (f64, f64) = (pause.parse().expect("seconds"), bound.parse().expect("seconds"));
        assert_eq!(bound, f64::from(1 << (attempt - 1)), "{line}");
        assert!(pause > 0.0 && pause <= bound, "{line}");
    }
}

/// A bound in number holds for what is in the queue already: of two updates the older one is dropped.
fn bound_by_number(state: &State, folder: &Path, address: &str) {
    let copy = state.copy(folder);
    assert_eq!(copy.queued().len(), 2);
    let device = Device::start(&copy, "gamma", address, &["--queue-updates", "1"], NO_TRAINING);
    device.wait_for_log("update of task 0 of run beta dropped");
    assert_eq!(copy.queued().len(), 1);
}

#[test]
fn a_device_with_a_stale_model_trains_again_from_the_newest_one() {
    const NEWER: u64 = 22;
    let cluster = Cluster::up(&cluster_manifest("fed", 2, "  partitions: 4\n"));
    let clients = "clients: { population: 4, perRound: 4, minimum: 4 }";
    let text = manifest("moving", 40, "    strategy: { kind: FedBuff }\n    lease: 86400s\n")
        .replace(clients, "clients: { population: 2, perRound: 1 }")
        .replace("shape: [4]", &format!("shape: [{VALUES}]"));
    submit(&cluster, "moving", &text);
    let state = State::new(&cluster.folder().join("device"));
    let device = Device::start(&state, "moving", &endpoint(&cluster, 0), &[], TRAIN);
    wait_for("training", DEADLINE, || (state.trained() == 1).then_some(()));
    cluster.client(async |client| {
        let other = &participants(&client, "moving", &keys())[0];
        for version in 0..NEWER {
            let assignment = task(other).await.expect("the run goes on");
            assert_eq!(assignment.task.version, version);
            other.submit(&assignment.task, &vec![0.5; VALUES], 1, None).await.expect("failed to submit");
        }
    });
    state.let_go();
    let log = device.log.clone();
    device.succeeds();
    let log = fs::read_to_string(log).expect("failed to read the log");
    assert!(log.contains(&format!("dropped: update is {NEWER} versions old, more than 20")), "{log}");
    assert!(log.contains(&format!("training version {NEWER} of the model")), "{log}");
    assert!(state.queued().is_empty());
    let status =
        wait_for("the version", DEADLINE, || named(&cluster, "moving").filter(|run| run["epoch"] == NEWER + 1));
    assert_eq!(status["updates"].as_u64(), Some(NEWER + 1), "{status}");
    cluster.stop();
}

#[test]
fn a_device_refuses_an_altered_signature_or_model_before_its_program_sees_it() {
    let cluster = Cluster::up(&cluster_manifest("fed", 1, "  partitions: 4\n"));
    submit(&cluster, "signed", &run_of_one("signed", 1));
    let network = HostileNetwork::start(endpoint(&cluster, 0));
    let state = State::new(&cluster.folder().join("device"));
    state.let_go();
    for (alteration, refused) in [
        (
            Alteration::Signature,
            "not signed by the key of the run that this client expects; it was not used: the signature is invalid",
        ),
        (Alteration::Model, "the downloaded model has another digest than the task; it was not used"),
    ] {
        network.alter(alteration);
        let mut device = Device::start(&state, "signed", &network.address, &[], TRAIN);
        let status = device.exits();
        assert!(!status.success(), "{alteration:?}\n{}", device.text());
        device.logs(refused);
        assert_eq!((state.trained(), state.0.join("task").exists()), (0, false), "{alteration:?}");
    }
    // Neither is the newest model of a run that a reader asks for.
    let refused = cluster.client(async |_| {
        let client = Client::connect(Options::new(vec![network.address.clone()])).await.expect("failed to connect");
        participants(&client, "signed", &keys())[0].newest_model().await.expect_err("the model is altered")
    });
    assert!(matches!(refused, Error::Digest), "{refused}");
    network.alter(Alteration::None);
    Device::start(&state, "signed", &network.address, &[], TRAIN).succeeds();
    wait_for_success(&cluster, "signed");
    // Another key than that of the first task.
    submit(&cluster, "other", &run_of_one("other", 1));
    let kept = fs::read_to_string(state.0.join("model-key")).expect("the key of the first task is kept");
    assert!(kept.starts_with("signed "), "{kept}");
    fs::write(state.0.join("model-key"), kept.replace("signed ", "other ")).expect("failed to write the key");
    let mut device = Device::start(&state, "other", &network.address, &[], TRAIN);
    assert!(!device.exits().success());
    device.logs("the task names another key");
    assert_eq!(state.trained(), 1);
    cluster.stop();
}

#[test]
fn a_device_whose_task_ends_before_it_has_the_model_takes_the_next_task() {
    let cluster = Cluster::up(&cluster_manifest("fed", 1, "  partitions: 4\n"));
    let clients = "clients: { population: 4, perRound: 4, minimum: 4 }";
    let text = manifest("left", 40, "    strategy: { kind: FedBuff }\n    lease: 1s\n")
        .replace(clients, "clients: { population: 2, perRound: 1 }")
        .replace("shape: [4]", &format!("shape: [{VALUES}]"));
    submit(&cluster, "left", &text);
    let network = HostileNetwork::start(endpoint(&cluster, 0));
    let state = State::new(&cluster.folder().join("device"));
    state.let_go();
    network.alter(Alteration::Delay);
    let device = Device::start(&state, "left", &network.address, &[], TRAIN);
    let training = |count: f64| named(&cluster, "left").filter(|run| run["metrics"]["clients_training"] == count);
    wait_for("the task of the device", DEADLINE, || training(1.0));
    wait_for("the end of its lease", DEADLINE, || training(0.0));
    // The version that the task names is not kept any more.
    cluster.client(async |client| {
        let other = &participants(&client, "left", &keys())[0];
        let assignment = task(other).await.expect("the run goes on");
        other.submit(&assignment.task, &vec![0.5; VALUES], 1, None).await.expect("failed to submit");
    });
    wait_for("the version", DEADLINE, || named(&cluster, "left").filter(|run| run["epoch"] == 1));
    network.alter(Alteration::None);
    let log = device.log.clone();
    device.succeeds();
    let log = fs::read_to_string(log).expect("failed to read the log");
    assert!(log.contains("training version 1 of the model") && !log.contains("failed"), "{log}");
    cluster.stop();
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Alteration {
    None,
    /// A task arrives when this ends.
    Delay,
    /// A bit of the signature of a task.
    Signature,
    /// A byte of a downloaded model, which is all zeros.
    Model,
}

/// Stands between a device and the only worker, and alters what the worker sends.
struct HostileNetwork {
    address: String,
    alteration: Arc<AtomicU8>,
}

impl HostileNetwork {
    fn start(worker: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("failed to listen");
        let address = listener.local_addr().expect("the listener has an address").to_string();
        let alteration = Arc::new(AtomicU8::new(Alteration::None as u8));
        let network = Self { address: address.clone(), alteration: Arc::clone(&alteration) };
        std::thread::spawn(move || {
            for device in listener.incoming().flatten() {
                let Ok(server) = TcpStream::connect(&worker) else { continue };
                let (from, to) = (device.try_clone(), server.try_clone());
                let (Ok(mut from), Ok(mut to)) = (from, to) else { continue };
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
                // The device learns the address of the worker from the map: it is to stay on this way.
                let names = [worker.clone(), address.clone()];
                let alteration = Arc::clone(&alteration);
                std::thread::spawn(move || relay(server, device, &names, &alteration));
            }
        });
        network
    }

    fn alter(&self, alteration: Alteration) {
        self.alteration.store(alteration as u8, Ordering::SeqCst);
    }
}

fn relay(mut server: TcpStream, mut device: TcpStream, names: &[String; 2], alteration: &AtomicU8) {
    let mut buffer = vec![0; 1 << 20];
    while let Ok(read @ 1..) = server.read(&mut buffer) {
        // The rest of a message that is being sent.
        let mut length = read;
        server.set_read_timeout(Some(Duration::from_millis(5))).expect("a timeout above zero");
        while let Ok(more @ 1..) = server.read(&mut buffer[length..]) {
            length += more;
        }
        server.set_read_timeout(None).expect("no timeout is allowed");
        let content = &mut buffer[..length];
        replace(content, names);
        while signature(content).is_some() && alteration.load(Ordering::SeqCst) == Alteration::Delay as u8 {
            std::thread::sleep(Duration::from_millis(5));
        }
        alter(content, alteration.load(Ordering::SeqCst));
        if device.write_all(content).is_err() {
            break;
        }
    }
    let _ = device.shutdown(Shutdown::Both);
}

fn replace(content: &mut [u8], [from, to]: &[String; 2]) {
    assert_eq!(from.len(), to.len(), "ports have five digits");
    while let Some(at) = content.windows(from.len()).position(|window| window == from.as_bytes()) {
        content[at..at + to.len()].copy_from_slice(to.as_bytes());
    }
}

/// Place of the signature of a task: after fields 13, a key of 32 bytes, and 14, a signature of 64.
fn signature(content: &[u8]) -> Option<usize> {
    let is_signed = |window: &[u8]| window[..2] == [0x6a, 32] && window[34..36] == [0x72, 64];
    content.windows(100).position(is_signed).map(|at| at + 36)
}

fn alter(content: &mut [u8], alteration: u8) {
    let at = if alteration == Alteration::Signature as u8 {
        signature(content)
    } else if alteration == Alteration::Model as u8 {
        content.windows(256).position(|window| window.iter().all(|byte| *byte == 0))
    } else {
        None
    };
    if let Some(at) = at {
        content[at] ^= 1;
    }
}
