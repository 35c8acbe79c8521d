//! Properties of weights and of the decay clock.

use engram_memory::clock::{Advance, DecayClock, FOLD_AT, folded};
use engram_memory::law::{delta, rank_order};
use engram_memory::reference::Partition;
use engram_memory::{
    CapacityPolicy, Command, Digest, FeatureShape, Group, Histogram, Law, MemoryId, ONE, OnMissing, QualityVector,
    Record, Settings, Shape, Updates, Weight, edge,
};
use engram_testing::commands::{World, arb_log, arb_weight};
use proptest::collection::vec;
use proptest::prelude::*;

/// A change of weights, for a few memories.
#[derive(Debug, Clone)]
enum Change {
    Decay(u32),
    Update(usize, i32),
    Write(usize, Weight),
}

const MEMORIES: usize = 6;

fn arb_change() -> impl Strategy<Value = Change> {
    let one = ONE as i32;
    prop_oneof![
        3 => prop_oneof![Just(10_737_418), Just(ONE), Just(0), 0..=ONE].prop_map(Change::Decay),
        4 => (0..MEMORIES, prop_oneof![Just(one), Just(-one), Just(1), Just(0), Just(-1), -one..=one])
            .prop_map(|(at, delta)| Change::Update(at, delta)),
        1 => (0..MEMORIES, arb_weight()).prop_map(|(at, weight)| Change::Write(at, weight)),
    ]
}

