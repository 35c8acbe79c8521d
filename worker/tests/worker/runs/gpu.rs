//! Workers with an emulated GPU: the same answers as on the CPU, also when it fails, and the status without one.

use crate::emulated_driver::run_with_emulated_driver;
use crate::harness::{Cluster, block_on, recorded_run, spec, until};
use engram_api::{GpuMode, GpuPartitioner, LearnerClusterSpec};
use engram_client::{Client, EpochUpdates, RankOptions, RecallOptions, Rows, Signals, Updates};
use engram_memory::{Digest, Group, LearningEpoch, MemoryId};
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::{self, ProfileKind};
use engram_worker::{Error, Worker};
use tonic::Code;
use tonic::transport::Channel;

/// Memories with features: enough for tiles, groups and ties.
const MEMORIES: u64 = 1_500;

/// Returns a cluster of one worker whose smallest pass is large enough for its GPU.
fn with_gpu(mode: GpuMode) -> LearnerClusterSpec {
    let mut spec = spec(1, 4);
    spec.features.dimension = 8;
    (spec.gpu.mode, spec.gpu.threshold) = (mode, Some(0));
    spec
}

/// What clients observe of a worker.
#[derive(Debug, PartialEq)]
struct Observation {
    digest: Digest,
    ranked: Vec<(MemoryId, u32)>,
    recalled: Vec<(MemoryId, u32)>,
}

/// Inserts the memories and observes.
async fn insert(client: &Client) -> Observation {
    let ids: Vec<MemoryId> = (0..MEMORIES).map(MemoryId).collect();
    let weights = ids.iter().map(|id| (id.0 % 97) as f32 / 96.0).collect();
    let groups = ids.iter().map(|id| Group((id.0 % 5) as u8)).collect();
    let features = ids.iter().flat_map(|id| (0..8).map(|at| ((id.0 * 7 + at * 13) % 31) as f32 - 15.0)).collect();
    client.session().upsert(Rows { ids, weights, groups, features, ..Rows::default() }).await.unwrap();
    observe(client).await
}

/// Learns one epoch and observes.
async fn learn(client: &Client, n: u64) -> Observation {
    let ids: Vec<MemoryId> = (0..MEMORIES).map(|id| MemoryId(id * n % MEMORIES)).collect();
    let signals = Signals::Quality(if n.is_multiple_of(2) { 0.9 } else { 0.2 });
    let updates = EpochUpdates::ById(Updates { ids, signals, ..Updates::default() });
    let run = recorded_run(client, "driven").await;
    let report = client.learn_epoch(run, LearningEpoch(n), 0.125, updates).await.unwrap();
    assert_eq!(report.quality.total().count, MEMORIES);
    observe(client).await
}

async fn observe(client: &Client) -> Observation {
    let mut ranked = Vec::new();
    let mut pages = client.rank(RankOptions { limit: 0, group: None, keys: false }).await.unwrap();
    while let Some(page) = pages.next().await.unwrap() {
        ranked.extend(page.iter().map(|memory| (memory.id, memory.weight.units())));
    }
    let query: Vec<f32> = (0..8).map(|at| at as f32 - 3.5).collect();
    let options = RecallOptions { limit: 40, group: None, keys: false };
    let recalled = client.recall(query, options).await.unwrap();
    let recalled = recalled.iter().map(|one| (one.memory.id, one.score.to_bits())).collect();
    Observation { digest: client.digest().await.unwrap().digest, ranked, recalled }
}

/// Returns the observations on the CPU, after the inserts and after each epoch.
async fn on_cpu(epochs: u64) -> Vec<Observation> {
    let mut cluster = Cluster::start(with_gpu(GpuMode::Disabled)).await;
    let client = cluster.client().await;
    assert_eq!(cluster.worker_status(0).await.gpu, "not used: spec.gpu.mode is Disabled");
    let mut observations = vec![insert(&client).await];
    for n in 1..=epochs {
        observations.push(learn(&client, n).await);
    }
    cluster.stop_worker(0).await;
    observations
}

#[test]
fn a_worker_with_a_gpu_answers_like_one_without() {
    run_with_emulated_driver("runs::gpu::a_worker_with_a_gpu_answers_like_one_without", &[], || {
        block_on(async {
            let expected = on_cpu(6).await;
            let mut cluster = Cluster::start(with_gpu(GpuMode::Required)).await;
            let client = cluster.client().await;
            assert_eq!(insert(&client).await, expected[0]);
            for n in 1..=6 {
                assert_eq!(learn(&client, n).await, expected[n as usize], "epoch {n}");
            }
            let status = cluster.worker_status(0).await;
            assert!(status.device.starts_with("emulated 0, "), "{}", status.device);
            assert_eq!(status.gpu, "emulated 0 runs passes over 0 memories or more (as spec.gpu.threshold says)");
            cluster.stop_worker(0).await;
        });
    });
}

