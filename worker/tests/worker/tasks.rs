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
use serde_json::Value;
use std::collections::BTreeSet;
use tonic::Code;
use tonic::transport::Channel;

/// A run with tasks that take minutes.
const SPECTRA: &str = r#"{"clusterRef":{"name":"test"},"kind":"Geodesic","geodesic":{
    "source":{"synthetic":{"name":"S4","wavelengths":61}},"starts":1,"leakingVariant":true,"training":{"steps":100000,"stride":1}}}"#;

/// Returns the tasks of the first stage.
fn tasks() -> Vec<Task> {
    let spec = serde_json::from_str(SPECTRA).unwrap();
    task_run(&spec, None).unwrap().plan(&[]).unwrap()
}

async fn run_task(peers: &Client, run: u8, task: &Task) -> Result<TaskCall, engram_client::Error> {
    let message = v1::RunTaskRequest {
        run: vec![run; 16].into(),
        spec_json: SPECTRA.into(),
        name: task.name.clone(),
        input: task.input.clone().into(),
        data: None,
        checkpoint: None,
    };
    peers.run_task(Ordinal(0), message).await
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

/// Executes a task on worker 0.
async fn result_of(peers: &Client, spec: &str, data: Option<&str>, task: &Task) -> Vec<u8> {
    let message = v1::RunTaskRequest {
        run: vec![7; 16].into(),
        spec_json: spec.to_owned(),
        name: task.name.clone(),
        input: task.input.clone().into(),
        data: data.map(|data| data.as_bytes().to_vec().into()),
        checkpoint: None,
    };
    let mut call = peers.run_task(Ordinal(0), message).await.unwrap();
    loop {
        match call.next().await.unwrap() {
            Event::Result(result) => return result.to_vec(),
            Event::Failure(failure) => panic!("{}: {}", task.name, failure.message),
            _ => {}
        }
    }
}

/// Executes all stages of the runs on worker 0, and compares each result with that of the CPU.
async fn compare_with_the_cpu(peers: &Client) {
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
                let found = result_of(peers, text, Some(&data), task).await;
                assert!(found == run.execute(task, &OnCpu::default()).unwrap(), "{} differs on the GPU", task.name);
                stage.push(found);
            }
            results.push(stage);
        }
    }
    let run = task_run(&serde_json::from_str(SPECTRA_ON_GPUS).unwrap(), None).unwrap();
    let task = &run.plan(&[]).unwrap()[0];
    assert_eq!(task.name, "fold 1, start 1 and 1 more");
    let found: Value = serde_json::from_slice(&result_of(peers, SPECTRA_ON_GPUS, None, task).await).unwrap();
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
}

/// Returns the names of what a worker with an emulated GPU recorded while it executed the runs.
async fn recorded_names(threshold: u64) -> BTreeSet<String> {
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
    compare_with_the_cpu(&peers).await;
    // The recording ends with the worker.
    cluster.stop_worker(0).await;
    recording.await.unwrap().into_iter().flat_map(|track| track.names).collect()
}

const KERNELS: [&str; 4] = ["max_plus_product", "outer_products", "network_gradient", "path_features"];

#[test]
fn tasks_use_the_gpu_of_their_worker_with_the_results_of_the_cpu() {
    run_with_emulated_driver("tasks::tasks_use_the_gpu_of_their_worker_with_the_results_of_the_cpu", &[], || {
        block_on(async {
            let names = recorded_names(0).await;
            assert!(KERNELS.iter().all(|kernel| names.contains(*kernel)), "{names:?}");
            // Products and sums of this size are not worth the transfers, unless the cluster asks for it.
            let names = recorded_names(1).await;
            assert_eq!(KERNELS.map(|kernel| names.contains(kernel)), [false, false, true, true], "{names:?}");
        });
    });
}

#[test]
fn tasks_continue_on_the_cpu_when_the_gpu_fails() {
    let test = "tasks::tasks_continue_on_the_cpu_when_the_gpu_fails";
    // The first launch succeeds.
    run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:2:700")], || {
        block_on(async {
            let names = recorded_names(0).await;
            assert!(names.contains("max_plus_product") && !names.contains("network_gradient"), "{names:?}");
        });
    });
}
