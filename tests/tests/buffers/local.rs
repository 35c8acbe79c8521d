//! Local samples: each member draws from its own partitions.

use super::{PARTITIONS, numbers, prioritized};
use engram_client::{Buffer, Fields, Sample, SampleBy};
use engram_memory::{MemoryId, partition_of};
use std::collections::BTreeMap;

/// Members that draw numbers of their own from their own partitions: scaled sums are unbiased, whatever the numbers. `share` is the probability
/// of an item whose number is 3 modulo 4.
pub(super) async fn samples(buffer: &Buffer, handles: &[MemoryId], share: f64) {
    let (mut owners, mut estimate, mut own_shares) = (BTreeMap::new(), 0.0, [0.0; 2]);
    for step in 0..20 {
        for (rank, count) in [(0, 200), (1, 56)] {
            let sample = Sample { rank, world: 2, local: true, ..prioritized(count, step) };
            let batch = buffer.sample(sample.clone()).await.unwrap();
            assert_eq!(batch, buffer.sample(sample).await.unwrap());
            assert_eq!((batch.len(), batch.weights.len()), (count as usize, count as usize));
            for handle in &batch.handles {
                assert_eq!(*owners.entry(partition_of(*handle, PARTITIONS)).or_insert(rank), rank);
            }
            let scale = batch.scale.unwrap();
            own_shares[rank as usize] = scale * f64::from(count);
            estimate += scale * numbers(&batch).iter().filter(|number| **number % 4 == 3).count() as f64 / 20.0;
        }
    }
    assert_eq!(owners.len(), PARTITIONS as usize);
    assert!((own_shares[0] + own_shares[1] - 1.0).abs() < 1e-12, "{own_shares:?}");
    // More than five standard deviations of 20 * 56 draws that are scaled the most.
    assert!((estimate - share).abs() < 0.05, "{estimate}, expected {share}");
    // A sample of all members has no scale.
    assert_eq!(buffer.sample(prioritized(8, 0)).await.unwrap().scale, None);
    let refused = async |change: Sample| buffer.sample(change).await.unwrap_err().to_string();
    let request = Sample { local: true, ..prioritized(8, 0) };
    let text = refused(Sample { by: SampleBy::Uniform, ..request.clone() }).await;
    assert!(
        text.contains("local: true is not allowed with this sampler; allowed: with a prioritized sampler"),
        "{text}"
    );
    let text = refused(Sample { world: PARTITIONS + 1, ..request.clone() }).await;
    let allowed = format!("world: {} is not allowed with local; allowed: at most {PARTITIONS}", PARTITIONS + 1);
    assert!(text.contains(&allowed), "{text}");
    // Items of one partition only: the other member waits for some.
    let others: Vec<MemoryId> =
        handles.iter().copied().filter(|it| owners[&partition_of(*it, PARTITIONS)] == 1).collect();
    let before = buffer.get(&others, Fields::None).await.unwrap().priorities;
    buffer.update_priorities(&others, &vec![0.0; others.len()]).await.unwrap();
    let text = refused(Sample { rank: 1, world: 2, ..request.clone() }).await;
    assert!(text.contains("waiting for items: the partitions of rank 1 have none"), "{text}");
    assert!((buffer.sample(Sample { world: 2, ..request }).await.unwrap().scale.unwrap() * 8.0 - 1.0).abs() < 1e-12);
    buffer.update_priorities(&others, &before).await.unwrap();
}