#[test]
fn a_worker_continues_on_the_cpu_when_its_gpu_fails() {
    let test = "runs::gpu::a_worker_continues_on_the_cpu_when_its_gpu_fails";
    run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:60:700")], || {
        block_on(async {
            let expected = on_cpu(6).await;
            let mut cluster = Cluster::start(with_gpu(GpuMode::Auto)).await;
            let client = cluster.client().await;
            assert_eq!(insert(&client).await, expected[0]);
            for n in 1..=6 {
                assert_eq!(learn(&client, n).await, expected[n as usize], "epoch {n}");
            }
            // The store updates its statistics between two turns.
            let failure_is_reported = || async { cluster.worker_status(0).await.gpu.contains("was disabled") };
            until("the failure is reported", failure_is_reported).await;
            let status = cluster.worker_status(0).await;
            assert!(status.gpu.starts_with("emulated 0 was disabled: device failed in pass "), "{}", status.gpu);
            assert!(!status.device.contains("emulated"), "{}", status.device);
            let page = crate::operations::metrics(cluster.addresses(0).http).await;
            let value = |name: &str| {
                let line = page.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap();
                line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
            };
            assert!(value("engram_gpu_passes_total") > 3.0);
            assert_eq!((value("engram_gpu_fallbacks_total"), value("engram_gpu_disabled")), (1.0, 1.0));
            assert_eq!((value("engram_gpu_threshold_memories"), value("engram_gpu_allocated_bytes")), (-1.0, 0.0));
            // The log has all acknowledged writes; the next start finds the GPU broken and reports that, too.
            cluster.stop_worker(0).await;
            cluster.start_worker(0).await;
            cluster.ready().await;
            assert_eq!(observe(&cluster.client().await).await, expected[6]);
            let gpu = cluster.worker_status(0).await.gpu;
            assert!(gpu.starts_with("not used: failed to "), "{gpu}");
            cluster.stop_worker(0).await;
        });
    });
}

#[test]
fn passes_of_a_worker_and_its_gpu_are_recorded() {
    run_with_emulated_driver("runs::gpu::passes_of_a_worker_and_its_gpu_are_recorded", &[], || {
        block_on(async {
            let mut cluster = Cluster::start(with_gpu(GpuMode::Required)).await;
            let client = cluster.client().await;
            insert(&client).await;
            let admin = format!("http://{}", cluster.addresses(0).admin);
            let mut admin = AdminServiceClient::new(Channel::from_shared(admin).unwrap().connect().await.unwrap());
            let (mut other, short) = (admin.clone(), v1::ProfileRequest { duration_ms: 1, max_spans: 1 });
            // It ends with the worker, and starts once no shorter recording is in progress.
            let recording = tokio::spawn(async move {
                loop {
                    let long = v1::ProfileRequest { duration_ms: 50_000, max_spans: 100_000 };
                    match admin.profile(long).await {
                        Err(busy) if busy.code() == Code::ResourceExhausted => {}
                        recorded => return recorded.unwrap().into_inner().tracks,
                    }
                }
            });
            let busy = loop {
                if let Err(busy) = other.profile(short).await {
                    break busy;
                }
            };
            assert!(busy.message().contains("another recording of this worker's devices is in progress"), "{busy}");
            learn(&client, 1).await;
            cluster.stop_worker(0).await;

            let tracks = recording.await.unwrap();
            let [cpu, gpu] = &tracks[..] else { panic!("{tracks:?}") };
            let kind_of = |track: &v1::ProfileTrack, name: &str| {
                let name = track.names.iter().position(|candidate| candidate == name)? as u32;
                let span = track.name_indices.iter().position(|of| *of == name)?;
                ProfileKind::try_from(track.kinds[span]).ok()
            };
            // The worker waits for its GPU, and changes memories itself.
            assert_eq!(kind_of(cpu, "rank"), Some(ProfileKind::Wait), "{:?}", cpu.names);
            assert_eq!(kind_of(cpu, "recall"), Some(ProfileKind::Wait), "{:?}", cpu.names);
            assert_eq!(gpu.device, "emulated 0");
            assert_eq!(kind_of(gpu, "radix_pass"), Some(ProfileKind::Kernel), "{:?}", gpu.names);
            assert_eq!(kind_of(gpu, "upload"), Some(ProfileKind::Copy), "{:?}", gpu.names);
            assert!(tracks.iter().all(|track| track.dropped == 0 && track.start_ns.len() == track.duration_ns.len()));
        });
    });
}