proptest! {
    #[test]
    fn lazy_decay_equals_eager_decay(changes in vec(arb_change(), 1..400)) {
        let mut eager = [Weight::HALF; MEMORIES];
        let mut clock = DecayClock::default();
        let mut potentials = eager.map(|weight| clock.potential(weight));
        for change in changes {
            match change {
                Change::Decay(amount) => {
                    eager.iter_mut().for_each(|weight| *weight = weight.decayed(amount));
                    if let Advance::Fold { subtract } = clock.advance(amount) {
                        prop_assert!(subtract >= FOLD_AT);
                        potentials.iter_mut().for_each(|p| *p = folded(*p, subtract));
                    }
                }
                Change::Update(at, delta) => {
                    eager[at] = eager[at].updated(delta);
                    potentials[at] = clock.updated(potentials[at], delta);
                }
                Change::Write(at, weight) => {
                    eager[at] = weight;
                    potentials[at] = clock.potential(weight);
                }
            }
            prop_assert!(clock.units() < FOLD_AT);
            prop_assert!(potentials.iter().all(|&p| p <= clock.units() + ONE));
            prop_assert_eq!(potentials.map(|p| clock.weight(p)), eager);
        }
    }

    /// `x -> min(hi, max(lo, x + c))` composes, on which a parallel scatter of duplicates relies.
    #[test]
    fn duplicates_of_a_record_apply_in_order_and_compose(
        weight in arb_weight(),
        deltas in vec(prop_oneof![Just(42_949_673), Just(-42_949_672), -(ONE as i32)..=ONE as i32], 1..=8),
    ) {
        let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
        let mut partition = Partition::new(shape, Settings { initial_weight: weight, ..Settings::default() });
        let ids = vec![MemoryId(9); deltas.len()];
        let updates = Updates::ById { ids, deltas: deltas.clone(), on_missing: OnMissing::Create, keys: None };
        partition.apply(&Record::bare(Command::Reinforce(updates)));

        let (mut low, mut high, mut sum) = (i64::MIN, i64::MAX, 0_i64);
        let mut sequential = weight;
        for delta in deltas {
            sequential = sequential.updated(delta);
            let clamp = |x: i64| (x + i64::from(delta)).clamp(0, i64::from(ONE));
            (low, high) = (clamp(low.max(-(1 << 40))), clamp(high.min(1 << 40)));
            sum += i64::from(delta);
        }
        let composed = (i64::from(weight.units()) + sum).clamp(low, high);
        prop_assert_eq!(partition.memories()[&MemoryId(9)].weight, sequential);
        prop_assert_eq!(composed, i64::from(sequential.units()));
    }

    #[test]
    fn order_of_updates_matters_only_at_the_clamps(weight in arb_weight(), deltas in vec(-(ONE as i32)..=ONE as i32, 0..=6)) {
        let sequential = |deltas: &[i32]| deltas.iter().fold(weight, |weight, &delta| weight.updated(delta));
        let gain: i64 = deltas.iter().map(|&delta| i64::from(delta.max(0))).sum();
        let loss: i64 = deltas.iter().map(|&delta| i64::from(delta.min(0))).sum();
        let start = i64::from(weight.units());
        let within = start + gain <= i64::from(ONE) && start + loss >= 0;
        let expected = sequential(&deltas);
        let mut orders = vec![deltas.clone()];
        for at in 0..deltas.len() {
            orders = orders.into_iter().flat_map(|order| (at..order.len()).map(move |other| {
                let mut order = order.clone();
                order.swap(at, other);
                order
            })).collect();
        }
        for mut order in orders {
            if within {
                prop_assert_eq!(sequential(&order), expected);
            }
            order.sort_unstable();
            let mut sorted = deltas.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sequential(&order), sequential(&sorted), "sorted deltas have one result");
        }
    }

    #[test]
    fn a_delta_never_exceeds_the_rate_and_jumps_at_one_half(rate in 1..=ONE, quality in 0..=ONE) {
        let change = delta(rate, quality);
        prop_assert!(change.unsigned_abs() <= rate);
        prop_assert!(change == 0 || (change > 0) == (quality > ONE / 2));
        prop_assert!(quality == ONE || delta(rate, quality + 1) >= change);
    }

    #[test]
    fn settings_are_rounded_to_the_nearest_unit_ties_to_even(value in 0.0..=1.0_f64, units in 1..ONE) {
        let exact = value * f64::from(ONE);
        match edge::setting(value) {
            Ok(units) => prop_assert!((f64::from(units) - exact).abs() <= 0.5),
            Err(_) => prop_assert!(value > 0.0 && exact <= 0.5),
        }
        let tie = (f64::from(units) + 0.5) / f64::from(ONE);
        prop_assert_eq!(edge::setting(tie), Ok(units + units % 2));
    }

    #[test]
    fn floats_are_truncated_or_rejected(bits in any::<u32>(), setting in any::<f64>()) {
        let value = f32::from_bits(bits);
        match edge::quality(value) {
            Ok(units) => {
                prop_assert!((0.0..=1.0).contains(&value) && units <= ONE);
                let exact = f64::from(value) * f64::from(ONE);
                prop_assert!(f64::from(units) <= exact && exact < f64::from(units) + 1.0);
            }
            Err(refused) => {
                prop_assert!(value.is_nan() || !(0.0..=1.0).contains(&value));
                prop_assert!(refused.to_string().contains("from 0 to 1"));
            }
        }
        prop_assert_eq!(edge::delta(value).is_ok(), value.abs() <= 1.0);
        prop_assert_eq!(edge::delta(value).ok(), edge::quality(value.abs()).ok().map(|units| {
            if value < 0.0 { -(units as i32) } else { units as i32 }
        }));
        prop_assert!(edge::setting(setting).is_err() || (0.0..=1.0).contains(&setting));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Group sums, histogram, rank and digest match the memories for any log.
    #[test]
    fn statistics_of_any_log_agree_with_its_memories((features, settings, records) in arb_log(0..100)) {
        let shape = Shape { partitions: 1, law: Law::Linear, features };
        let mut partition = Partition::new(shape, settings);
        for record in &records {
            let before = partition.clone();
            let predicted = partition.ledger().lookup_reply(record);
            let reply = partition.apply(record);
            if let Some(predicted) = predicted {
                prop_assert_eq!(&predicted, &reply);
                prop_assert_eq!(before.memories(), partition.memories(), "a repeat or a refusal changes no memory");
            }
            let settings = partition.ledger().settings;
            let count = partition.memories().len() as u64;
            if settings.policy == CapacityPolicy::Evict {
                prop_assert!(count <= settings.limit, "{count} memories above the limit of {}", settings.limit);
            }
            prop_assert!(partition.clock().units() < FOLD_AT);
        }
        let quality = partition.quality();
        prop_assert_eq!(quality.total().count, partition.memories().len() as u64);
        let sum: u128 = partition.memories().values().map(|memory| u128::from(memory.weight.units())).sum();
        prop_assert_eq!(quality.total().sum, sum);
        prop_assert_eq!(QualityVector::from_parts(quality.groups().to_vec()), Some(quality.clone()));
        for bits in [0, 1, 12] {
            let histogram = partition.histogram(bits);
            prop_assert_eq!(histogram.total().iter().sum::<u64>(), quality.total().count);
            prop_assert_eq!(histogram.groups().len(), quality.groups().len());
            prop_assert_eq!(Histogram::from_parts(bits, histogram.groups().to_vec()), Some(histogram));
        }
        let rank = partition.rank();
        prop_assert!(rank.windows(2).all(|pair| rank_order(pair[0], pair[1]).is_lt()), "one strict order");
        prop_assert_eq!(rank.len(), partition.memories().len());
    }
}

