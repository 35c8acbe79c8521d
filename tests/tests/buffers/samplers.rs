//! Samples that several partitions serve: each counted item is delivered, and both sides of a rate limiter go on.

use engram_client::{
    Batch, Buffer, BufferSpec, Client, Column, DType, Error, Field, Fields, Items, RateLimit, Sample, SampleBy,
};
use engram_memory::MemoryId;
use engram_proto::v1::ProblemKind;
use engram_tests::{Cluster, DEADLINE, cluster_manifest};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest wait of a call that must go on.
const WAIT: Duration = Duration::from_secs(20);
/// Cursor 1 to 3: a limiter that is soon closed.
const NARROW: RateLimit = RateLimit { samples_per_insert: 1.0, min_size: 1, min_diff: -1.0, max_diff: 3.0 };

const DECLARED: &str = "  buffers:
  - name: slices
    capacity: 10000
    fields: [{ name: x, dtype: float32 }]
    sampler: { kind: Slices, length: 4 }
  - name: groups
    capacity: 10000
    fields: [{ name: x, dtype: float32 }]
    sampler: { kind: Groups, length: 3 }
";

fn field(name: &str) -> Field {
    Field { name: name.into(), dtype: DType::Float32, shape: vec![], jagged: false }
}

/// Items whose field is their number.
fn items(name: &str, numbers: std::ops::Range<u32>) -> Items {
    let data: Vec<u8> = numbers.clone().flat_map(|number| (number as f32).to_le_bytes()).collect();
    let columns = vec![Column::new(name, DType::Float32, vec![], data)];
    Items { count: numbers.len(), columns, wait: WAIT, ..Items::default() }
}

fn numbers(batch: &Batch) -> Vec<u32> {
    let data = &batch.column("x").expect("it was selected").data;
    data.chunks_exact(4).map(|number| f32::from_le_bytes(number.try_into().unwrap()) as u32).collect()
}

fn fifo(count: u32, wait: Duration) -> Sample {
    Sample { wait, ..Sample::new(SampleBy::Fifo, count, 0, 0) }
}

#[test]
fn samplers_of_several_partitions_deliver_what_they_count() {
    let extra = format!("  replicationFactor: 2\n  partitions: 8\n{DECLARED}");
    let cluster = Cluster::up(&cluster_manifest("samplers", 3, &extra));
    cluster.client(async |client| {
        Box::pin(slices(&client)).await;
        Box::pin(groups(&client)).await;
        Box::pin(each_item_once(&client)).await;
        Box::pin(limited(&client)).await;
        Box::pin(large_batch(&client)).await;
        Box::pin(created_again(&client)).await;
    });
    cluster.stop();
}

