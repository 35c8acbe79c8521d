//! Replay buffers on real processes: exact draws over partitions, clear refusals, and nothing lost or consumed twice under faults.
#![allow(clippy::unwrap_used, reason = "the helpers are tests, too")]

#[path = "runs/faults/cuts.rs"]
mod cuts;
#[path = "buffers/drained.rs"]
mod drained;
#[path = "buffers/faults.rs"]
mod faults;
#[path = "buffers/large.rs"]
mod large;
#[path = "buffers/local.rs"]
mod local;
#[path = "buffers/samplers.rs"]
mod samplers;

use engram_client::{
    Batch, Buffer, BufferSpec, Client, Column, DType, Field, Fields, Items, RateLimit, Remover, Sample, SampleBy,
};
use engram_kernels::priority::Draws;
use engram_memory::{MemoryId, mix64, partition_of};
use engram_proto::v1::ProblemKind;
use engram_replay::tiles::Priorities;
use engram_tests::{Cluster, DEADLINE, cluster_manifest};
use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// Partitions of the clusters here.
const PARTITIONS: u32 = 8;
const ITEMS: usize = 2_000;

fn cluster() -> Cluster {
    Cluster::up(&cluster_manifest(
        "replay",
        3,
        &format!("  replicationFactor: 2\n  partitions: {PARTITIONS}\n{DECLARED}"),
    ))
}

/// Buffers of the manifest.
const DECLARED: &str = "  buffers:
  - name: declared
    capacity: 300
    fields: [{ name: obs, dtype: float32, shape: [2] }, { name: tokens, dtype: uint16, jagged: true }]
    sampler: { kind: Prioritized, alpha: 0.6 }
    maxAge: 2
";

fn fields() -> Vec<Field> {
    vec![
        Field { name: "obs".into(), dtype: DType::Float32, shape: vec![2], jagged: false },
        Field { name: "tokens".into(), dtype: DType::UInt16, shape: vec![], jagged: true },
    ]
}

/// Items whose content is their number.
fn items(numbers: std::ops::Range<usize>, priority: impl Fn(usize) -> f64) -> Items {
    let obs: Vec<u8> =
        numbers.clone().flat_map(|it| [(it as f32).to_le_bytes(), 0.5_f32.to_le_bytes()].concat()).collect();
    let rows: Vec<u32> = numbers.clone().map(|it| (it % 3) as u32).collect();
    let tokens = vec![7; 2 * rows.iter().sum::<u32>() as usize];
    let tokens = Column { rows: Some(rows), ..Column::new("tokens", DType::UInt16, vec![], tokens) };
    Items {
        count: numbers.len(),
        columns: vec![Column::new("obs", DType::Float32, vec![2], obs), tokens],
        priorities: numbers.map(priority).collect(),
        ..Items::default()
    }
}

/// Numbers of the items of a batch, by their content.
fn numbers(batch: &Batch) -> Vec<usize> {
    let obs = &batch.column("obs").expect("it was selected").data;
    obs.chunks_exact(8).map(|row| f32::from_le_bytes(row[..4].try_into().unwrap()) as usize).collect()
}

fn prioritized(count: u32, step: u64) -> Sample {
    Sample::new(SampleBy::Prioritized { alpha: 0.6, beta: 0.4 }, count, 42, step)
}

/// The draws of one buffer in one piece: items by partition, then by age.
async fn unsharded(buffer: &Buffer, count: u32, step: u64) -> Vec<MemoryId> {
    let listed = buffer.list(None, 0).await.unwrap();
    let mut order: Vec<usize> = (0..listed.len()).collect();
    order.sort_by_key(|row| (partition_of(listed.handles[*row], PARTITIONS), mix64(listed.handles[*row].0)));
    let table = engram_kernels::priority::Priorities::new(39_322);
    let weight = |row: &usize| buffer.spec().weight_units(listed.priorities[*row]).unwrap();
    let priorities = Priorities::new(order.iter().map(|row| table.of(weight(row))).collect());
    let draws = Draws { seed: 42, step, stream: 0, count, total: priorities.total() };
    let handle = |draw| listed.handles[order[priorities.find(draws.threshold(draw)).unwrap()]];
    (0..count).map(handle).collect()
}