#[test]
fn weight_one_falls_into_the_last_bin() {
    for bits in 0..=12 {
        assert_eq!(Histogram::bin(bits, Weight::ONE), (1 << bits) - 1);
        assert_eq!(Histogram::bin(bits, Weight::ZERO), 0);
        assert_eq!(Histogram::bin(bits, Weight::from_units(ONE - 1).unwrap()), (1 << bits) - 1);
    }
    assert_eq!(Histogram::bin(1, Weight::HALF), 1);
    assert!(Histogram::new(13).is_none());
}

#[test]
fn a_record_above_the_limit_evicts_by_rank_order_including_its_own_insertions() {
    assert_eq!(Settings::limit_of(10_000_000, 256), 41_016);
    assert_eq!((Settings::limit_of(0, 256), Settings::limit_of(u64::MAX, 1)), (1, u64::MAX));
    let settings = Settings { limit: 41_016, ..Settings::default() };
    assert_eq!((settings.excess(41_016), settings.excess(41_017), settings.excess(50_000)), (0, 411, 8_984));
    assert_eq!(Settings { policy: CapacityPolicy::Refuse, ..settings }.excess(50_000), 0);

    let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
    let mut partition = Partition::new(shape, Settings { limit: 3, ..Settings::default() });
    let upsert = |ids: &[u64], weights: &[u32]| {
        Record::bare(Command::Upsert(engram_memory::Upsert {
            ids: ids.iter().copied().map(MemoryId).collect(),
            weights: weights.to_vec(),
            ..Default::default()
        }))
    };
    partition.apply(&upsert(&[1, 2, 3], &[7, 7, 9]));
    let outcome = partition.apply(&upsert(&[4, 5], &[7, 6])).into_result().unwrap();
    assert_eq!((outcome.created, outcome.evicted), (2, 2), "5 has the least weight, 4 the greatest id of the tie");
    assert_eq!(partition.memories().keys().map(|id| id.0).collect::<Vec<_>>(), [1, 2, 3]);
}

#[test]
fn a_key_identifies_one_id() {
    use engram_memory::RejectionReason::{KeyCollision, KeyMismatch, Unknown};
    let shape = Shape { partitions: 1, law: Law::Linear, features: FeatureShape::NONE };
    let mut partition = Partition::new(shape, Settings::default());
    let mut reinforce = |rows: &[(MemoryId, &str)], on_missing| {
        let updates = Updates::ById {
            ids: rows.iter().map(|row| row.0).collect(),
            deltas: vec![1; rows.len()],
            on_missing,
            keys: Some(rows.iter().map(|row| row.1).collect()),
        };
        let outcome = partition.apply(&Record::bare(Command::Reinforce(updates))).into_result().unwrap();
        (outcome.applied, outcome.rejections.into_iter().map(|rejection| rejection.reason).collect::<Vec<_>>())
    };
    let a = engram_memory::key_id(b"a");
    assert_eq!(reinforce(&[(a, "a")], OnMissing::Report), (0, vec![Unknown]));
    assert_eq!(reinforce(&[(a, "b")], OnMissing::Create), (0, vec![KeyMismatch]));
    assert_eq!(
        reinforce(&[(a, "a"), (a, ""), (a, "b"), (MemoryId(1), "")], OnMissing::Create),
        (3, vec![KeyCollision])
    );
    let (mut many_rejected, listed) = (vec![(MemoryId(77), ""); 70], 64);
    many_rejected.push((a, "a"));
    assert_eq!(
        reinforce(&many_rejected, OnMissing::Report),
        (1, vec![Unknown; listed]),
        "rejections are bounded, not the count"
    );
    // Inserted without a key: a later key is a collision, even a matching one.
    let one = engram_memory::key_id(b"one");
    assert_eq!(reinforce(&[(one, ""), (one, "one")], OnMissing::Create), (1, vec![KeyCollision]));
}

#[test]
fn the_digest_covers_every_field_but_neither_order_nor_key() {
    let hash = |id, weight, group, content| {
        let mut digest = Digest::default();
        digest.add(MemoryId(id), weight, Group(group), content);
        digest
    };
    let base = hash(1, Weight::HALF, 0, 0);
    for other in [
        hash(2, Weight::HALF, 0, 0),
        hash(1, Weight::ONE, 0, 0),
        hash(1, Weight::HALF, 1, 0),
        hash(1, Weight::HALF, 0, 1),
    ] {
        assert_ne!(base, other);
    }
    let world = World::small(FeatureShape::NONE);
    let (mut forward, mut backward) = (Digest::default(), Digest::default());
    let ids: Vec<_> = world.ids().collect();
    ids.iter().for_each(|id| forward.add(*id, Weight::HALF, Group(0), 0));
    ids.iter().rev().for_each(|id| backward.add(*id, Weight::HALF, Group(0), 0));
    assert_eq!(forward, backward);
}
