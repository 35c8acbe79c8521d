//! Trainings with an emulated GPU: gradients agree with those of the CPU, and a training continues when the GPU fails.

use crate::emulated_driver::{LONG_DEADLINE, run_with_emulated_driver};
use crate::harness::{Cluster, block_on, spec, until};
use engram_api::GpuMode;
use engram_kernels::Gpu;
use engram_kernels::gpu::cuda::Cuda;
use engram_learn::gradients::GpuGradients;
use engram_learn::task_run::ComputeDevice;
use engram_neural::{
    Batch, DeviceEngine, GradientEngine, LabeledBatch, Loss, LossKind, LossSpec, Model, ModelSpec, RandomStep, Targets,
    philox,
};
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use std::collections::{BTreeMap, BTreeSet};
use tonic::Code;
use tonic::transport::Channel;

/// Of a gradient on the GPU and on the CPU, relative to the largest value (docs/gpu.md).
const TOLERANCE: f32 = 1e-4;
const RANDOM: RandomStep = RandomStep { seed: 42, step: 3 };

/// Numbers in [-1, 1).
fn noise(count: usize, key: u64) -> Vec<f32> {
    (0..count as u32).map(|i| philox(key, [i, 0, 0, 0])[0] as f32 / 2f32.powi(31) - 1.0).collect()
}

fn near(what: &str, found: &[f32], expected: &[f32]) {
    let largest = expected.iter().map(|value| value.abs()).fold(1e-6, f32::max);
    assert_eq!(found.len(), expected.len(), "{what}");
    let error = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(error <= TOLERANCE * largest, "{what}: {error:e} of {largest:e}");
}

const LAYERS: [&str; 2] = [
    r#"[{"dense":20,"activation":"Relu"},{"layerNorm":{}},{"residual":[{"dense":20,"activation":"Gelu"},{"dropout":0.2},{"dense":20,"bias":false}]},
        {"activation":"Tanh"},{"dense":3,"activation":"Sigmoid"},{"dense":3}]"#,
    r#"[{"activation":"Gelu"},{"dropout":0.5},{"dense":70,"activation":"Tanh","frozen":true},{"residual":[{"layerNorm":{"epsilon":0.001}},
        {"dense":70,"activation":"Relu"}]},{"dense":3}]"#,
];

#[test]
fn gradients_on_a_gpu_agree_with_the_cpu() {
    run_with_emulated_driver("runs::training::gradients_on_a_gpu_agree_with_the_cpu", &[], || {
        let gpu = Gpu::new(Cuda::open(0, LONG_DEADLINE).unwrap(), "emulated".to_owned());
        let device = ComputeDevice::new("emulated").with_gpu(gpu);
        for (layers, rows) in LAYERS.into_iter().zip([37, 300]) {
            let spec: ModelSpec = serde_json::from_str(&format!(r#"{{"inputs":12,"layers":{layers}}}"#)).unwrap();
            let mut model = Model::new(&spec, 42).unwrap();
            // Biases that start at 0 would hide errors in them.
            let moved = noise(model.parameter_count(), 9);
            model.parameters_mut().iter_mut().zip(moved).for_each(|(p, n)| *p += 0.3 * n);
            let mut on_gpu = DeviceEngine::new(&model, Box::new(GpuGradients::new(device.clone(), true))).unwrap();
            let values = noise(rows * 12, 5);
            let units: Vec<f32> = noise(rows * 3, 6).iter().map(|value| value.abs()).collect();
            let classes: Vec<u32> = (0..rows as u32).map(|row| row % 3).collect();
            let weights: Vec<f32> = noise(rows, 7).iter().map(|value| value.abs()).collect();
            for kind in [LossKind::Mse, LossKind::Huber, LossKind::Bce, LossKind::CrossEntropy] {
                let is_class = kind == LossKind::CrossEntropy;
                let targets = if is_class { Targets::Classes(&classes) } else { Targets::Values(&units) };
                let batch = Batch::rows(&values, rows, 12).unwrap().starting_at(1_000);
                let data = LabeledBatch { batch, targets, weights: is_class.then_some(&weights) };
                let delta = (kind == LossKind::Huber).then_some(0.3);
                let loss = Loss::new(&LossSpec { kind, delta, correlation: None }, 3).unwrap();
                let cpu = GradientEngine::new().gradient(&model, &data, &loss, 4, RANDOM, 2.0);
                let (expected, _, samples) = cpu.unwrap();
                let mut compute = || on_gpu.batch_gradient(&model, &data, &loss, RANDOM, 2.0).unwrap().unwrap();
                let (found, found_samples) = compute();
                near("a gradient", &found.values, &expected.values);
                near("losses", &found_samples.losses, &samples.losses);
                near("errors", &found_samples.errors, &samples.errors);
                assert_eq!(found.samples, expected.samples);
                assert!((found.loss - expected.loss).abs() <= 1e-5 * expected.loss, "{} {}", found.loss, expected.loss);
                assert_eq!(compute(), (found, found_samples), "a repeated gradient has the same bits");
            }
        }
        assert!(device.usage().computations >= 16 && device.resource().healthy);
        let small = GpuGradients::new(device, false);
        let spec = serde_json::from_str(r#"{"inputs":12,"layers":[{"featureBag":4},{"dense":1}]}"#).unwrap();
        let model = Model::new(&spec, 1).unwrap();
        assert_eq!(DeviceEngine::new(&model, Box::new(small)).unwrap_err(), "layer 0 (featureBag)");
    });
}

/// Status of a run, and what the devices of its worker recorded.
struct Trained {
    metrics: BTreeMap<String, f64>,
    /// Devices in the status.
    devices: String,
    kernels: BTreeSet<String>,
}

/// Trains on one worker.
async fn train(mode: GpuMode, more: &str) -> Trained {
    let mut cluster_spec = spec(1, 4);
    (cluster_spec.gpu.mode, cluster_spec.gpu.threshold) = (mode, Some(0));
    let mut cluster = Cluster::start(cluster_spec).await;
    let client = cluster.client().await;
    let admin = format!("http://{}", cluster.addresses(0).admin);
    let mut admin = AdminServiceClient::new(Channel::from_shared(admin).unwrap().connect().await.unwrap());
    let other = admin.clone();
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
    until("the recording is in progress", || async {
        other.clone().profile(v1::ProfileRequest { duration_ms: 1, max_spans: 1 }).await.is_err()
    })
    .await;
    let spec = format!(
        r#"{{"clusterRef":{{"name":"test"}},"kind":"Replay","replay":{{
        "source":{{"synthetic":{{"features":40,"samples":500,"largest":20}}}},
        "model":{{"inputs":[{{"field":"mask","dim":40}}],"loss":{{"kind":"Mse","target":"score"}},"layers":
        [{{"dense":24,"activation":"Relu"}},{{"dropout":0.1}},{{"residual":[{{"layerNorm":{{}}}},{{"dense":24,"activation":"Gelu"}}]}},{{"dense":1}}]}},
        "optimizer":{{"rate":0.003}},"batch":64,"steps":12{more}}}}}"#
    );
    client.submit_run("trained", &spec, None, None).await.unwrap();
    let (mut watch, mut last) = (client.watch_run("trained"), v1::RunStatus::default());
    while let Some(status) = watch.next().await.unwrap() {
        last = status;
    }
    assert_eq!(last.phase(), v1::RunPhase::Succeeded, "{last:?}");
    cluster.stop_worker(0).await;
    let kernels = recording.await.unwrap().into_iter().flat_map(|track| track.names).collect();
    Trained { metrics: last.metrics.into_iter().collect(), devices: last.outputs["devices"].clone(), kernels }
}

