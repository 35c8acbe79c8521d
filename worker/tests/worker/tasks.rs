//! Tasks of runs: a worker is reserved for one task.

use crate::harness::{Cluster, spec, until};
use engram_client::{Client, TaskCall};
use engram_learn::task_run::{Task, task_run};
use engram_memory::Ordinal;
use engram_proto::v1;
use engram_proto::v1::run_task_response::Event;

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
