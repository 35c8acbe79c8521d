//! Tasks of runs: a worker is reserved for one task.

use crate::emulated_driver::run_with_emulated_driver;
use crate::harness::{Cluster, block_on, spec, until};
use engram_api::{GpuMode, LearnerRunSpec};
use engram_client::{Client, TaskCall};
use engram_learn::source::StopFlag;
use engram_learn::task_run::{StageResults, Task, TaskContext, task_run};
use engram_memory::Ordinal;
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::run_task_response::Event;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use tonic::Code;
use tonic::transport::Channel;

/// A run with tasks that take minutes.
const SPECTRA: &str = r#"{"clusterRef":{"name":"test"},"kind":"Geodesic","geodesic":{
    "source":{"synthetic":{"name":"S4","wavelengths":61}},"starts":1,"leakingVariant":true,"training":{"steps":100000,"stride":1}}}"#;

/// Steps of each of its models.
const STEPS: f64 = 100_000.0;

/// Returns the tasks of the first stage.
fn tasks() -> Vec<Task> {
    let spec = serde_json::from_str(SPECTRA).unwrap();
    task_run(&spec, None).unwrap().plan(&[]).unwrap()
}

async fn run_task(peers: &Client, run: u8, task: &Task) -> Result<TaskCall, engram_client::Error> {
    run_task_on(peers, 0, run, task, None).await
}

async fn run_task_on(
    peers: &Client,
    worker: u32,
    run: u8,
    task: &Task,
    checkpoint: Option<Vec<u8>>,
) -> Result<TaskCall, engram_client::Error> {
    let message = v1::RunTaskRequest {
        run: vec![run; 16].into(),
        spec_json: SPECTRA.into(),
        name: task.name.clone(),
        input: task.input.clone().into(),
        data: None,
        checkpoint: checkpoint.map(Into::into),
    };
    peers.run_task(Ordinal(worker), message).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_in_use_by_a_task_refuses_tasks_of_any_run_until_the_call_ends() {
    let cluster = Cluster::start(spec(1, 4)).await;
    let (peers, tasks) = (cluster.peer_client().await, tasks());
    let mut first = run_task(&peers, 1, &tasks[0]).await.unwrap();
    assert!(matches!(first.next().await.unwrap(), Event::Progress(_)), "it is in execution");
    // Of the same run and of another one, also at the same time.
    let (same, other) = tokio::join!(run_task(&peers, 1, &tasks[1]), run_task(&peers, 2, &tasks[0]));
    for refused in [same, other] {
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), v1::ProblemKind::Overloaded);
        assert!(error.to_string().contains("worker 0 executes another task"), "{error}");
    }
    assert!(matches!(first.next().await.unwrap(), Event::Progress(_)), "a refused task does not disturb it");
    drop(first);
    // The end of the call is the end of the reservation.
    until("the worker accepts another task", || async { run_task(&peers, 2, &tasks[0]).await.is_ok() }).await;
}

/// Makes a number of steps from a checkpoint, and takes the next one.
struct Continued {
    from: Vec<u8>,
    steps: u64,
    made: AtomicU64,
    stop: StopFlag,
    state: Mutex<Vec<u8>>,
}

impl TaskContext for Continued {
    fn progress(&self, _: f64) {}

    fn stop(&self) -> &StopFlag {
        &self.stop
    }

    fn threads(&self) -> usize {
        1
    }

    fn resumed_from(&self) -> Option<&[u8]> {
        Some(&self.from)
    }

    fn checkpoint_due(&self) -> bool {
        self.made.fetch_add(1, Ordering::Relaxed) + 1 == self.steps
    }

    fn checkpoint(&self, state: Vec<u8>, _: f64) {
        *self.state.lock() = state;
        self.stop.set();
    }
}

