//! Examples for every validation rule: an object that it rejects, and a similar one that it accepts.

use serde_json::{Value, json};

pub(crate) struct Row {
    pub(crate) plural: &'static str,
    /// Prefix of the message.
    pub(crate) message: &'static str,
    pub(crate) refused: &'static str,
    pub(crate) taken: &'static str,
}

const fn cluster(message: &'static str, refused: &'static str, taken: &'static str) -> Row {
    Row { plural: "learnerclusters", message, refused, taken }
}

const fn run(message: &'static str, refused: &'static str, taken: &'static str) -> Row {
    Row { plural: "learnerruns", message, refused, taken }
}

/// Specs (or whole objects, if they begin with `metadata`): one that a rule rejects, and a similar one that it accepts.
pub(crate) const ROWS: &[Row] = &[
    cluster("replicationFactor must", r#"{"workers":2,"replicationFactor":3}"#, r#"{"workers":1}"#),
    cluster(
        "maxWorkers must not",
        r#"{"workers":3,"autoscaling":{"minWorkers":3,"maxWorkers":2,"operationsPerWorker":1000}}"#,
        r#"{"workers":3,"autoscaling":{"minWorkers":3,"maxWorkers":3,"operationsPerWorker":1000}}"#,
    ),
    cluster(
        "autoscaling.minWorkers must",
        r#"{"workers":3,"replicationFactor":2,"autoscaling":{"minWorkers":1,"maxWorkers":9,"operationsPerWorker":1}}"#,
        r#"{"workers":3,"replicationFactor":2,"autoscaling":{"minWorkers":2,"maxWorkers":9,"operationsPerWorker":1}}"#,
    ),
    cluster(
        "ephemeral storage needs",
        r#"{"workers":3,"replicationFactor":1,"storage":{"ephemeral":true}}"#,
        r#"{"workers":3,"storage":{"ephemeral":true}}"#,
    ),
    cluster(
        "version and image exclude",
        r#"{"workers":3,"version":"1","image":"a:b"}"#,
        r#"{"workers":3,"image":"a:b"}"#,
    ),
    cluster(
        "resourceClaimTemplateName excludes",
        r#"{"workers":3,"gpu":{"count":1,"resourceClaimTemplateName":"g"}}"#,
        r#"{"workers":3,"gpu":{"resourceClaimTemplateName":"g"}}"#,
    ),
    cluster(
        "access excludes tls.mode: Disabled",
        r#"{"workers":3,"access":[{"serviceAccount":"a","rights":["Read"]}],"tls":{"mode":"Disabled"}}"#,
        r#"{"workers":3,"access":[{"serviceAccount":"a","rights":["Read"]}],"tls":{"certificateLifetime":"1h"}}"#,
    ),
    cluster(
        "initialPriority must not",
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"initialPriority":3.0,"maxPriority":2.0}]}"#,
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"initialPriority":2.0,"maxPriority":2.0}]}"#,
    ),
    cluster(
        "limiter.minSize must not",
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"limiter":{"samplesPerInsert":1.5,"minSize":10,"tolerance":2.0}}]}"#,
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"limiter":{"samplesPerInsert":1.5,"minSize":9,"tolerance":2.0}}]}"#,
    ),
    cluster(
        "limiter.tolerance must be",
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"limiter":{"samplesPerInsert":2.5,"tolerance":2.0}}]}"#,
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"limiter":{"samplesPerInsert":2.5,"tolerance":2.5}}]}"#,
    ),
    cluster(
        "sampler.alpha and sampler.beta belong",
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"sampler":{"kind":"Uniform","alpha":0.5}}]}"#,
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"sampler":{"kind":"Prioritized","alpha":0.5}}]}"#,
    ),
    cluster(
        "sampler.length belongs",
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"sampler":{"kind":"Slices"}}]}"#,
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}],"sampler":{"kind":"Slices","length":8}}]}"#,
    ),
    cluster("spec.telemetry is not", r#"{"workers":3,"telemetry":{}}"#, r#"{"workers":3}"#),
    cluster("spec.gpu.selector is not", r#"{"workers":3,"gpu":{"selector":{}}}"#, r#"{"workers":3,"gpu":{}}"#),
    cluster("spec.gpu.memoryLimit is not", r#"{"workers":3,"gpu":{"memoryLimit":"1Gi"}}"#, r#"{"workers":3}"#),
    cluster(
        "spec.scheduling.queueName is not",
        r#"{"workers":3,"scheduling":{"queueName":"q"}}"#,
        r#"{"workers":3,"scheduling":{"schedulerName":"s"}}"#,
    ),
    cluster(
        "tls.mode: Secret needs secretName",
        r#"{"workers":3,"tls":{"mode":"Secret"}}"#,
        r#"{"workers":3,"tls":{"mode":"Secret","secretName":"words-tls"}}"#,
    ),
    cluster(
        "tls.mode: Secret needs secretName",
        r#"{"workers":3,"tls":{"mode":"Secret","secretName":"../configmaps/a"}}"#,
        r#"{"workers":3,"tls":{"mode":"Secret","secretName":"words.tls"}}"#,
    ),
    cluster(
        "tls.mode: Secret needs secretName",
        r#"{"workers":3,"tls":{"mode":"Auto","secretName":"a"}}"#,
        r#"{"workers":3,"tls":{"mode":"Auto","secretName":""}}"#,
    ),
    cluster(
        "tls.mode: Secret needs secretName",
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours"},"secretName":"a"}}"#,
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours"},"secretName":""}}"#,
    ),
    cluster(
        "tls.mode: CertManager needs issuerRef.name",
        r#"{"workers":3,"tls":{"mode":"CertManager"}}"#,
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours"}}}"#,
    ),
    cluster(
        "tls.mode: CertManager needs issuerRef.name",
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"a/b"}}}"#,
        r#"{"workers":3,"tls":{"mode":"Auto","issuerRef":{"name":""}}}"#,
    ),
    cluster(
        "tls.mode: CertManager needs issuerRef.name",
        r#"{"workers":3,"tls":{"mode":"Secret","secretName":"a","issuerRef":{"name":"ours"}}}"#,
        r#"{"workers":3,"tls":{"mode":"Secret","secretName":"a","issuerRef":{}}}"#,
    ),
    cluster(
        "tls.mode: CertManager needs a certificateLifetime",
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours"},"certificateLifetime":"59m"}}"#,
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours"},"certificateLifetime":"60m"}}"#,
    ),
    cluster(
        "tls.issuerRef.kind must",
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours","kind":"OurIssuer"}}}"#,
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours","kind":"OurIssuer","group":"example.com"}}}"#,
    ),
    cluster(
        "tls.issuerRef.group must",
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours","group":"a/b"}}}"#,
        r#"{"workers":3,"tls":{"mode":"CertManager","issuerRef":{"name":"ours","kind":"ClusterIssuer","group":"cert-manager.io"}}}"#,
    ),
    cluster("spec.tls.trustDomain is not", r#"{"workers":3,"tls":{"trustDomain":"a"}}"#, r#"{"workers":3,"tls":{}}"#),
    cluster(
        "spec.tls.certificateLifetime must",
        r#"{"workers":3,"tls":{"certificateLifetime":"9m"}}"#,
        r#"{"workers":3,"tls":{"certificateLifetime":"10m"}}"#,
    ),
    cluster(
        "spec.bootstrap.snapshot.url must name one snapshot",
        r#"{"workers":3,"bootstrap":{"snapshot":{"url":"s3://backups/{name}"}}}"#,
        r#"{"workers":3,"bootstrap":{"snapshot":{"url":"s3://backups/words/monday"}}}"#,
    ),
    cluster(
        "spec.bootstrap.snapshot.path must name one snapshot",
        r#"{"workers":3,"bootstrap":{"snapshot":{"volume":"backups","path":"words/{name}"}}}"#,
        r#"{"workers":3,"bootstrap":{"snapshot":{"volume":"backups","path":"words/monday"}}}"#,
    ),
    cluster(
        "spec.bootstrap.snapshot must have exactly one",
        r#"{"workers":3,"bootstrap":{"snapshot":{"url":"s3://backups/words","volume":"backups","path":"words"}}}"#,
        r#"{"workers":3,"bootstrap":{"snapshot":{"volume":"backups","path":"words"}}}"#,
    ),
    cluster(
        "spec.bootstrap.snapshot.path, the folder in a volume",
        r#"{"workers":3,"bootstrap":{"snapshot":{"volume":"backups"}}}"#,
        r#"{"workers":3,"bootstrap":{"snapshot":{"volume":"backups","path":"words"}}}"#,
    ),
    cluster(
        "spec.bootstrap.snapshot.volume excludes",
        r#"{"workers":3,"bootstrap":{"snapshot":{"volume":"backups","path":"words","secretRef":{"name":"s3"}}}}"#,
        r#"{"workers":3,"bootstrap":{"snapshot":{"url":"s3://backups/words","secretRef":{"name":"s3"}}}}"#,
    ),
    cluster(
        "spec.learning.law: Exponential is not",
        r#"{"workers":3,"learning":{"law":"Exponential"}}"#,
        r#"{"workers":3,"learning":{"law":"Linear"}}"#,
    ),
    cluster(
        "spec.learning.decay must",
        r#"{"workers":3,"learning":{"decay":1e-10}}"#,
        r#"{"workers":3,"learning":{"decay":0.0}}"#,
    ),
    cluster(
        "spec.learning.initialWeight must",
        r#"{"workers":3,"learning":{"initialWeight":1e-10}}"#,
        r#"{"workers":3,"learning":{"initialWeight":1e-9}}"#,
    ),
    cluster(
        "spec.autoscaling.interval must be at least",
        r#"{"workers":3,"autoscaling":{"minWorkers":3,"maxWorkers":3,"operationsPerWorker":9,"interval":"9s"}}"#,
        r#"{"workers":3,"autoscaling":{"minWorkers":3,"maxWorkers":3,"operationsPerWorker":9,"interval":"10s"}}"#,
    ),
    cluster(
        "spec.autoscaling.interval must be at most",
        r#"{"workers":3,"autoscaling":{"minWorkers":3,"maxWorkers":3,"operationsPerWorker":9,"interval":"61m"}}"#,
        r#"{"workers":3,"autoscaling":{"minWorkers":3,"maxWorkers":3,"operationsPerWorker":9,"interval":"1h"}}"#,
    ),
    cluster("spec.restartGrace must", r#"{"workers":3,"restartGrace":"61s"}"#, r#"{"workers":3,"restartGrace":"1m"}"#),
    cluster(
        "spec.maintenance.scrubInterval must",
        r#"{"workers":3,"maintenance":{"scrubInterval":"59m"}}"#,
        r#"{"workers":3,"maintenance":{"scrubInterval":"1h"}}"#,
    ),
    cluster(
        "metadata.name must be at most",
        r#"{"metadata":{"name":"a123456789012345678901234567890123456789012345"},"spec":{"workers":3}}"#,
        r#"{"metadata":{"name":"a12345678901234567890123456789012345678901234"},"spec":{"workers":3}}"#,
    ),
    cluster(
        "metadata.name must be a-z",
        r#"{"metadata":{"name":"0a"},"spec":{"workers":3}}"#,
        r#"{"metadata":{"name":"a-0"},"spec":{"workers":3}}"#,
    ),
    run(
        "a run cannot depend on itself",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"dependsOn":[{"run":"words"}]}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"dependsOn":[{"run":"load"}]}"#,
    ),
    run(
        "metadata.name must be at most",
        r#"{"metadata":{"name":"a123456789012345678901234567890123456789012345"},"spec":{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "metadata.name must be a-z",
        r#"{"metadata":{"name":"a."},"spec":{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "kind Snapshot needs",
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot","snapshot":{"url":"s3://backups/words/{name}","secretRef":{"name":"s3"}}}"#,
    ),
    run(
        "spec.snapshot must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot","snapshot":{}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot","snapshot":{"volume":"backups","path":"words/{name}"}}"#,
    ),
    run(
        "spec.snapshot.path, the folder in a volume",
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot","snapshot":{"url":"s3://backups/words","path":"words"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot","snapshot":{"url":"s3://backups/words"}}"#,
    ),
    run(
        "spec.snapshot.volume excludes",
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot","snapshot":{"volume":"backups","path":"words","endpoint":"http://s3:9000"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Snapshot","snapshot":{"volume":"backups","path":"words"}}"#,
    ),
    run(
        "only the block named by kind",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"snapshot":{"url":"s3://backups/words"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "kind Memory needs",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "report.inversion and",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"example":{"name":"StateOfTheUnion"}},"report":{"coverage":true}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"example":{"name":"StateOfTheUnion"}},"report":{"skip":2}}}"#,
    ),
    run(
        "report.topK and",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}},"report":{"topK":[5]}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}},"report":{"coverage":true}}}"#,
    ),
    run(
        "until must have",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"until":{}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"until":{"separation":0.5}}"#,
    ),
    run(
        "until needs",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"example":{"name":"StateOfTheUnion"}}},"until":{"separation":0.5}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"until":{"separation":0.5}}"#,
    ),
    run(
        "spec.memory.source must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{},"example":{"name":"StateOfTheUnion"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"example":{"name":"StateOfTheUnion"}}}}"#,
    ),
    run(
        "spec.memory.source.events must have exactly one of path",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"columns":{"key":"k","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events.input needs",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"input":"i","columns":{"key":"k","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"path":"b/a.csv","input":"i","columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events.path must stay",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"path":"b/../../a.csv","input":"i","columns":{"key":"k","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"path":"b/..a.csv","input":"i","columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events.path without",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"path":"a.csv","columns":{"key":"k","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"path":"b/a.csv","input":"i","columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events.columns must have exactly one of id",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"columns":{"key":"k","id":"i","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events.columns must have exactly one of epoch",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"columns":{"key":"k"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events must have exactly one of path",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"s3":{"url":"s3://events/a.csv"},"columns":{"key":"k","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"s3":{"url":"s3://events/2026/a.csv.zst","endpoint":"http://s3:9000","secretRef":{"name":"s3"}},"columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events.s3.url must name one object",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"s3":{"url":"s3://events/{name}"},"format":"Csv","columns":{"key":"k","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"s3":{"url":"s3://events/a.csv"},"columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.events.s3.url must name one object",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"s3":{"url":"s3://events"},"format":"Csv","columns":{"key":"k","epoch":"e"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"s3":{"url":"s3://events/a"},"format":"Csv","columns":{"key":"k","epoch":"e"}}}}}"#,
    ),
    run(
        "spec.memory.source.git is not",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"git":{}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "spec.memory.decay must",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}},"decay":1e-10}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}},"decay":0.5}}"#,
    ),
    run(
        "spec.memory.source.events.epochSpan must",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"events":{"configMap":{"name":"c","key":"a.csv"},"columns":{"key":"k","time":"e"},"epochSpan":"0s"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "kind Geodesic needs the block",
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "kind Tropical needs the block",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"decode":{"source":{"synthetic":{}}}}}"#,
    ),
    run(
        "kind Fisher needs the block",
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{}}"#,
    ),
    run(
        "kind Replay needs the block",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
    ),
    run(
        "spec.replay.checkpoint.location must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{"url":"s3://models/a"}}}}"#,
    ),
    run(
        "spec.replay.checkpoint.location.path, the folder",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{"volume":"v"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{"volume":"v","path":"a"}}}}"#,
    ),
    run(
        "spec.replay.checkpoint.location.volume excludes",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{"volume":"v","path":"a","region":"us"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{"volume":"v","path":"a"}}}}"#,
    ),
    run(
        "spec.replay.checkpoint.location.secretRef is not",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{"url":"s3://models/a","secretRef":{"name":"s"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"checkpoint":{"location":{"url":"s3://models/{name}"}}}}"#,
    ),
    run(
        "kind Job needs the block",
        r#"{"clusterRef":{"name":"w"},"kind":"Job"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Job","job":{"image":"a:1","command":["train"]}}"#,
    ),
    run(
        "only the block named by kind may be set; job",
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"example":{"name":"Digits"}}},"job":{"image":"a:1","command":["train"]}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Job","job":{"image":"a:1","command":["train"],"args":["--steps","300"],"replicas":3}}"#,
    ),
    run(
        "spec.job.image must name",
        r#"{"clusterRef":{"name":"w"},"kind":"Job","job":{"command":["train"]}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Job","job":{"image":"a:1","command":["train"]}}"#,
    ),
    run(
        "spec.job.env must not set",
        r#"{"clusterRef":{"name":"w"},"kind":"Job","job":{"image":"a:1","command":["train"],"env":[{"name":"ENGRAM_RANK","value":"1"}]}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Job","job":{"image":"a:1","command":["train"],"env":[{"name":"OMP_NUM_THREADS","value":"1"}],"podTemplate":{"spec":{"nodeSelector":{"a":"b"}}}}}"#,
    ),
    run(
        "kind Federated needs the block",
        r#"{"clusterRef":{"name":"w"},"kind":"Federated"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1}}}"#,
    ),
    run(
        "spec.federated.deadline must be at least",
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"deadline":"999ms"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"deadline":"1s"}}"#,
    ),
    run(
        "spec.federated.deadline must be at most",
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"deadline":"169h"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"deadline":"168h"}}"#,
    ),
    run(
        "spec.federated.lease must be at least",
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"lease":"999ms"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"lease":"1s"}}"#,
    ),
    run(
        "spec.federated.lease must be at most",
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"lease":"169h"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Federated","federated":{"model":{"layers":[{"name":"w","shape":[2]}]},"rounds":2,"clients":{"population":2,"perRound":1},"lease":"168h"}}"#,
    ),
    run(
        "spec.geodesic.source must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"synthetic":{}}}}"#,
    ),
    run(
        "spec.fisher.data must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"example":{"name":"Digits"}}}}"#,
    ),
    run(
        "spec.tropical must have",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"decode":{"source":{"synthetic":{}}}}}"#,
    ),
    run(
        "spec.tropical.decode.source must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"decode":{"source":{}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"decode":{"source":{"synthetic":{}}}}}"#,
    ),
    run(
        "spec.tropical.classify.data must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"example":{"name":"Digits"}}}}}"#,
    ),
    run(
        "spec.tropical.graph excludes classify.data.csv",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"configMap":{"name":"c","key":"a.csv"}}},"classify":{"data":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"}},"label":"kind"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"configMap":{"name":"c","key":"a.csv"}}},"classify":{"data":{"example":{"name":"Digits"}}}}}"#,
    ),
    run(
        "spec.replay.detectAfter must be at least",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"detectAfter":"99ms"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"detectAfter":"100ms"}}"#,
    ),
    run(
        "spec.replay.detectAfter must be at most",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"detectAfter":"61s"}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}},"detectAfter":"60s"}}"#,
    ),
    run(
        "spec.replay.source must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"synthetic":{}},"model":{"inputs":[{"field":"mask","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
    ),
    run(
        "spec.geodesic.source.csv must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"configMap":{"name":"c","key":"a.csv"},"path":"a.csv","input":"data"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"configMap":{"name":"c","key":"a.csv"}}}}}"#,
    ),
    run(
        "spec.geodesic.source.csv.input needs path",
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"configMap":{"name":"c","key":"a.csv"},"input":"data"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"input":"data","path":"a.csv"}}}}"#,
    ),
    run(
        "spec.geodesic.source.csv.path must stay inside",
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"input":"data","path":"../a.csv"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"input":"data","path":"b/a.csv"}}}}"#,
    ),
    run(
        "spec.geodesic.source.csv.path without input",
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"path":"a.csv"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"csv":{"input":"data","path":"a.csv"}}}}"#,
    ),
    run(
        "spec.replay.source.csv.file must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"},"path":"a.csv","input":"data"}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"}}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
    ),
    run(
        "spec.replay.source.csv.file.input needs path",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"},"input":"data"}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"input":"data","path":"a.csv"}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
    ),
    run(
        "spec.replay.source.csv.file.path must stay inside",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"input":"data","path":"../a.csv"}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"input":"data","path":"b/a.csv"}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
    ),
    run(
        "spec.replay.source.csv.file.path without input",
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"path":"a.csv"}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Replay","replay":{"batch":256,"steps":1000,"optimizer":{"kind":"AdamW","rate":0.001},"source":{"csv":{"file":{"input":"data","path":"a.csv"}}},"model":{"inputs":[{"field":"features","dim":100}],"layers":[{"dense":1}],"loss":{"kind":"Mse","target":"score"}}}}"#,
    ),
    run(
        "spec.fisher.data.csv.file must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"},"path":"a.csv","input":"data"},"label":"kind"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"}},"label":"kind"}}}}"#,
    ),
    run(
        "spec.fisher.data.csv.file.input needs path",
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"},"input":"data"},"label":"kind"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"input":"data","path":"a.csv"},"label":"kind"}}}}"#,
    ),
    run(
        "spec.fisher.data.csv.file.path must stay inside",
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"input":"data","path":"../a.csv"},"label":"kind"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"input":"data","path":"b/a.csv"},"label":"kind"}}}}"#,
    ),
    run(
        "spec.fisher.data.csv.file.path without input",
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"path":"a.csv"},"label":"kind"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Fisher","fisher":{"data":{"csv":{"file":{"input":"data","path":"a.csv"},"label":"kind"}}}}"#,
    ),
    run(
        "spec.tropical.classify.data.csv.file must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"},"path":"a.csv","input":"data"},"label":"kind"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"}},"label":"kind"}}}}}"#,
    ),
    run(
        "spec.tropical.classify.data.csv.file.input needs path",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"configMap":{"name":"c","key":"a.csv"},"input":"data"},"label":"kind"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"input":"data","path":"a.csv"},"label":"kind"}}}}}"#,
    ),
    run(
        "spec.tropical.classify.data.csv.file.path must stay inside",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"input":"data","path":"../a.csv"},"label":"kind"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"input":"data","path":"b/a.csv"},"label":"kind"}}}}}"#,
    ),
    run(
        "spec.tropical.classify.data.csv.file.path without input",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"path":"a.csv"},"label":"kind"}}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"classify":{"data":{"csv":{"file":{"input":"data","path":"a.csv"},"label":"kind"}}}}}"#,
    ),
    run(
        "spec.tropical.graph.file must have exactly one",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"configMap":{"name":"c","key":"a.csv"},"path":"a.csv","input":"data"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"configMap":{"name":"c","key":"a.csv"}}}}}"#,
    ),
    run(
        "spec.tropical.graph.file.input needs path",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"configMap":{"name":"c","key":"a.csv"},"input":"data"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"input":"data","path":"a.csv"}}}}"#,
    ),
    run(
        "spec.tropical.graph.file.path must stay inside",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"input":"data","path":"../a.csv"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"input":"data","path":"b/a.csv"}}}}"#,
    ),
    run(
        "spec.tropical.graph.file.path without input",
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"path":"a.csv"}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Tropical","tropical":{"graph":{"file":{"input":"data","path":"a.csv"}}}}"#,
    ),
];