#[test]
fn sharded_buffer_draws_what_one_buffer_would() {
    let cluster = cluster();
    cluster.client(async |client| {
        let spec = BufferSpec::new("train", fields(), 10_000);
        let buffer = client.create_buffer(&spec).await.unwrap();
        let appended = buffer.append(items(0..ITEMS, |it| if it == 77 { 900.0 } else { 0.25 + (it % 4) as f64 })).await;
        let handles = appended.unwrap().handles;
        assert_eq!(handles.iter().collect::<BTreeSet<_>>().len(), ITEMS);
        let stats = buffer.stats().await.unwrap();
        assert_eq!((stats.items, stats.appended, stats.deleted), (ITEMS as u64, ITEMS as u64, 0));

        // Contents, and the fields that were asked for.
        let found = buffer.get(&[handles[5], MemoryId(9), handles[1]], Fields::named(["obs"])).await.unwrap();
        assert_eq!((numbers(&found), &found.missing[..]), (vec![5, 1], &[MemoryId(9)][..]));
        assert_eq!(found.columns.len(), 1);
        let all = buffer.get(&handles[..5], Fields::All).await.unwrap();
        assert_eq!(all.column("tokens").unwrap().rows, Some(vec![0, 1, 2, 0, 1]));

        // The same draws as without partitions, and in the expected numbers.
        let mut hits = [0_u32; 5];
        for step in 0..20 {
            let batch = buffer.sample(prioritized(256, step)).await.unwrap();
            assert_eq!(batch.handles, unsharded(&buffer, 256, step).await, "step {step}");
            assert!(batch.weights.iter().all(|weight| *weight > 0.0 && *weight <= 1.0));
            numbers(&batch).iter().for_each(|number| hits[if *number == 77 { 4 } else { number % 4 }] += 1);
        }
        let power = |priority: f64, items: f64| items * priority.powf(0.6);
        let mut expected =
            [power(0.25, 500.0), power(1.25, 499.0), power(2.25, 500.0), power(3.25, 500.0), power(900.0, 1.0)];
        let total: f64 = expected.iter().sum();
        expected.iter_mut().for_each(|share| *share *= 20.0 * 256.0 / total);
        for (hits, expected) in hits.iter().zip(expected) {
            assert!(
                (f64::from(*hits) - expected).abs() < 5.0 * expected.sqrt().max(4.0),
                "{hits:?}, expected {expected}"
            );
        }
        // Two members draw every other item of one plan.
        let member = |rank| Sample { rank, world: 2, ..prioritized(128, 3) };
        let whole = buffer.sample(prioritized(256, 3)).await.unwrap().handles;
        for rank in 0..2 {
            let mine = buffer.sample(member(rank)).await.unwrap().handles;
            assert_eq!(mine, whole.iter().skip(rank as usize).step_by(2).copied().collect::<Vec<_>>());
        }

        local::samples(&buffer, &handles, expected[3] / (20.0 * 256.0)).await;

        // Order of age, over partitions.
        let fifo = buffer.sample(Sample::new(SampleBy::Fifo, 40, 0, 0)).await.unwrap();
        assert_eq!(numbers(&fifo), (0..40).collect::<Vec<_>>());
        let lifo = buffer.sample(Sample::new(SampleBy::Lifo, 3, 0, 0)).await.unwrap();
        assert_eq!(numbers(&lifo), [1_999, 1_998, 1_997]);

        // Priorities decide at once; stale handles are counted and change nothing.
        buffer.update_priorities(&handles[..200], &vec![0.0; 200]).await.unwrap();
        assert_eq!(buffer.delete(&handles[..10]).await.unwrap().applied, 10);
        let changed = buffer.update_priorities(&handles[..20], &[1.0; 20]).await.unwrap();
        assert_eq!((changed.applied, changed.stale), (10, 10));
        let later = buffer.append(items(5_000..5_010, |_| 1.0)).await.unwrap().handles;
        assert!(later.iter().all(|handle| !handles.contains(handle)), "a handle was used again");
        assert_eq!(buffer.stats().await.unwrap().items, ITEMS as u64);
        refusals(&client, &buffer).await;
        assert_eq!(buffer.stats().await.unwrap().items, ITEMS as u64, "a refused call changed something");
        Box::pin(limits(&client)).await;
        small(&client).await;
        pages(&buffer).await;
        Box::pin(cancelled(&cluster, &client)).await;
        declared(&cluster, &client).await;
        files(&cluster, &client, &buffer).await;
        assert_eq!(client.drop_buffer("train").await.unwrap(), ITEMS as u64);
        assert_eq!(client.buffer("train").await.unwrap_err().kind(), ProblemKind::BufferUnknown);
    });
    cluster.stop();
}