/// Returns the next checkpoint of a task: its state, and the steps until then.
async fn next_checkpoint(call: &mut TaskCall) -> (Vec<u8>, u64) {
    loop {
        if let Event::Checkpoint(checkpoint) = call.next().await.unwrap() {
            return (checkpoint.state.to_vec(), (checkpoint.fraction * STEPS).round() as u64);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_of_a_killed_worker_continues_on_another_one_at_the_exact_step() {
    let mut cluster = Cluster::start(spec(2, 4)).await;
    let (peers, task) = (cluster.peer_client().await, tasks().remove(0));
    let mut call = run_task_on(&peers, 0, 1, &task, None).await.unwrap();
    // The second one is far enough that a start from the beginning would be seen.
    next_checkpoint(&mut call).await;
    let (state, at) = next_checkpoint(&mut call).await;
    cluster.kill_worker(0).await;
    while call.next().await.is_ok() {}
    let mut call = run_task_on(&peers, 1, 1, &task, Some(state.clone())).await.unwrap();
    let (continued, step) = next_checkpoint(&mut call).await;
    drop(call);
    assert!(step > at, "the worker began at step 0, not at {at}: after half a second it is at {step}");
    let here = Continued {
        from: state,
        steps: step - at,
        made: AtomicU64::new(0),
        stop: StopFlag::default(),
        state: Mutex::default(),
    };
    let run = task_run(&serde_json::from_str(SPECTRA).unwrap(), None).unwrap();
    run.execute(&task, &here).unwrap_err();
    assert!(*here.state.lock() == continued, "step {step} has other bits on the worker than in this process");
}

/// Content of the data file of a run.
type Table = fn() -> String;

/// A closure of a graph of 9 nodes, and a Fisher matrix of 3 classes: their results must not depend on GPUs.
const ALGEBRA: [(&str, Table); 2] = [
    (
        r#"{"clusterRef":{"name":"test"},"kind":"Tropical","tropical":{"graph":{"file":{"path":"g.csv"},"power":5}}}"#,
        graph,
    ),
    (
        r#"{"clusterRef":{"name":"test"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"path":"s.csv"},"label":"class"}},"epochs":1,
            "steps":1,"naturalRates":[0.1],"sgdRates":[0.1]}}"#,
        samples,
    ),
];

/// Two starts of a fold in one task, on GPUs.
const SPECTRA_ON_GPUS: &str = r#"{"clusterRef":{"name":"test"},"kind":"Geodesic","geodesic":{
    "source":{"synthetic":{"name":"S4","wavelengths":61}},"starts":2,"useGpus":true,
    "training":{"steps":4,"evaluateEvery":2,"stride":20,"nodes":2}}}"#;

fn graph() -> String {
    let weight = |from: usize, to: usize| {
        if (from * to) % 3 == 1 { String::new() } else { format!("-{}", (from * 7 + to * 3) % 11 + 1) }
    };
    (0..9).map(|from| (0..9).map(|to| weight(from, to)).collect::<Vec<_>>().join(",") + "\n").collect()
}

fn samples() -> String {
    let line = |n: usize| format!("{},{},{}\n", n * 37 % 101, n * 53 % 89, ["a", "b", "c"][n * n % 3]);
    "x,y,class\n".to_owned() + &(0..90).map(line).collect::<String>()
}

/// One thread and no GPU.
#[derive(Default)]
struct OnCpu(StopFlag);

impl TaskContext for OnCpu {
    fn progress(&self, _: f64) {}

    fn stop(&self) -> &StopFlag {
        &self.0
    }

    fn threads(&self) -> usize {
        1
    }
}

/// Executes a task on worker 0; returns its result, and what computed it.
async fn result_of(peers: &Client, spec: &str, data: Option<&str>, task: &Task) -> (Vec<u8>, Vec<v1::TaskDevice>) {
    let message = v1::RunTaskRequest {
        run: vec![7; 16].into(),
        spec_json: spec.to_owned(),
        name: task.name.clone(),
        input: task.input.clone().into(),
        data: data.map(|data| data.as_bytes().to_vec().into()),
        checkpoint: None,
    };
    let mut call = peers.run_task(Ordinal(0), message).await.unwrap();
    let mut devices = Vec::new();
    loop {
        match call.next().await.unwrap() {
            Event::Devices(found) => devices = found.devices,
            Event::Result(result) => return (result.to_vec(), devices),
            Event::Failure(failure) => panic!("{}: {}", task.name, failure.message),
            _ => {}
        }
    }
}