async fn declared(client: &Client, name: &str) -> Buffer {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match client.buffer(name).await {
            Ok(buffer) => return buffer,
            Err(error) => assert_eq!(error.kind(), ProblemKind::BufferUnknown, "{error}"),
        }
        assert!(Instant::now() < deadline, "buffer {name} of the manifest was not created");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The sampler of the manifest draws slices of consecutive items of one trajectory.
async fn slices(client: &Client) {
    let buffer = declared(client, "slices").await;
    // Trajectories of 30 items, item by item in turn, and one that is too short.
    for start in (0..180).step_by(60) {
        let trajectories = (start..start + 60).map(|number| 1 + u64::from(number % 6)).collect();
        buffer.append(Items { trajectories, ..items("x", start..start + 60) }).await.unwrap();
    }
    buffer.append(Items { trajectories: vec![9; 3], ..items("x", 180..183) }).await.unwrap();
    let mut drawn = BTreeSet::new();
    for step in 0..10 {
        let sample = |rank, world, count| Sample { rank, world, ..Sample::new(SampleBy::Default, count, 5, step) };
        let whole = buffer.sample(sample(0, 1, 8)).await.unwrap();
        let found = numbers(&whole);
        assert_eq!(found.len(), 32);
        for slice in found.chunks_exact(4) {
            assert!(slice.windows(2).all(|pair| pair[1] == pair[0] + 6) && slice[3] < 180, "{slice:?}");
            drawn.insert(slice[0]);
        }
        // Members get every other slice of one plan.
        for rank in 0..2 {
            let own: Vec<u32> = found.chunks_exact(4).skip(rank as usize).step_by(2).flatten().copied().collect();
            assert_eq!(numbers(&buffer.sample(sample(rank, 2, 4)).await.unwrap()), own);
        }
    }
    assert!(drawn.len() > 40, "{} different slices of 162 in 80 draws", drawn.len());
}

/// The sampler of the manifest returns complete groups.
async fn groups(client: &Client) {
    let buffer = declared(client, "groups").await;
    // Prompts 1 to 5; the third has two answers, the others three.
    let prompts = [5_u64, 3, 1, 2, 5, 4, 1, 5, 2, 3, 4, 1, 2, 4];
    buffer.append(Items { trajectories: prompts.to_vec(), ..items("x", 0..14) }).await.unwrap();
    let answers = |prompt: u64| match prompt {
        1 => [2, 6, 11],
        2 => [3, 8, 12],
        3 => [1, 9, 14],
        4 => [5, 10, 13],
        _ => [0, 4, 7],
    };
    let prompts_of = |batch: &Batch| -> BTreeSet<u64> {
        for (found, prompts) in numbers(batch).chunks_exact(3).zip(batch.trajectories.chunks_exact(3)) {
            assert_eq!(found, answers(prompts[0]));
            assert_eq!(prompts, [prompts[0]; 3]);
        }
        batch.trajectories.iter().copied().collect()
    };
    let sample = async |count| buffer.sample(Sample::new(SampleBy::Default, count, 0, 0)).await;
    assert_eq!(prompts_of(&sample(4).await.unwrap()), BTreeSet::from([1, 2, 4, 5]));
    let few = sample(5).await.unwrap_err().to_string();
    assert!(few.contains("waiting for items: 4 of 5 complete groups"), "{few}");
    buffer.append(Items { trajectories: vec![3], ..items("x", 14..15) }).await.unwrap();
    assert_eq!(prompts_of(&sample(5).await.unwrap()), BTreeSet::from([1, 2, 3, 4, 5]));
}

/// Learners that draw at the same time share the items: each one is delivered once, or is still there.
async fn each_item_once(client: &Client) {
    const ITEMS: u32 = 2_000;
    let spec = BufferSpec { max_reuse: 1, ..BufferSpec::new("once", vec![field("x")], 10_000) };
    let buffer = client.create_buffer(&spec).await.unwrap();
    assert!(buffer.partitions().len() > 3);
    buffer.append(items("x", 0..ITEMS)).await.unwrap();
    let draw = async || {
        let mut drawn = Vec::new();
        loop {
            match buffer.sample(fifo(16, Duration::ZERO)).await {
                Ok(batch) => drawn.extend(numbers(&batch)),
                Err(error) if error.kind() == ProblemKind::BufferWait => return drawn,
                Err(error) => panic!("{error}"),
            }
        }
    };
    let (a, b, c, d) = tokio::join!(draw(), draw(), draw(), draw());
    let drawn = [a, b, c, d].concat();
    let left = buffer.stats().await.unwrap().items;
    assert_eq!(drawn.iter().collect::<BTreeSet<_>>().len(), drawn.len(), "an item was delivered twice");
    assert!(left < 16, "{left} items are left");
    assert_eq!(drawn.len() as u64 + left, u64::from(ITEMS), "items were counted and not delivered");
}

/// A sample that lacks items lets appends exceed the upper bound.
async fn limited(client: &Client) {
    let spec = BufferSpec { limiter: Some(NARROW), ..BufferSpec::new("narrow", vec![field("x")], 10_000) };
    let buffer = client.create_buffer(&spec).await.unwrap();
    let append = async {
        for number in 0..34 {
            buffer.append(items("x", number..number + 1)).await?;
        }
        Ok::<_, Error>(())
    };
    let (batch, appended) = tokio::join!(buffer.sample(fifo(32, WAIT)), append);
    assert_eq!(numbers(&batch.unwrap()), (0..32).collect::<Vec<_>>());
    appended.unwrap();
    let stats = buffer.stats().await.unwrap();
    assert_eq!((stats.appended, stats.sampled), (34, 32));
    // The bound holds again.
    buffer.append(items("x", 34..35)).await.unwrap();
    let refused = buffer.append(Items { wait: Duration::ZERO, ..items("x", 35..36) }).await.unwrap_err();
    assert_eq!(refused.kind(), ProblemKind::BufferWait, "{refused}");

    let spec = BufferSpec { name: "old".into(), max_age: Some(0), ..spec };
    let buffer = client.create_buffer(&spec).await.unwrap();
    buffer.append(items("x", 0..3)).await.unwrap();
    let refused = buffer.append(Items { wait: Duration::ZERO, ..items("x", 3..4) }).await.unwrap_err();
    assert_eq!(refused.kind(), ProblemKind::BufferWait, "{refused}");
    let fresh = Sample { version: 5, wait: WAIT, ..Sample::new(SampleBy::Uniform, 2, 0, 0) };
    let append = buffer.append(Items { versions: vec![5], ..items("x", 3..4) });
    let (batch, appended) = tokio::join!(buffer.sample(fresh), append);
    appended.unwrap();
    assert_eq!(numbers(&batch.unwrap()), [3, 3]);
}

/// A batch of several messages is admitted once, or not at all.
async fn large_batch(client: &Client) {
    const BYTES: u32 = 128 << 10;
    let fields = vec![Field { shape: vec![BYTES / 4], ..field("x") }];
    let spec = BufferSpec { limiter: Some(NARROW), ..BufferSpec::new("large", fields, 10_000) };
    let buffer = client.create_buffer(&spec).await.unwrap();
    let batch = || Items {
        count: 32,
        columns: vec![Column::new("x", DType::Float32, vec![BYTES / 4], vec![0; 32 * BYTES as usize])],
        ..Items::default()
    };
    let handles = buffer.append(batch()).await.unwrap().handles;
    assert_eq!(handles.iter().collect::<BTreeSet<&MemoryId>>().len(), 32);
    let refused = buffer.append(batch()).await.unwrap_err();
    assert!(matches!(&refused, Error::Rejected(_)) && refused.kind() == ProblemKind::BufferWait, "{refused}");
    assert_eq!(buffer.stats().await.unwrap().items, 32, "a refused batch was stored");
}

/// A buffer that is deleted while it is read, and created with other fields, is read with these.
async fn created_again(client: &Client) {
    for round in 0..4 {
        let name = ["x", "y"][round % 2];
        let fields = (0..=round).map(|number| field(&format!("{name}{number}"))).collect();
        let buffer = client.create_buffer(&BufferSpec::new("again", fields, 10_000)).await.unwrap();
        let columns = (0..=round).map(|number| items(&format!("{name}{number}"), 0..200).columns.swap_remove(0));
        let appended = buffer.append(Items { columns: columns.collect(), ..items("", 0..200) }).await.unwrap();
        let sample = || buffer.sample(Sample::new(SampleBy::Uniform, 16, 1, 1));
        // Any worker serves a call.
        for _ in 0..12 {
            let batch = sample().await.unwrap();
            assert_eq!((batch.len(), batch.columns.len()), (16, round + 1), "round {round}");
            let found = buffer.get(&appended.handles[..20], Fields::All).await.unwrap();
            assert_eq!((found.len(), found.columns.len()), (20, round + 1), "round {round}");
        }
        let dropped = AtomicBool::new(false);
        let read = async {
            while !dropped.load(Ordering::Relaxed) {
                let _ = sample().await;
            }
        };
        let (_, _, _, items) = tokio::join!(read, sample(), sample(), async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let items = client.drop_buffer("again").await;
            dropped.store(true, Ordering::Relaxed);
            items
        });
        assert_eq!(items.unwrap(), 200);
    }
}