/// Invalid input names the field, the value and what is allowed, and changes nothing.
async fn refusals(client: &Client, buffer: &Buffer) {
    let wrong = |change: &dyn Fn(&mut Items)| {
        let mut items = items(0..2, |_| 1.0);
        change(&mut items);
        async { buffer.append(items).await.unwrap_err().to_string() }
    };
    let dtype = wrong(&|items| items.columns[0].dtype = DType::Float64).await;
    assert!(dtype.contains("field obs: float64[2] is not allowed; allowed: float32[2]"), "{dtype}");
    let shape = wrong(&|items| items.columns[0].shape = vec![1]).await;
    assert!(shape.contains("field obs: float32[1] is not allowed; allowed: float32[2]"), "{shape}");
    let unknown = wrong(&|items| items.columns[0].name = "observation".into()).await;
    assert!(unknown.contains("field \"observation\" does not exist; the buffer has: obs, tokens"), "{unknown}");
    let priority = wrong(&|items| items.priorities[1] = f64::NAN).await;
    assert!(priority.contains("priorities[1]: NaN is not allowed"), "{priority}");
    let large = wrong(&|items| {
        let tokens = vec![0; 4_400_000];
        items.columns[1] =
            Column { rows: Some(vec![2_200_000, 0]), ..Column::new("tokens", DType::UInt16, vec![], tokens) };
    });
    let large = large.await;
    assert!(large.contains("bytes are not allowed; allowed: at most 4194304"), "{large}");
    let field = buffer.sample(Sample { fields: Fields::named(["x"]), ..prioritized(1, 0) }).await.unwrap_err();
    assert!(field.to_string().contains("field \"x\" does not exist"), "{field}");
    let other = BufferSpec { fields: fields()[..1].to_vec(), ..buffer.spec().clone() };
    let other = client.create_buffer(&other).await.unwrap_err().to_string();
    assert!(other.contains("field tokens: the buffer has tokens uint16[*], the request declares no field"), "{other}");
    let limiter = RateLimit { samples_per_insert: 4.0, min_size: 10, min_diff: 39.0, max_diff: 41.0 };
    let limiter = BufferSpec { limiter: Some(limiter), ..BufferSpec::new("x", fields(), 10) };
    let limiter = client.create_buffer(&limiter).await.unwrap_err().to_string();
    assert!(limiter.contains("inserts and samples block each other"), "{limiter}");
}

