//! The fields of the Job of a run of kind `Job`.

use engram_api::LearnerRunSpec;
use engram_operator::job_object::{JobOwner, QUEUE_LABEL, job};
use engram_operator::learner_run::object::RunObject;
use engram_operator::learner_run::validate_run;
use serde_json::{Value, json};

fn run(labels: &Value, job: &Value) -> (JobOwner, LearnerRunSpec) {
    let metadata = json!({ "name": "train", "namespace": "research", "uid": "u-1", "labels": labels });
    let object = serde_json::from_value::<RunObject>(json!({
        "apiVersion": "engram.dev/v1alpha1", "kind": "LearnerRun", "metadata": metadata,
        "spec": { "clusterRef": { "name": "words" }, "kind": "Job", "backoffLimit": 2, "job": job },
    }))
    .expect("an object");
    let spec = validate_run(&object).unwrap_or_else(|refused| panic!("{}", refused.message));
    (JobOwner::of(&object).expect("an owner"), spec)
}

fn build(labels: &Value, job_spec: &Value, cluster_id: Option<&str>) -> Value {
    let (owner, spec) = run(labels, job_spec);
    job(&owner, &spec, spec.job.as_ref().expect("a job"), cluster_id)
}

/// Returns the value of a variable of the program.
fn variable<'a>(built: &'a Value, name: &str) -> &'a Value {
    let variables = built.pointer("/spec/template/spec/containers/0/env").and_then(Value::as_array);
    let found = variables.and_then(|all| all.iter().find(|it| it["name"] == name));
    &found.unwrap_or_else(|| panic!("no variable {name}: {built:#}"))["value"]
}

#[test]
fn a_job_starts_its_processes_with_address_credentials_and_index() {
    let spec = json!({
        "image": "registry.example.com/train:1", "command": ["python", "train.py"], "args": ["--steps", "9"], "replicas": 3,
        "env": [{ "name": "OMP_NUM_THREADS", "value": "1" }], "gracePeriodSeconds": 5, "activeDeadlineSeconds": 60,
        "resources": { "limits": { "nvidia.com/gpu": "1" } }, "workingDir": "/src",
        "podTemplate": {
            "metadata": { "labels": { "team": "a" } },
            "spec": {
                "nodeSelector": { "pool": "gpu" }, "tolerations": [{ "key": "gpu", "operator": "Exists" }],
                "serviceAccountName": "trainer",
                "containers": [{ "name": "main", "volumeMounts": [{ "name": "data", "mountPath": "/data" }] }],
                "volumes": [{ "name": "data", "emptyDir": {} }],
            },
        },
    });
    let built = build(&json!({}), &spec, Some("0f6c1d528a534a0a9d1e2f8f5f0f7a11"));
    let owner = &built["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["uid"], &owner["controller"]),
        (&"LearnerRun".into(), &"u-1".into(), &true.into())
    );
    let body = &built["spec"];
    for (field, expected) in [
        ("completionMode", json!("Indexed")),
        ("completions", json!(3)),
        ("parallelism", json!(3)),
        ("backoffLimit", json!(2)),
        ("suspend", json!(false)),
        ("activeDeadlineSeconds", json!(60)),
    ] {
        assert_eq!(body[field], expected, "{field}");
    }
    assert_eq!(body["podFailurePolicy"]["rules"][0]["action"], "Ignore");
    let template = &body["template"];
    assert_eq!(template["metadata"]["labels"]["engram.dev/run"], "train");
    assert_eq!(template["metadata"]["labels"]["team"], "a");
    let pod = &template["spec"];
    assert_eq!((&pod["restartPolicy"], &pod["nodeSelector"]["pool"]), (&"Never".into(), &"gpu".into()));
    assert_eq!((&pod["serviceAccountName"], &pod["terminationGracePeriodSeconds"]), (&"trainer".into(), &5.into()));
    let container = &pod["containers"][0];
    assert_eq!(container["command"], json!(["python", "train.py"]));
    assert_eq!(container["resources"]["limits"]["nvidia.com/gpu"], "1");
    assert_eq!(container["volumeMounts"].as_array().map(Vec::len), Some(2), "{container:#}");
    for (name, expected) in [
        ("ENGRAM_ADDRESS", "words.research.svc:7443"),
        ("ENGRAM_RUN", "train"),
        ("ENGRAM_GROUP", "train"),
        ("ENGRAM_WORLD_SIZE", "3"),
        ("ENGRAM_CERTIFICATE_AUTHORITY", "/var/run/engram/ca.pem"),
        ("ENGRAM_TOKEN_FILE", "/var/run/engram/token"),
        ("OMP_NUM_THREADS", "1"),
    ] {
        assert_eq!(*variable(&built, name), expected, "{name}");
    }
    assert!(variable(&built, "ENGRAM_RANK").is_null(), "it is the index of the pod");
    let token = &pod["volumes"][0]["projected"]["sources"][0]["serviceAccountToken"];
    assert_eq!(token["audience"], "engram/0f6c1d528a534a0a9d1e2f8f5f0f7a11");
}

#[test]
fn a_queue_starts_the_job_and_a_cluster_without_tls_needs_no_credentials() {
    let spec = json!({ "image": "a:1", "command": ["train"], "group": "shared" });
    let labels = json!({ QUEUE_LABEL: "gpus", "kueue.x-k8s.io/priority-class": "high", "other": "label" });
    let built = build(&labels, &spec, None);
    let passed_on = &built["metadata"]["labels"];
    assert_eq!((&passed_on[QUEUE_LABEL], &built["spec"]["suspend"]), (&"gpus".into(), &true.into()));
    assert_eq!(passed_on["kueue.x-k8s.io/priority-class"], "high");
    assert!(passed_on.get("other").is_none(), "{passed_on:#}");
    assert_eq!(*variable(&built, "ENGRAM_GROUP"), "shared");
    let pod = &built["spec"]["template"]["spec"];
    assert!(pod.get("volumes").is_none() && pod["containers"][0].get("volumeMounts").is_none(), "{pod:#}");
}
