use super::*;
use crate::source::{self, Event, ExampleName, Limits, Signal, SourceOptions};
use engram_memory::partition_of;
use proptest::prelude::*;
use std::cmp::Ordering;

fn epoch(number: u64, ids: &[u64]) -> Epoch {
    let event = |&id: &u64| Event { id: MemoryId(id), key: None, signal: Signal::Quality(0.9) };
    Epoch { number, label: None, content: Content::Events(ids.iter().map(event).collect()) }
}

/// Naive reference: sorts everything before every epoch.
fn slowly(epochs: &[Vec<u64>], top_k: &[u32], skip: usize) -> Vec<Hits> {
    let mut touches: HashMap<u64, (u64, u64)> = HashMap::new();
    let mut hits = Vec::new();
    for (number, ids) in epochs.iter().enumerate() {
        let top = |k: u32, better: fn((u64, u64), (u64, u64)) -> Ordering| {
            let mut rank: Vec<(u64, (u64, u64))> = touches.iter().map(|(&id, &score)| (id, score)).collect();
            rank.sort_by(|a, b| better(b.1, a.1).then(a.0.cmp(&b.0)));
            rank.iter().take(k as usize).filter(|(id, _)| ids.contains(id)).count() as u64
        };
        if number >= skip && !ids.is_empty() {
            for &k in top_k {
                let (frequent, recent) = (top(k, |a, b| a.0.cmp(&b.0)), top(k, |a, b| a.1.cmp(&b.1)));
                hits.push(Hits { k, memory: ids.contains(&7).into(), frequent, recent });
            }
        }
        for (at, &id) in ids.iter().enumerate() {
            if !ids[..at].contains(&id) {
                let count = touches.get(&id).map_or(0, |score| score.0);
                touches.insert(id, (count + 1, number as u64));
            }
        }
    }
    hits
}

proptest! {
    /// Also after a resume: a prediction that only recorded the first epochs scores the rest alike.
    #[test]
    fn incremental_rankings_equal_full_sorts(
        epochs in prop::collection::vec(prop::collection::vec(0_u64..30, 0..12), 1..30),
        moved in 0_usize..30,
    ) {
        let (top_k, skip) = ([1, 4, 9], 2);
        let expected = slowly(&epochs, &top_k, skip);
        let ranking = [MemoryId(7)];
        let (mut stayed, mut late) = (Prediction::new(&top_k, skip as u64), Prediction::new(&top_k, skip as u64));
        let (mut hits, mut late_hits) = (Vec::new(), Vec::new());
        for (number, ids) in epochs.iter().enumerate() {
            let mut ids = ids.clone();
            ids.sort_unstable();
            let epoch = epoch(number as u64, &ids);
            let row = stayed.score(&epoch, Some(&ranking));
            let late_row = late.score(&epoch, (number >= moved).then_some(ranking.as_slice()));
            if number >= moved {
                prop_assert_eq!(&row, &late_row);
            }
            hits.extend(row);
            late_hits.extend(late_row);
        }
        prop_assert_eq!(hits, expected);
    }
}

#[test]
fn the_example_has_the_addresses_words_and_labels_of_its_provenance() {
    let options = SourceOptions::Example(ExampleName::StateOfTheUnion);
    let mut source = source::open(&options, Limits::default(), 0).unwrap();
    let (mut epochs, mut events, mut keys) = (Vec::new(), 0, HashMap::new());
    while let Some(epoch) = source.next_epoch().unwrap() {
        assert_eq!(epoch.number, epochs.len() as u64);
        let Content::Events(list) = &epoch.content else { panic!("the example has events") };
        assert!(list.windows(2).all(|pair| pair[0].id < pair[1].id), "sorted, each once");
        events += list.len();
        for event in list {
            keys.insert(event.id, event.key.clone().unwrap());
        }
        epochs.push(epoch);
    }
    assert_eq!((epochs.len(), events, keys.len()), (233, 368_457, 23_147));
    assert_eq!(source.epochs(), Some(233));
    assert_eq!(keys[&MemoryId(0xab5e_9e37_6f95_3917)].as_ref(), "government");
    assert_eq!(partition_of(MemoryId(0xab5e_9e37_6f95_3917), 256).0, 172);
    assert_eq!((epochs[0].label.as_deref(), epochs[232].number), (Some("1790 George Washington"), 232));
    let mut resumed = source::open(&options, Limits::default(), 200).unwrap();
    assert_eq!(resumed.next_epoch().unwrap().as_ref(), Some(&epochs[200]));
    assert!(source::open(&options, Limits::default(), 500).unwrap().next_epoch().unwrap().is_none());
}
