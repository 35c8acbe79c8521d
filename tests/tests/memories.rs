//! Memories through the command line: inserted, read, ranked, exported and imported in every format.

use engram_tests::{Cluster, cluster_manifest};
use serde_json::json;

#[test]
fn inserted_memories_are_read_ranked_exported_and_inserted_again() {
    let spec = "  partitions: 8\n  features: { dimension: 2, dtype: F32 }\n  learning: { initialWeight: 0.5 }\n";
    let cluster = Cluster::up(&cluster_manifest("all", 2, spec));
    let insert = |arguments: &[&str]| cluster.engram(&[&["insert"], arguments].concat()).exits_with(0);
    insert(&["red", "--weight", "0.75", "--group", "3", "--features", "1.5,-2", "--payload", "tabs\tand\nlines"]);
    insert(&["green", "--id", "42"]);

    let found = cluster.engram(&["get", "red", "green", "--id", "42", "-o", "json"]).exits_with(0).json();
    assert_eq!(found["kind"], "List");
    let red_id = &found["items"][0]["id"];
    let red = json!({
        "id": red_id, "key": "red", "weight": 0.75, "group": 3, "features": [1.5, -2.0], "payload": "tabs\tand\nlines",
    });
    assert_eq!(found["items"][0], red);
    assert_eq!(found["items"][2], json!({ "id": 42, "weight": 0.5, "group": 0, "features": [0.0, 0.0] }));
    let table = cluster.engram(&["get", "red"]).exits_with(0).stdout;
    assert_eq!(table, format!("memory\tweight\tgroup\tid\nred\t0.75\t3\t{red_id}\n"), "tab-separated in a pipe");

    // Ties are broken by the lower id.
    let ranked = cluster.engram(&["rank", "-o", "name"]).exits_with(0).stdout;
    let mut tied: Vec<(u64, String)> = vec![(42, "42".into())];
    tied.push((found["items"][1]["id"].as_u64().unwrap(), "green".into()));
    tied.sort();
    assert_eq!(ranked, format!("red\n{}\n{}\n", tied[0].1, tied[1].1));
    let all = cluster.engram(&["rank", "-k", "0", "-o", "json"]).exits_with(0).json();
    assert_eq!(all["items"].as_array().unwrap().len(), 3, "a streamed list is JSON too");
    let group = cluster.engram(&["rank", "--group", "3", "-o", "yaml"]).exits_with(0).stdout;
    assert!(group.contains("key: red") && !group.contains("green"), "{group}");

    let quality = cluster.engram(&["quality", "--histogram=1", "-o", "json"]).exits_with(0).json();
    assert_eq!((&quality["total"]["count"], &quality["total"]["max"]), (&json!(3), &json!(0.75)));
    assert_eq!(quality["histogram"], json!([{ "group": 0, "bins": [0, 2] }, { "group": 3, "bins": [0, 1] }]));

    // Export and import; these weights are exact in single precision.
    let before = cluster.digest();
    for name in ["all.jsonl", "all.csv.zst", "all.jsonl.gz"] {
        let path = cluster.folder().join(name).display().to_string();
        cluster.engram(&["export", &path]).exits_with(0);
        cluster.engram(&["export", &path]).fails_with(2, &["--force"]);
        cluster.engram(&["remove", "red", "green", "--id", "42"]).exits_with(0);
        assert_eq!(cluster.digest().1, 0);
        cluster.engram(&["insert", "--file", &path]).exits_with(0);
        assert_eq!(cluster.digest(), before, "{name}");
    }
    cluster.stop();
}

#[test]
fn recall_returns_the_same_order_as_a_reference_computation() {
    const DIMENSION: usize = 3;
    let spec = "  partitions: 8\n  features: { dimension: 3, dtype: F16 }\n";
    let cluster = Cluster::up(&cluster_manifest("alike", 3, spec));
    // Exact in f16; some vectors are parallel, one is zero, and weights differ.
    let vector = |id: usize| [(id % 7) as f32 - 3.0, (id % 5) as f32 - 2.0, (id % 3) as f32 * 0.5];
    let weight = |id: usize| [0.25, 0.5, 1.0, 0.0][id % 4];
    let row =
        |id: usize| json!({ "id": id, "weight": weight(id), "group": id % 2, "features": vector(id) }).to_string();
    let rows: String = (0..200).map(|id| row(id) + "\n").collect();
    cluster.engram_with(&["insert", "--file", "-"], &rows).exits_with(0);

    let dot = |a: [f32; DIMENSION], b: [f32; DIMENSION]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let reference = |query: [f32; DIMENSION], group: Option<usize>| {
        let score = |id: usize| {
            let norms = (dot(vector(id), vector(id)) * dot(query, query)).sqrt();
            if norms == 0.0 { 0.0 } else { dot(query, vector(id)) / norms * weight(id) }
        };
        let ids = (0..200).filter(|id| group.is_none_or(|group| id % 2 == group));
        let mut all: Vec<(f32, usize)> = ids.map(|id| (score(id), id)).collect();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        all
    };
    let check = |arguments: &[&str], query: [f32; DIMENSION], group: Option<usize>| {
        let found = cluster.engram(&[&["recall", "-o", "json"], arguments].concat()).exits_with(0).json();
        let found = found["items"].as_array().unwrap();
        assert!(!found.is_empty());
        let scores: Vec<f32> = found.iter().map(|item| item["score"].as_f64().unwrap() as f32).collect();
        assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
        for (item, (score, _)) in found.iter().zip(reference(query, group)) {
            let (id, actual) = (item["id"].as_u64().unwrap() as usize, item["score"].as_f64().unwrap() as f32);
            assert!((actual - score).abs() < 1e-6, "{actual} instead of {score}");
            assert_eq!(item["weight"].as_f64(), Some(f64::from(weight(id))), "{item}");
            assert!(group.is_none_or(|group| id % 2 == group), "{item}");
        }
    };
    check(&["--features", "1,-2,0.5"], [1.0, -2.0, 0.5], None);
    check(&["--features=-1,0,0", "-k", "60", "--group", "1"], [-1.0, 0.0, 0.0], Some(1));
    check(&["--id", "33", "-k", "200", "--read", "confirmed"], vector(33), None);

    // Updates of features are visible.
    cluster.engram(&["insert", "there", "--weight", "1", "--features", "1,-2,-0.5"]).exits_with(0);
    let first = cluster.engram(&["recall", "there", "-k", "1", "-o", "name"]).exits_with(0).stdout;
    assert_eq!(first, "there\n");
    cluster.engram(&["insert", "there", "--features", "0,0,0"]).exits_with(0);
    let first = cluster.engram(&["recall", "--features", "1,-2,-0.5", "-k", "1", "-o", "name"]).exits_with(0).stdout;
    assert_ne!(first, "there\n");

    cluster.engram(&["recall", "--features", "1,2"]).fails_with(2, &["query", "2 values", "dimension"]);
    cluster.engram(&["recall", "--features", "1,2,1e9"]).fails_with(2, &["query[2]", "65,504"]);
    cluster.engram(&["recall", "missing"]).fails_with(3, &["missing"]);
    cluster.engram(&["recall"]).fails_with(2, &["--features"]);
    cluster.engram(&["recall", "--id", "33", "-k", "5000"]).fails_with(2, &["1..=4096"]);
    cluster.stop();
}

