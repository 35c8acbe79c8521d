//! Items of the maximum size.

use engram_client::{BufferSpec, Column, DType, Field, Fields, Items, Sample, SampleBy};
use engram_memory::{MemoryId, mix64};
use engram_tests::{Cluster, DEADLINE, cluster_manifest, wait_for};

/// An item of almost 4 MiB, by its number.
fn large(number: usize) -> Vec<u8> {
    (0..(4 << 20) - 64 - number).map(|at| (mix64((at / 4_096) as u64 ^ number as u64) >> (at % 56)) as u8).collect()
}

fn blobs(blobs: &[Vec<u8>]) -> Items {
    let rows = Some(blobs.iter().map(|blob| blob.len() as u32).collect());
    let column = Column { rows, ..Column::new("blob", DType::UInt8, vec![], blobs.concat()) };
    Items { count: blobs.len(), columns: vec![column], ..Items::default() }
}

#[test]
fn items_of_4_mib_survive_a_killed_worker_and_re_replication() {
    let extra = "  replicationFactor: 2\n  partitions: 4\n  capacity:\n    memories: 1000\n    payloadCache: 8Mi\n";
    let mut cluster = Cluster::up(&cluster_manifest("large", 3, extra));
    let handles = cluster.client(async |client| {
        let field = Field { name: "blob".into(), dtype: DType::UInt8, shape: vec![], jagged: true };
        let buffer = client.create_buffer(&BufferSpec::new("blobs", vec![field], 1_000)).await.unwrap();
        let refused = buffer.append(blobs(&[vec![0; 4 << 20]])).await.unwrap_err().to_string();
        assert!(refused.contains("allowed: at most 4194304"), "{refused}");
        let mut handles = Vec::new();
        for first in (0..10).step_by(5) {
            let items: Vec<Vec<u8>> = (first..first + 5).map(large).collect();
            handles.extend(buffer.append(blobs(&items)).await.unwrap().handles);
        }
        handles
    });
    let pid = wait_for("the victim to be running", DEADLINE, || cluster.worker(1));
    cluster.kill(pid);
    cluster.wait_for_restart(1, pid);
    cluster.wait_until_ready();
    cluster.client(async |client| {
        let buffer = client.buffer("blobs").await.unwrap();
        let found = buffer.get(&handles, Fields::All).await.unwrap();
        let column = found.column("blob").unwrap();
        let mut rest = &column.data[..];
        for (number, rows) in column.rows.as_ref().unwrap().iter().enumerate() {
            let (blob, after) = rest.split_at(*rows as usize);
            assert!(blob == large(number), "item {number}");
            rest = after;
        }
        assert_eq!((found.len(), found.missing.len()), (10, 0));
        // Answers of several workers, in another order and with a handle that was never given out.
        let mut mixed: Vec<MemoryId> = handles.iter().rev().copied().collect();
        mixed.insert(4, MemoryId(u64::MAX - 1));
        let found = buffer.get(&mixed, Fields::All).await.unwrap();
        let rows = found.column("blob").unwrap().rows.clone().unwrap();
        let lengths: Vec<u32> = (0..10).rev().map(|number| large(number).len() as u32).collect();
        assert_eq!((rows, &found.missing[..]), (lengths, &mixed[4..5]));
        let names = buffer.list(None, 0).await.unwrap();
        assert_eq!(names.len(), 10);
        let sampled = buffer.sample(Sample::new(SampleBy::Uniform, 8, 1, 1)).await.unwrap();
        let bytes: usize = sampled.column("blob").unwrap().data.len();
        assert!(bytes > 8 * ((4 << 20) - 100), "{bytes}");
    });
    cluster.stop();
}