/// Compares figures of a training that depend on all of its gradients.
fn compare(found: &Trained, expected: &Trained) {
    for name in ["loss", "gradient_norm", "held_out_squared_error", "held_out_correlation"] {
        let (found, expected) = (found.metrics[name], expected.metrics[name]);
        assert!((found - expected).abs() < 1e-3 * expected.abs(), "{name}: {found} {expected}");
    }
}

#[test]
fn a_training_uses_the_gpu_of_its_worker_and_agrees_with_the_cpu() {
    let test = "runs::training::a_training_uses_the_gpu_of_its_worker_and_agrees_with_the_cpu";
    run_with_emulated_driver(test, &[], || {
        block_on(async {
            let expected = train(GpuMode::Disabled, "").await;
            assert!(!expected.kernels.contains("dense_forward"), "{:?}", expected.kernels);
            assert_eq!((&*expected.devices, expected.metrics.get("gpu_share")), ("CPU", None));
            let found = train(GpuMode::Required, "").await;
            let kernels = ["dense_forward", "dense_gradient", "norm_input"];
            assert!(kernels.iter().all(|it| found.kernels.contains(*it)), "{:?}", found.kernels);
            assert_eq!((&*found.devices, found.metrics["gpu_share"]), ("emulated 0", 1.0));
            compare(&found, &expected);
            // The same bits on any workers exclude a GPU; it has no kernels of other precisions.
            for (more, reason) in [
                (r#","order":"PartitionInvariant""#, "CPU: order is PartitionInvariant: the same bits on any workers"),
                (r#","precision":"Bf16""#, "CPU: only with precision F32"),
            ] {
                let on_cpu = train(GpuMode::Required, more).await;
                assert!(!on_cpu.kernels.contains("dense_forward"), "{:?}", on_cpu.kernels);
                assert_eq!((&*on_cpu.devices, on_cpu.metrics.get("gpu_share")), (reason, None));
            }
        });
    });
}

#[test]
fn a_training_continues_on_the_cpu_when_the_gpu_fails() {
    let test = "runs::training::a_training_continues_on_the_cpu_when_the_gpu_fails";
    // In the middle of the fourth step.
    run_with_emulated_driver(test, &[("CUDA_HOST_FAIL", "cuLaunchKernel:50:700")], || {
        block_on(async {
            let expected = train(GpuMode::Disabled, "").await;
            let found = train(GpuMode::Required, "").await;
            assert!(found.kernels.contains("dense_forward"), "{:?}", found.kernels);
            assert_eq!(found.devices, "CPU: emulated 0 failed");
            let share = found.metrics["gpu_share"];
            assert!(share > 0.0 && share < 0.5, "{share}");
            compare(&found, &expected);
        });
    });
}