#[test]
fn writes_are_applied_exactly_once_while_workers_are_killed() {
    let mut cluster =
        Cluster::up(&cluster_manifest("once", 3, "  partitions: 16\n  learning: { initialWeight: 0.0 }\n"));
    // Each memory is reinforced 512 times by 2^-10: a lost or duplicated update changes the weight.
    let round: String = (0..500).map(|id| format!("{{\"id\":{id},\"delta\":0.0009765625}}\n")).collect();
    let ids = (0..500).map(|id| format!("{{\"id\":{id}}}\n")).collect::<String>();
    cluster.engram_with(&["insert", "--file", "-"], &ids).exits_with(0);
    let file = cluster.file("rows.jsonl", round.repeat(512));
    let mut writing = cluster.spawn(&["reinforce", "--file", &file]);
    for ordinal in [0, 1, 2, 0] {
        if writing.try_wait().unwrap().is_some() {
            break;
        }
        let pid = engram_tests::wait_for("a worker to be running", engram_tests::DEADLINE, || cluster.worker(ordinal));
        cluster.kill(pid);
        cluster.wait_for_restart(ordinal, pid);
    }
    let status = engram_tests::wait_for("the writes to finish", engram_tests::DEADLINE, || writing.try_wait().unwrap());
    assert!(status.success(), "{status}\n{}", cluster.logs());
    let quality = cluster.engram(&["quality", "-o", "json"]).exits_with(0).json();
    assert_eq!((&quality["total"]["min"], &quality["total"]["max"]), (&json!(0.5), &json!(0.5)));
    assert_eq!(quality["total"]["count"], 500);
    cluster.stop();
}

#[test]
fn workers_and_partitions_are_listed_and_bench_runs() {
    let cluster = Cluster::up(&cluster_manifest("shown", 2, "  partitions: 8\n"));
    let rows: String = (0..1_000).map(|id| format!("{{\"id\":{id}}}\n")).collect();
    cluster.engram(&["bench"]).fails_with(3, &["no memories"]);
    cluster.engram_with(&["insert", "--file", "-"], &rows).exits_with(0);
    let workers = cluster.engram(&["list", "workers", "-o", "json"]).exits_with(0).json();
    let held = |worker: &serde_json::Value| worker["memories"].as_u64().unwrap();
    assert_eq!(workers["items"].as_array().unwrap().iter().map(held).sum::<u64>(), 1_000);
    let partitions = cluster.engram(&["list", "partitions", "-o", "json"]).exits_with(0).json();
    let partitions = partitions["items"].as_array().unwrap().clone();
    assert_eq!((partitions.len(), partitions.iter().map(held).sum::<u64>()), (8, 1_000));
    assert_eq!(cluster.engram(&["list", "workers", "-o", "name"]).exits_with(0).stdout, "worker-0\nworker-1\n");
    let worker = cluster.engram(&["describe", "worker", "worker-1", "-o", "json"]).exits_with(0).json();
    assert_eq!(worker["ordinal"], 1);
    cluster.engram(&["describe", "worker", "7"]).fails_with(3, &["worker-0, worker-1"]);

    let before = cluster.digest();
    let bench = cluster.engram(&["bench", "--seconds", "1", "--batch", "500", "-o", "json"]).exits_with(0).json();
    let items = bench["items"].as_array().unwrap();
    assert_eq!(items.len(), 4);
    assert!(
        items.iter().all(|item| item["rate"].as_f64() > Some(0.0) && item["calls"].as_u64() > Some(0)),
        "{items:?}"
    );
    assert_eq!(cluster.digest(), before, "bench changes no weight");
    cluster.stop();
}