/// Capacity, uses, age and the rate limiter.
async fn limits(client: &Client) {
    let full = BufferSpec { remover: Remover::Refuse, ..BufferSpec::new("full", fields(), 20) };
    let full = client.create_buffer(&full).await.unwrap();
    for start in [0, 7, 14] {
        full.append(items(start..start + 6, |_| 1.0)).await.unwrap();
    }
    let refused = full.append(items(0..3, |_| 1.0)).await.unwrap_err();
    let text = "buffer full is full: 18 items of capacity 20, 3 more are not allowed; allowed: 2 (remover: Refuse)";
    assert_eq!((refused.kind(), refused.to_string().as_str()), (ProblemKind::BufferFull, text));
    full.append(items(0..2, |_| 1.0)).await.unwrap();
    assert_eq!(full.stats().await.unwrap().items, 20);

    let oldest =
        client.create_buffer(&BufferSpec { max_age: Some(1), ..BufferSpec::new("fifo", fields(), 16) }).await.unwrap();
    for start in (0..48).step_by(8) {
        let versions = vec![start as u64 / 8; 8];
        oldest.append(Items { versions, ..items(start..start + 8, |_| 1.0) }).await.unwrap();
    }
    let stats = oldest.stats().await.unwrap();
    assert_eq!((stats.appended, stats.items, stats.deleted), (48, 16, 32));
    let kept = oldest.sample(Sample { version: 5, ..Sample::new(SampleBy::Fifo, 16, 0, 0) }).await.unwrap();
    assert_eq!(numbers(&kept), (32..48).collect::<Vec<_>>(), "another item than the oldest was removed");
    let uniform = |version| Sample { version, ..Sample::new(SampleBy::Uniform, 64, 1, version) };
    let fresh = oldest.sample(uniform(5)).await.unwrap();
    assert!(fresh.versions.iter().all(|version| *version >= 4));
    let none = oldest.sample(uniform(9)).await.unwrap_err();
    assert!(none.kind() == ProblemKind::BufferWait && none.to_string().contains("waiting for items"), "{none}");

    // Each item is in two batches at most, and the limiter holds both sides in a ratio.
    let limiter = RateLimit { samples_per_insert: 2.0, min_size: 4, min_diff: 4.0, max_diff: 12.0 };
    let spec = BufferSpec { max_reuse: 2, limiter: Some(limiter), ..BufferSpec::new("limited", fields(), 100) };
    let limited = client.create_buffer(&spec).await.unwrap();
    let early = limited.sample(Sample::new(SampleBy::Fifo, 1, 0, 0)).await.unwrap_err();
    assert!(early.to_string().contains("waiting for inserts: 0 of 4 items"), "{early}");
    limited.append(items(0..6, |_| 1.0)).await.unwrap();
    let ahead = limited.append(items(6..7, |_| 1.0)).await.unwrap_err();
    assert_eq!(ahead.kind(), ProblemKind::BufferWait);
    assert!(ahead.to_string().contains("waiting for samples: 14 would be above max_diff 12"), "{ahead}");
    assert!(limited.stats().await.unwrap().append_waits.unwrap().contains("waiting for samples"));
    for _ in 0..2 {
        let batch = limited.sample(Sample::new(SampleBy::Fifo, 2, 0, 0)).await.unwrap();
        assert_eq!(numbers(&batch), [0, 1]);
    }
    assert_eq!(limited.stats().await.unwrap().items, 4, "two items were used up");
    // A waiting append goes on as soon as samples allow it.
    let (appended, sampled) =
        tokio::join!(limited.append(Items { wait: Duration::from_secs(20), ..items(6..9, |_| 1.0) }), async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            limited.sample(Sample::new(SampleBy::Fifo, 2, 0, 0)).await
        });
    assert_eq!((appended.unwrap().handles.len(), numbers(&sampled.unwrap())), (3, vec![2, 3]));
}

/// A small buffer holds as many items as its capacity says, also of one trajectory, and removes the oldest.
async fn small(client: &Client) {
    let buffer = client.create_buffer(&BufferSpec::new("small", fields(), 300)).await.unwrap();
    assert_eq!(buffer.partitions().len(), 1);
    for start in (0..300).step_by(50) {
        let trajectories = vec![7; 50];
        let appended = buffer.append(Items { trajectories, ..items(start..start + 50, |_| 1.0) }).await.unwrap();
        assert_eq!(appended.removed, 0, "an item was removed while there was room");
    }
    let appended = buffer.append(items(300..320, |_| 1.0)).await.unwrap();
    assert_eq!((appended.removed, buffer.stats().await.unwrap().items), (20, 300));
    let kept = buffer.sample(Sample::new(SampleBy::Fifo, 300, 0, 0)).await.unwrap();
    assert_eq!(numbers(&kept), (20..320).collect::<Vec<_>>());
}