/// Executes all stages of the runs on worker 0, and compares each result with that of the CPU. Returns what computed the spectra.
async fn compare_with_the_cpu(peers: &Client) -> Vec<v1::TaskDevice> {
    for (text, data) in ALGEBRA {
        let (spec, data): (LearnerRunSpec, _) = (serde_json::from_str(text).unwrap(), data());
        let run = task_run(&spec, Some(data.as_bytes())).unwrap();
        let mut results: Vec<StageResults> = Vec::new();
        loop {
            let tasks = run.plan(&results).unwrap();
            if tasks.is_empty() {
                break;
            }
            let mut stage = Vec::new();
            for task in &tasks {
                let (found, _) = result_of(peers, text, Some(&data), task).await;
                assert!(found == run.execute(task, &OnCpu::default()).unwrap(), "{} differs on the GPU", task.name);
                stage.push(found);
            }
            results.push(stage);
        }
    }
    let run = task_run(&serde_json::from_str(SPECTRA_ON_GPUS).unwrap(), None).unwrap();
    let task = &run.plan(&[]).unwrap()[0];
    assert_eq!(task.name, "fold 1, start 1 and 1 more");
    let (found, devices) = result_of(peers, SPECTRA_ON_GPUS, None, task).await;
    let found: Value = serde_json::from_slice(&found).unwrap();
    let expected: Value = serde_json::from_slice(&run.execute(task, &OnCpu::default()).unwrap()).unwrap();
    assert_eq!(found.as_array().unwrap().len(), 2);
    for start in 0..2 {
        let prediction = |outcomes: &Value| -> Vec<f64> {
            let values = outcomes[start]["fold"]["result"]["prediction"].as_array().unwrap();
            values.iter().map(|value| value.as_f64().unwrap()).collect()
        };
        let (found, expected) = (prediction(&found), prediction(&expected));
        let error = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(found.len() == 61 && error < 1e-9, "start {start}: {error:e}");
    }
    devices
}

/// Returns the names of what a worker with an emulated GPU recorded while it executed the runs, and what computed the spectra.
async fn recorded_names(threshold: u64) -> (BTreeSet<String>, Vec<v1::TaskDevice>) {
    let mut spec = spec(1, 4);
    (spec.gpu.mode, spec.gpu.threshold) = (GpuMode::Required, Some(threshold));
    let mut cluster = Cluster::start(spec).await;
    let peers = cluster.peer_client().await;
    let admin = format!("http://{}", cluster.addresses(0).admin);
    let mut admin = AdminServiceClient::new(Channel::from_shared(admin).unwrap().connect().await.unwrap());
    let other = admin.clone();
    // Starts once no shorter recording is in progress.
    let recording = tokio::spawn(async move {
        loop {
            let whole = v1::ProfileRequest { duration_ms: 50_000, max_spans: 100_000 };
            match admin.profile(whole).await {
                Err(busy) if busy.code() == Code::ResourceExhausted => {}
                recorded => return recorded.unwrap().into_inner().tracks,
            }
        }
    });
    until("the recording is in progress", || async {
        other.clone().profile(v1::ProfileRequest { duration_ms: 1, max_spans: 1 }).await.is_err()
    })
    .await;
    let devices = compare_with_the_cpu(&peers).await;
    // The recording ends with the worker.
    cluster.stop_worker(0).await;
    (recording.await.unwrap().into_iter().flat_map(|track| track.names).collect(), devices)
}

const KERNELS: [&str; 4] = ["max_plus_product", "outer_products", "network_gradient", "path_features"];

#[test]
fn tasks_use_the_gpu_of_their_worker_with_the_results_of_the_cpu() {
    run_with_emulated_driver("runs::tasks::tasks_use_the_gpu_of_their_worker_with_the_results_of_the_cpu", &[], || {
        block_on(async {
            let (names, devices) = recorded_names(0).await;
            let [cpu, gpu] = &devices[..] else { panic!("{devices:?}") };
            assert!(cpu.name.starts_with("CPU, ") && cpu.computations == 0, "{cpu:?}");
            // Four steps, and evaluations.
            assert!(gpu.computations >= 4 && gpu.busy_us > 0 && gpu.memory_bytes > 0, "{gpu:?}");
            assert!(KERNELS.iter().all(|kernel| names.contains(*kernel)), "{names:?}");
            // Products and sums of this size are not worth the transfers, unless the cluster asks for it.
            let (names, _) = recorded_names(1).await;
            assert_eq!(KERNELS.map(|kernel| names.contains(kernel)), [false, false, true, true], "{names:?}");
        });
    });
}

#[test]
fn tasks_continue_on_the_cpu_when_the_gpu_fails() {
    let test = "runs::tasks::tasks_continue_on_the_cpu_when_the_gpu_fails";
    // The first launch succeeds.
    run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:2:700")], || {
        block_on(async {
            let (names, devices) = recorded_names(0).await;
            assert!(
                devices.len() == 1 && devices[0].name.starts_with("CPU, "),
                "a removed GPU computes nothing: {devices:?}"
            );
            assert!(names.contains("max_plus_product") && !names.contains("network_gradient"), "{names:?}");
        });
    });
}