#[test]
fn a_worker_uses_all_gpus_and_continues_when_one_fails() {
    let test = "runs::gpu::a_worker_uses_all_gpus_and_continues_when_one_fails";
    // The passes that measure the second device are launches, too.
    let settings = [("CUDA_HOST_DEVICES", "2"), ("CUDA_HOST_FAIL", "cuLaunchKernel:60:700:1")];
    run_with_emulated_driver(test, &settings, || {
        block_on(async {
            let expected = on_cpu(6).await;
            let mut spec = with_gpu(GpuMode::Required);
            spec.gpu.partitioner = Some(GpuPartitioner::Balanced);
            let mut cluster = Cluster::start(spec).await;
            let client = cluster.client().await;
            assert_eq!(insert(&client).await, expected[0]);
            let status = cluster.worker_status(0).await;
            assert!(status.device.starts_with("emulated 0, emulated 1, "), "{}", status.device);
            for n in 1..=6 {
                assert_eq!(learn(&client, n).await, expected[n as usize], "epoch {n}");
            }
            let failure_is_reported = || async { cluster.worker_status(0).await.gpu.contains("was disabled") };
            until("the failure is reported", failure_is_reported).await;
            let status = cluster.worker_status(0).await;
            assert!(status.device.starts_with("emulated 0, ") && !status.device.contains("emulated 1"));
            let start = "emulated 0 runs passes over 0 memories or more (as spec.gpu.threshold says); emulated 0 (GPU-";
            assert!(status.gpu.starts_with(start), "{}", status.gpu);
            assert!(status.gpu.contains(" holds 4 partitions with 1500 memories; emulated 1 (GPU-"), "{}", status.gpu);
            let page = crate::operations::metrics(cluster.addresses(0).http).await;
            let values = |name: &str| -> Vec<f64> {
                let mut lines: Vec<&str> = page.lines().filter(|line| line.starts_with(&format!("{name}{{"))).collect();
                // Sorted by device.
                lines.sort_unstable();
                lines.iter().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
            };
            assert_eq!(values("engram_gpu_disabled"), [0.0, 1.0]);
            assert_eq!(values("engram_gpu_fallbacks_total"), [0.0, 1.0]);
            assert_eq!(values("engram_gpu_memories"), [MEMORIES as f64, 0.0]);
            assert!(values("engram_gpu_passes_total").iter().all(|&passes| passes > 0.0));
            assert_eq!(values("engram_gpu_threshold_memories"), [0.0]);
            cluster.stop_worker(0).await;
        });
    });
}

#[test]
fn a_worker_that_requires_a_gpu_fails_without_one() {
    let test = "runs::gpu::a_worker_that_requires_a_gpu_fails_without_one";
    let cases = [
        ("CUDA_HOST_DEVICES", "0", "no CUDA device 0: the driver reports 0"),
        (
            "CUDA_HOST_DRIVER",
            "12080",
            "CUDA driver is too old: it supports CUDA 12.8, but 13.0 (driver 580) or newer is required",
        ),
        ("CUDA_HOST_CAPABILITY", "75", "fatbin 'algebra' does not support compute capability 7.5 (driver code 209)"),
    ];
    for (setting, value, why) in cases {
        let result = run_with_emulated_driver(test, &[(setting, value), ("ENGRAM_TEST_WHY", why)], || {
            block_on(async {
                let why = std::env::var("ENGRAM_TEST_WHY").unwrap();
                let mut cluster = Cluster::start(with_gpu(GpuMode::Auto)).await;
                assert_eq!(cluster.worker_status(0).await.gpu, format!("not used: {why}"));
                cluster.stop_worker(0).await;
                let mut options = cluster.options(0);
                options.state_dir = options.state_dir.join("none");
                options.spec.gpu.mode = GpuMode::Required;
                let error = Worker::build(options.clone()).await.err().unwrap();
                assert!(matches!(error, Error::NoGpu { .. }));
                let expected =
                    format!("spec.gpu.mode: Required, and no GPU can be used: {why}; allowed here: Auto, Disabled");
                assert_eq!(error.to_string(), expected);
                assert!(!options.state_dir.exists(), "the store is not opened");
            });
        });
        if result.is_none() {
            break;
        }
    }
}
