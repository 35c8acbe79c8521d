//! The fields of a `LearnerCluster`.

use super::{Row, check, cluster, refused, source, taken};

#[test]
fn cluster_fields_are_taken_in_their_range_and_refused_outside() {
    let rows: &[Row<&str>] = &[
        ("{ workers: _ }", "ENG-0103", "spec.workers", &["0", "-1", "101"], &["1", "100"]),
        ("{ workers: _ }", "ENG-0102", "spec.workers", &["\"5\"", "5.0", "five", "[5]", "", "1_0"], &[]),
        ("{ workers: 5, replicationFactor: _ }", "ENG-0103", "spec.replicationFactor", &["0", "4"], &["1", "2", "3"]),
        ("{ workers: 1, replicationFactor: _ }", "ENG-0106", "spec.replicationFactor", &["2", "3"], &[]),
        ("{ workers: 2, replicationFactor: _ }", "ENG-0106", "spec.replicationFactor", &["3"], &["2"]),
        ("{ workers: 5, partitions: _ }", "ENG-0103", "spec.partitions", &["0", "2000"], &["1", "1024", "0x10b"]),
        ("{ workers: 5, partitions: _ }", "ENG-0102", "spec.partitions", &["0b11", "1:30"], &[]),
        (
            "{ workers: 5, capacity: { memories: _ } }",
            "ENG-0103",
            "spec.capacity.memories",
            &["0", "1000000001"],
            &["1", "1000000000"],
        ),
        (
            "{ workers: 5, capacity: { memories: _ } }",
            "ENG-0102",
            "spec.capacity.memories",
            &["1M", "1e6", "1_000"],
            &[],
        ),
        (
            "{ workers: 5, capacity: { policy: _ } }",
            "ENG-0104",
            "spec.capacity.policy",
            &["evict"],
            &["Evict", "Refuse"],
        ),
        ("{ workers: 5, learning: { law: _ } }", "ENG-0107", "spec.learning.law", &["Exponential"], &["Linear"]),
        ("{ workers: 5, learning: { law: _ } }", "ENG-0104", "spec.learning.law", &["linear", "Cubic"], &[]),
        (
            "{ workers: 5, learning: { rate: _ } }",
            "ENG-0103",
            "spec.learning.rate",
            &["0", "1.5", ".nan", ".inf", "-.inf", "4.656612873077393e-10"],
            &["1", "4.7e-10"],
        ),
        (
            "{ workers: 5, learning: { initialWeight: _ } }",
            "ENG-0103",
            "spec.learning.initialWeight",
            &["-0.1", "1.5", ".nan", "1e-10"],
            &["0", "0.0", "1", "5e-10"],
        ),
        (
            "{ workers: 5, learning: { decay: _ } }",
            "ENG-0103",
            "spec.learning.decay",
            &["-0.1", "1.5", ".inf", "1e-10"],
            &["0", "1.0"],
        ),
        ("{ workers: 5, learning: { decay: _ } }", "ENG-0102", "spec.learning.decay", &["\"0.1\"", "true"], &[]),
        (
            "{ workers: 5, features: { dimension: _ } }",
            "ENG-0103",
            "spec.features.dimension",
            &["-1", "4097"],
            &["0", "4096"],
        ),
        ("{ workers: 5, features: { dtype: _ } }", "ENG-0104", "spec.features.dtype", &["F8", "f16"], &["F16", "F32"]),
        (
            "{ workers: 5, durability: { mode: _ } }",
            "ENG-0104",
            "spec.durability.mode",
            &["sync", "Fast"],
            &["Sync", "Replicated", "Async"],
        ),
        ("{ workers: 5, soloPolicy: _ }", "ENG-0104", "spec.soloPolicy", &["solo-durable"], &["SoloDurable", "MinIsr"]),
        ("{ workers: 5, gpu: { mode: _ } }", "ENG-0104", "spec.gpu.mode", &["On"], &["Auto", "Required", "Disabled"]),
        (
            "{ workers: 5, gpu: { partitioner: _ } }",
            "ENG-0104",
            "spec.gpu.partitioner",
            &["balanced", "Fastest"],
            &["Balanced", "CapabilityAware", "MemoryAware", "LatencyOptimized"],
        ),
        (
            "{ workers: 5, gpu: { threshold: _ } }",
            "ENG-0103",
            "spec.gpu.threshold",
            &["-1", "1000000001"],
            &["0", "1000000000"],
        ),
        ("{ workers: 5, restartGrace: _ }", "ENG-0103", "spec.restartGrace", &["61s", "2m"], &["0s", "500ms", "60s"]),
        ("{ workers: 5, restartGrace: _ }", "ENG-0102", "spec.restartGrace", &["3", "fast"], &[]),
        (
            "{ workers: 5, maintenance: { scrubInterval: _ } }",
            "ENG-0103",
            "spec.maintenance.scrubInterval",
            &["0s", "59m"],
            &["1h", "24h", "7d"],
        ),
        (
            "{ workers: 5, maintenance: { scrubInterval: _ } }",
            "ENG-0102",
            "spec.maintenance.scrubInterval",
            &["daily"],
            &[],
        ),
        (
            "{ workers: 5, maintenance: { copyRate: _ } }",
            "ENG-0102",
            "spec.maintenance.copyRate",
            &["64", "64Mi", "512Ki/s", "fast"],
            &["0Mi/s", "64Mi/s", "1Gi/s"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: _, fields: [{ name: x, dtype: bool }] }] }",
            "ENG-0103",
            "spec.buffers[0].capacity",
            &["0", "1000000001"],
            &["1", "1000000000"],
        ),
        (
            "{ workers: 5, buffers: [{ name: _, capacity: 9, fields: [{ name: x, dtype: bool }] }] }",
            "ENG-0103",
            "spec.buffers[0].name",
            &["a b", "''", "a/b"],
            &["a", "A_1.b-c"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: _ }] }] }",
            "ENG-0104",
            "spec.buffers[0].fields[0].dtype",
            &["Float32", "f32", "object"],
            &["float32", "bfloat16", "uint8", "complex128"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: bool, shape: _ }] }] }",
            "ENG-0103",
            "spec.buffers[0].fields[0].shape[0]",
            &["[0]", "[-1, 2]"],
            &["[]", "[84, 84]"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: bool }, { name: _, dtype: bool }] }] }",
            "ENG-0106",
            "spec.buffers[0].fields[1].name",
            &["x"],
            &["y"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: bool }] }, { name: _, capacity: 1, fields: [{ name: x, dtype: bool }] }] }",
            "ENG-0106",
            "spec.buffers[1].name",
            &["a"],
            &["b"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: bool }], limiter: { samplesPerInsert: 4, tolerance: _ } }] }",
            "ENG-0106",
            "spec.buffers[0].limiter.tolerance",
            &["3.9", "1"],
            &["4", "100"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: bool }], limiter: { samplesPerInsert: 1, minSize: _, tolerance: 1 } }] }",
            "ENG-0106",
            "spec.buffers[0].limiter.minSize",
            &["10"],
            &["1", "9"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: bool }], sampler: { kind: _, alpha: 0.5 } }] }",
            "ENG-0106",
            "spec.buffers[0].sampler.alpha",
            &["Uniform", "Fifo"],
            &["Prioritized"],
        ),
        (
            "{ workers: 5, buffers: [{ name: a, capacity: 9, fields: [{ name: x, dtype: bool }], initialPriority: _ }] }",
            "ENG-0106",
            "spec.buffers[0].initialPriority",
            &["1025"],
            &["1", "1024", "0.001"],
        ),
        ("{ workers: 5, bootstrap: _ }", "ENG-0105", "spec.bootstrap.snapshot", &["{}"], &[]),
        (
            "{ workers: 5, bootstrap: { snapshot: _ } }",
            "ENG-0106",
            "spec.bootstrap.snapshot",
            &["{}", "{ region: r }"],
            &["{ url: s3://backups/words }", "{ volume: backups, path: words/monday }"],
        ),
        (
            "{ workers: 5, bootstrap: { snapshot: { volume: backups, path: _ } } }",
            "ENG-0103",
            "spec.bootstrap.snapshot.path",
            &["../words", "/words", "a/../../words", "words/", ".words", "\"words/{name}\"", "''"],
            &["words", "words/2026-11-20"],
        ),
        (
            "{ workers: 5, snapshotVolumes: [{ name: _, persistentVolumeClaim: { claimName: backups-nfs } }] }",
            "ENG-0103",
            "spec.snapshotVolumes[0].name",
            &["../backups", "Backups", "b/c"],
            &["backups"],
        ),
        (
            "{ workers: 5, bootstrap: { snapshot: { url: _ } } }",
            "ENG-0103",
            "spec.bootstrap.snapshot.url",
            &["backups/words", "gs://backups/words", "\"s3://backups/{name}\"", "s3://b/words"],
            &["s3://backups/words/monday"],
        ),
        (
            "{ workers: 5, bootstrap: { snapshot: { url: s3://backups/words, endpoint: _ } } }",
            "ENG-0103",
            "spec.bootstrap.snapshot.endpoint",
            &["minio:9000", "http://me:secret@minio:9000"],
            &["http://minio:9000", "https://s3.example.com"],
        ),
        ("{ workers: 5, storage: { size: _ } }", "ENG-0102", "spec.storage.size", &["50GB", "50"], &["50Gi"]),
        (
            "{ workers: 5, storage: { retainPolicy: _ } }",
            "ENG-0104",
            "spec.storage.retainPolicy",
            &["Keep"],
            &["Retain"],
        ),
        ("{ workers: 5, tls: { mode: _ } }", "ENG-0104", "spec.tls.mode", &["Vault"], &["Auto", "Disabled"]),
        (
            "{ workers: 5, tls: { certificateLifetime: _ } }",
            "ENG-0103",
            "spec.tls.certificateLifetime",
            &["9m"],
            &["10m", "24h"],
        ),
        ("{ workers: 5, tls: _ }", "ENG-0107", "spec.tls.trustDomain", &["{ trustDomain: example.com }"], &["{}"]),
        (
            "{ workers: 5, tls: { mode: CertManager, issuerRef: { name: ours }, certificateLifetime: _ } }",
            "ENG-0103",
            "spec.tls.certificateLifetime",
            &["59m"],
            &["1h", "90d"],
        ),
        (
            "{ workers: 5, tls: _ }",
            "ENG-0105",
            "spec.tls.issuerRef.name",
            &[
                "{ mode: CertManager }",
                "{ mode: CertManager, issuerRef: {} }",
                "{ mode: CertManager, issuerRef: { name: '' } }",
            ],
            &["{ mode: CertManager, issuerRef: { name: ours } }", "{ mode: Auto, issuerRef: { name: '' } }"],
        ),
        (
            "{ workers: 5, tls: _ }",
            "ENG-0106",
            "spec.tls.issuerRef.name",
            &["{ issuerRef: { name: ours } }", "{ mode: Secret, secretName: a, issuerRef: { name: ours } }"],
            &["{ mode: CertManager, issuerRef: { name: ours } }"],
        ),
        (
            "{ workers: 5, tls: { mode: CertManager, issuerRef: { name: _ } } }",
            "ENG-0103",
            "spec.tls.issuerRef.name",
            &["../secrets/a", "Ours", "-a", "a-"],
            &["ours", "our.own"],
        ),
        (
            "{ workers: 5, tls: { mode: CertManager, issuerRef: { name: ours, _ } } }",
            "ENG-0103",
            "spec.tls.issuerRef.kind",
            &["kind: Isuer", "kind: VaultIssuer, group: cert-manager.io", "kind: a/b, group: example.com"],
            &["kind: Issuer", "kind: ClusterIssuer, group: ''", "kind: OurIssuer, group: example.com", "kind: ''"],
        ),
        (
            "{ workers: 5, tls: { mode: CertManager, issuerRef: { name: ours, group: _ } } }",
            "ENG-0103",
            "spec.tls.issuerRef.group",
            &["example.com/v1"],
            &["example.com", "cert-manager.io"],
        ),
        (
            "{ workers: 5, tls: _ }",
            "ENG-0106",
            "spec.tls.secretName",
            &["{ secretName: a }", "{ mode: Auto, secretName: a }"],
            &["{ mode: Secret, secretName: a }", "{ mode: Auto, secretName: '' }"],
        ),
        ("{ workers: 5, tls: _ }", "ENG-0105", "spec.tls.secretName", &["{ mode: Secret }"], &["{ mode: Auto }"]),
        (
            "{ workers: 5, tls: { mode: CertManager, issuerRef: { name: ours }, secretName: _ } }",
            "ENG-0106",
            "spec.tls.secretName",
            &["words-tls"],
            &["''"],
        ),
        (
            "{ workers: 5, tls: { mode: Secret, secretName: _ } }",
            "ENG-0103",
            "spec.tls.secretName",
            &["../configmaps/a", "Words", "-a", "a-"],
            &["words-tls", "words.tls", "'1'"],
        ),
        ("{ workers: 5, telemetry: _ }", "ENG-0107", "spec.telemetry", &["{}", "{ samplerRatio: 0.5 }"], &[]),
        (
            "{ workers: 5, tls: { mode: Disabled }, access: _ }",
            "ENG-0106",
            "spec.access",
            &["[{ serviceAccount: trainer, rights: [Read] }]"],
            &["[]"],
        ),
        ("{ workers: 5, gpu: { memoryLimit: _ } }", "ENG-0107", "spec.gpu.memoryLimit", &["20Gi"], &[]),
        ("{ workers: 1, storage: { ephemeral: _ } }", "ENG-0106", "spec.storage.ephemeral", &["true"], &["false"]),
        ("{ workers: 5, version: v1, image: _ }", "ENG-0106", "spec.image", &["a/b:c"], &["\"\""]),
        (
            "{ workers: 5, gpu: { count: 2, resourceClaimTemplateName: _ } }",
            "ENG-0106",
            "spec.gpu.resourceClaimTemplateName",
            &["gpus"],
            &["\"\""],
        ),
        (
            "{ workers: 5, podTemplate: { spec: { containers: [{ name: worker, _ }] } } }",
            "ENG-0106",
            "spec.podTemplate.spec.containers[worker].image",
            &["image: a/b:c"],
            &["env: []"],
        ),
        (
            "{ workers: 5, podTemplate: { spec: _ } }",
            "ENG-0106",
            "spec.podTemplate.spec.hostNetwork",
            &["{ hostNetwork: true }"],
            &["{ hostname: a }"],
        ),
        (
            "{ workers: 5, podTemplate: { metadata: { labels: _ } } }",
            "ENG-0106",
            "spec.podTemplate.metadata.labels.engram.dev/cluster",
            &["{ engram.dev/cluster: a }"],
            &["{ team: a }"],
        ),
    ];
    for (template, code, path, bad, good) in rows {
        refused(code, path, bad.iter().map(|value| cluster(&template.replace('_', value))));
        taken(good.iter().map(|value| cluster(&template.replace('_', value))));
    }
    refused("ENG-0105", "spec.workers", [cluster("{}")]);
    refused(
        "ENG-0105",
        "spec",
        ["apiVersion: engram.dev/v1alpha1\nkind: LearnerCluster\nmetadata: { name: a }\n".into()],
    );
}