/// Changes: the old spec, a new one that a rule rejects, and one that it accepts.
pub(crate) const CHANGES: &[(&str, &str, &str, &str, &str)] = &[
    (
        "learnerclusters",
        "a declared buffer cannot change",
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}]}]}"#,
        r#"{"workers":3,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"int8"}]}]}"#,
        r#"{"workers":5,"buffers":[{"name":"a","capacity":9,"fields":[{"name":"x","dtype":"bool"}]},{"name":"b","capacity":1,"fields":[{"name":"x","dtype":"int8"}]}]}"#,
    ),
    (
        "learnerclusters",
        "spec.partitions cannot",
        r#"{"workers":3}"#,
        r#"{"workers":3,"partitions":8}"#,
        r#"{"workers":5}"#,
    ),
    (
        "learnerclusters",
        "spec.features cannot",
        r#"{"workers":3}"#,
        r#"{"workers":3,"features":{"dimension":8,"dtype":"F16"}}"#,
        r#"{"workers":3,"features":{"dimension":0,"dtype":"F16"}}"#,
    ),
    (
        "learnerclusters",
        "spec.learning.law cannot",
        r#"{"workers":3}"#,
        r#"{"workers":3,"learning":{"law":"Exponential"}}"#,
        r#"{"workers":3,"learning":{"decay":0.5}}"#,
    ),
    (
        "learnerclusters",
        "spec.managedBy cannot",
        r#"{"workers":3}"#,
        r#"{"workers":3,"managedBy":"me"}"#,
        r#"{"workers":3,"managedBy":"engram.dev/operator"}"#,
    ),
    (
        "learnerclusters",
        "spec.tls.mode cannot",
        r#"{"workers":3}"#,
        r#"{"workers":3,"tls":{"mode":"Disabled"}}"#,
        r#"{"workers":3,"tls":{"mode":"Auto","certificateLifetime":"1h"}}"#,
    ),
    (
        "learnerclusters",
        "spec.storage.size can only grow",
        r#"{"workers":3,"storage":{"size":"1Gi"}}"#,
        r#"{"workers":3,"storage":{"size":"1023Mi"}}"#,
        r#"{"workers":3,"storage":{"size":"1025Mi"}}"#,
    ),
    (
        "learnerruns",
        "spec.managedBy cannot",
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"managedBy":"me"}"#,
        r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"suspend":true}"#,
    ),
    (
        "learnerclusters",
        "spec.bootstrap cannot change",
        r#"{"workers":3}"#,
        r#"{"workers":3,"bootstrap":{"snapshot":{"url":"s3://backups/words"}}}"#,
        r#"{"workers":4}"#,
    ),
    (
        "learnerruns",
        "a run that has started",
        r#"{"metadata":{"name":"a"},"spec":{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"synthetic":{}}}},"status":{"startTime":"2026-11-21T09:01:00Z"}}"#,
        r#"{"metadata":{"name":"a"},"spec":{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"synthetic":{}},"starts":3}},"status":{"startTime":"2026-11-21T09:01:00Z"}}"#,
        r#"{"metadata":{"name":"a"},"spec":{"clusterRef":{"name":"w"},"kind":"Geodesic","geodesic":{"source":{"synthetic":{}}},"suspend":true},"status":{"startTime":"2026-11-21T09:01:00Z"}}"#,
    ),
    (
        "learnerruns",
        "a run that has started",
        r#"{"metadata":{"name":"a"},"spec":{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}},"status":{"startTime":"2026-11-21T09:01:00Z"}}"#,
        r#"{"metadata":{"name":"a"},"spec":{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}},"epochs":3}},"status":{"startTime":"2026-11-21T09:01:00Z"}}"#,
        r#"{"metadata":{"name":"a"},"spec":{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}},"suspend":true},"status":{"startTime":"2026-11-21T09:01:00Z"}}"#,
    ),
];

/// Reserved blocks of runs; the kinds have the same names, capitalised.
pub(crate) const BLOCKS: [&str; 0] = [];

/// A valid run.
pub(crate) const RUN: &str = r#"{"clusterRef":{"name":"w"},"kind":"Memory","memory":{"source":{"synthetic":{}}}}"#;

/// The kind of run that has this block.
pub(crate) fn kind_of(block: &str) -> String {
    format!("{}{}", block[..1].to_uppercase(), &block[1..])
}

/// The object of an example.
pub(crate) fn object(plural: &str, text: &str) -> Value {
    let spec: Value = serde_json::from_str(text).expect("JSON");
    let kind = if plural == "learnerclusters" { "LearnerCluster" } else { "LearnerRun" };
    let mut whole =
        if spec.get("metadata").is_some() { spec } else { json!({ "metadata": { "name": "words" }, "spec": spec }) };
    whole["apiVersion"] = "engram.dev/v1alpha1".into();
    whole["kind"] = kind.into();
    whole
}