/// Pages of any size add up to all items in order, with a tag, too.
async fn pages(buffer: &Buffer) {
    let tags = |numbers: std::ops::Range<usize>| {
        numbers.map(|it| if it % 10 == 0 { "tenth".into() } else { "".into() }).collect()
    };
    let tagged = buffer.append(Items { tags: tags(0..50), ..items(9_000..9_050, |_| 1.0) }).await.unwrap().handles;
    let all = buffer.list(None, 0).await.unwrap().handles;
    let (mut paged, mut after) = (Vec::new(), None);
    loop {
        let (page, more) = buffer.page(None, after, 777).await.unwrap();
        assert!(page.len() <= 777);
        paged.extend(page.handles);
        after = more;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(paged, all);
    assert_eq!(
        buffer.list(Some(b"tenth"), 0).await.unwrap().handles,
        tagged.iter().step_by(10).copied().collect::<Vec<_>>()
    );
    let (first, more) = buffer.page(Some(b"tenth"), None, 2).await.unwrap();
    let (rest, _) = buffer.page(Some(b"tenth"), more, 0).await.unwrap();
    assert_eq!([first.handles, rest.handles].concat(), tagged.iter().step_by(10).copied().collect::<Vec<_>>());
    buffer.delete(&tagged).await.unwrap();
}

/// Sum of the calls that wait for `reason`, over all workers, by their metrics.
fn waiting(cluster: &Cluster, buffer: &str, reason: &str) -> i64 {
    let endpoints = cluster.endpoints().unwrap();
    let workers = endpoints["workers"].as_array().unwrap();
    let labels = format!("buffer=\"{buffer}\",reason=\"{reason}\"}} ");
    // The labels of the worker come first.
    let of_line =
        |line: &str| line.strip_prefix("engram_buffer_waiting{")?.split_once(&labels)?.1.trim().parse::<i64>().ok();
    let value = |worker: &serde_json::Value| {
        let mut stream = TcpStream::connect(worker["http"].as_str().unwrap()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut page = String::new();
        stream.read_to_string(&mut page).unwrap();
        page.lines().find_map(of_line).unwrap_or(0)
    };
    workers.iter().map(value).sum()
}

/// A call that waits shows why in the metrics; one that is cancelled is gone at once, and takes no item along.
async fn cancelled(cluster: &Cluster, client: &Client) {
    let buffer = client.create_buffer(&BufferSpec::new("empty", fields(), 10)).await.unwrap();
    let sample = || buffer.sample(Sample { wait: Duration::from_secs(120), ..Sample::new(SampleBy::Fifo, 2, 0, 0) });
    let until = async |wanted: i64| {
        let deadline = std::time::Instant::now() + DEADLINE;
        while waiting(cluster, "empty", "items") != wanted {
            assert!(std::time::Instant::now() < deadline, "not {wanted} calls wait");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::select! {
        early = sample() => panic!("a sample of an empty buffer: {early:?}"),
        () = until(1) => {}
    }
    until(0).await;
    // The next call gets what the cancelled one waited for.
    let (batch, appended) = tokio::join!(sample(), async {
        until(1).await;
        buffer.append(items(0..2, |_| 1.0)).await
    });
    assert_eq!(numbers(&batch.unwrap()), [0, 1]);
    let consumed = buffer.consume("a", 9, Duration::from_secs(60), Duration::ZERO, Fields::None).await.unwrap();
    assert_eq!(consumed.handles, appended.unwrap().handles);
    until(0).await;
}

/// Buffers of the manifest exist, with its settings, and again after they were dropped.
async fn declared(cluster: &Cluster, client: &Client) {
    let exists = async || {
        let deadline = std::time::Instant::now() + DEADLINE;
        loop {
            match client.buffer("declared").await {
                Ok(buffer) => return buffer,
                Err(error) => assert_eq!(error.kind(), ProblemKind::BufferUnknown, "{error}"),
            }
            assert!(std::time::Instant::now() < deadline, "the declared buffer was not created");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let buffer = exists().await;
    let spec = BufferSpec {
        sampler: Some(SampleBy::Prioritized { alpha: 0.6, beta: 0.4 }),
        max_age: Some(2),
        ..BufferSpec::new("declared", fields(), 300)
    };
    assert_eq!(buffer.spec(), &spec);
    buffer.append(items(0..8, |_| 1.0)).await.unwrap();
    let batch = buffer.sample(Sample::new(SampleBy::Default, 4, 1, 1)).await.unwrap();
    assert_eq!(batch.weights.len(), 4, "the sampler of the buffer draws with importance weights");
    let without = client.buffer("small").await.unwrap();
    let refused = without.sample(Sample::new(SampleBy::Default, 4, 1, 1)).await.unwrap_err().to_string();
    assert!(refused.contains("sampler: absent is not allowed"), "{refused}");
    let other = BufferSpec { capacity: 5, ..spec };
    let other = client.create_buffer(&other).await.unwrap_err().to_string();
    assert!(other.contains("capacity: the buffer has 300, the request declares 5"), "{other}");
    assert_eq!(client.declared_buffers().await.unwrap().1, []);
    let status = cluster.engram(&["status"]);
    assert!(status.stdout.lines().any(|line| line.contains("declared") && line.contains("300")), "{}", status.stdout);
    client.drop_buffer("declared").await.unwrap();
    assert_eq!(exists().await.stats().await.unwrap().items, 0);
}

/// Items survive an export and an import in each format, and a sample is a file.
async fn files(cluster: &Cluster, client: &Client, buffer: &Buffer) {
    let whole = buffer.list(None, 0).await.unwrap();
    let expected = buffer.get(&whole.handles, Fields::All).await.unwrap();
    for format in ["npz", "parquet"] {
        let path = cluster.folder().join(format!("items.{format}")).display().to_string();
        let name = format!("copy-{format}");
        for arguments in
            [&["buffer", "export", "train", &path][..], &["buffer", "import", &name, &path, "--capacity", "9000"]]
        {
            let done = cluster.engram(arguments);
            assert_eq!(done.code, Some(0), "{arguments:?}: {}", done.stderr);
        }
        let copy = client.buffer(&name).await.unwrap();
        let handles = copy.list(None, 0).await.unwrap().handles;
        let found = copy.get(&handles, Fields::All).await.unwrap();
        assert_eq!(
            (found.columns, found.priorities),
            (expected.columns.clone(), expected.priorities.clone()),
            "{format}"
        );
    }
    let listed = cluster.engram(&["buffer", "list", "-o", "name"]).exits_with(0).stdout;
    assert!(["train", "copy-npz", "copy-parquet"].iter().all(|name| listed.contains(name)), "{listed}");
    let described = cluster.engram(&["buffer", "describe", "copy-npz"]).exits_with(0).stdout;
    assert!(
        ["obs", "float32[2]", "tokens", "uint16[*]", "9,000"].iter().all(|it| described.contains(it)),
        "{described}"
    );
    cluster.engram(&["buffer", "delete", "copy-npz"]).exits_with(0);
    assert_eq!(client.buffer("copy-npz").await.unwrap_err().kind(), ProblemKind::BufferUnknown);
    let path = cluster.folder().join("batch.npz").display().to_string();
    let sampled = cluster.engram(&["buffer", "sample", "train", "--count", "16", "--alpha", "0.6", "--to", &path]);
    assert_eq!(sampled.code, Some(0), "{}", sampled.stderr);
    assert!(std::fs::read(&path).unwrap().windows(11).any(|name| name == b"_weight.npy"));
}