#[test]
fn kubernetes_settings_are_checked_and_listed_as_ignored() {
    let text = cluster(
        "{ workers: 5, storage: { size: 50Gi }, tls: { mode: Disabled }, gpu: { count: 1, mode: Auto }, \
         podTemplate: { metadata: { labels: { a: b } }, any: [1, 2.5, null] }, resources: { requests: { cpu: \"2\" } } }",
    ) + "---\n"
        + &source("git: {}", ", ttlSecondsAfterFinished: 60, managedBy: someone");
    let manifest = check(&text).unwrap_or_else(|problems| panic!("{}", problems.render(false)));
    let expected = [
        "spec.storage",
        "spec.tls",
        "spec.gpu.count",
        "spec.podTemplate",
        "spec.resources",
        "spec.ttlSecondsAfterFinished",
        "spec.managedBy",
    ];
    assert_eq!(manifest.ignored, expected);
    assert_eq!(manifest.local_notes(), [format!("ignored in local mode: {}", expected.join(", "))]);
    let lone = check(&cluster("{ workers: 1, durability: { mode: Replicated } }")).unwrap();
    assert_eq!(lone.local_notes(), ["spec.durability.mode: Replicated means Sync with a single replica"]);
    let replicated = check(&cluster("{ workers: 5, durability: { mode: Replicated } }")).unwrap();
    assert!(replicated.local_notes().is_empty());
}

#[test]
fn resources_of_the_container_are_checked() {
    let of = |resources: &str| check(&cluster(&format!("{{ workers: 5, resources: {{ {resources} }} }}")));
    for good in [
        "requests: { cpu: 2, memory: 4Gi }, limits: { cpu: '1.5', example.com/fpga: 1 }",
        "limits: { hugepages-2Mi: 64Mi, ephemeral-storage: '1e9' }, claims: [{ name: gpu }]",
    ] {
        assert!(of(good).is_ok(), "{good}: {}", of(good).unwrap_err().render(false));
    }
    for (bad, expected) in [
        ("requests: { cpu: lots }", "spec.resources.requests.cpu is lots; allowed: a whole number"),
        ("limits: { memory: -1 }", "spec.resources.limits.memory is -1; allowed: a whole number"),
        ("limits: { memory: 4GB }", "spec.resources.limits.memory is 4GB; allowed: a whole number"),
        ("limts: { cpu: 2 }", "spec.resources.limts is not a known field; allowed here: claims, limits, requests"),
        ("requests: { memry: 1Gi }", "spec.resources.requests.memry is not a resource; allowed: cpu, memory"),
    ] {
        let problems = of(bad).expect_err(bad);
        assert!(problems[0].message().starts_with(expected), "{bad}: {}", problems[0].message());
    }
}
