//! Test vectors of `vectors.json`, computed by an independent program.

use engram_memory::clock::{Advance, DecayClock, folded};
use engram_memory::hash::{content_hash, memory_hash};
use engram_memory::law::{delta, rank_order};
use engram_memory::{
    Digest, FeatureType, Group, MemoryId, ONE, PartitionId, Settings, Weight, edge, key_id, mix64, partition_of,
};
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// The file, and the tables that were read.
struct Vectors {
    tables: Value,
    read: RefCell<BTreeSet<String>>,
}

impl Vectors {
    fn load() -> Self {
        let tables = serde_json::from_str(include_str!("../vectors.json")).unwrap();
        Self { tables, read: RefCell::default() }
    }

    /// Returns the rows of a table of the expected length.
    fn rows(&self, table: &str, expected: usize) -> &[Value] {
        let rows = self.tables[table].as_array().unwrap();
        assert_eq!(rows.len(), expected, "{table}");
        self.read.borrow_mut().insert(table.to_owned());
        rows
    }
}

fn int<T: TryFrom<i64>>(value: &Value) -> T {
    let number = value.as_i64().unwrap_or_else(|| panic!("{value} is no integer"));
    T::try_from(number).unwrap_or_else(|_| panic!("{number} is out of range"))
}

fn ints<T: TryFrom<i64>>(value: &Value) -> Vec<T> {
    value.as_array().unwrap().iter().map(int).collect()
}

fn weight(value: &Value) -> Weight {
    Weight::from_units(int(value)).unwrap()
}

fn hex(value: &Value) -> u128 {
    u128::from_str_radix(value.as_str().unwrap().trim_start_matches("0x"), 16).unwrap()
}

/// `None` for values that have to be rejected.
fn expected_units(value: &Value) -> Option<u32> {
    (value != "refused").then(|| int(value))
}

fn quality_named(name: &str) -> f32 {
    let ulps = |x: f32, n: i32| f32::from_bits(x.to_bits().wrapping_add_signed(n));
    match name.split(' ').next().unwrap() {
        "2^-149" => f32::from_bits(1),
        "-2^-149" => -f32::from_bits(1),
        "2^-31" => 2_f32.powi(-31),
        "2^-30" => 2_f32.powi(-30),
        "0.5" if name.starts_with("0.5 - 1 ulp") => ulps(0.5, -1),
        "0.5" if name.starts_with("0.5 + 1 ulp") => ulps(0.5, 1),
        "1" if name.starts_with("1 - 1 ulp") => ulps(1.0, -1),
        "1" if name.starts_with("1 + 1 ulp") => ulps(1.0, 1),
        plain => plain.parse().unwrap(),
    }
}

#[test]
fn every_vector_of_an_independent_program_matches() {
    let vectors = Vectors::load();
    edges(&vectors);
    weights(&vectors);
    trajectory(&vectors);
    clocks(&vectors);
    hashes(&vectors);
    let all = vectors.tables.as_object().unwrap().keys().filter(|key| *key != "about").cloned().collect();
    // The digests of the standard experiment have their own test.
    vectors.read.borrow_mut().insert("digest of the standard experiment".to_owned());
    assert_eq!(*vectors.read.borrow(), all, "a table was not read");
}

fn edges(vectors: &Vectors) {
    for row in vectors.rows("settings: f64 -> Q30", 12) {
        let setting = row["setting"].as_str().unwrap().parse().unwrap();
        assert_eq!(edge::setting(setting).ok(), expected_units(&row["Q30"]), "{row}");
        assert_eq!(edge::rate(setting).ok(), expected_units(&row["Q30"]).filter(|&units| units > 0), "{row}");
    }
    for row in vectors.rows("quality: f32 -> Q30 -> delta at rate 0.05", 20) {
        let quality = quality_named(row["q (f32)"].as_str().unwrap());
        let units = edge::quality(quality).ok();
        assert_eq!(units, expected_units(&row["Q30"]), "{row}");
        assert_eq!(edge::weight(quality).ok().map(Weight::units), units, "{row}");
        if let Some(units) = units {
            assert_eq!(delta(Settings::DEFAULT_RATE, units), int::<i32>(&row["delta"]), "{row}");
            assert_eq!(edge::delta(quality), Ok(units as i32));
            assert_eq!(edge::delta(-quality), Ok(-(units as i32)));
        } else if quality != -1.0 && quality != -f32::from_bits(1) {
            assert!(edge::delta(quality).is_err(), "{row}");
        }
    }
}

fn weights(vectors: &Vectors) {
    for row in vectors.rows("one update", 18) {
        assert_eq!(weight(&row["w"]).updated(int(&row["delta"])), weight(&row["result"]), "{row}");
    }
    for row in vectors.rows("one decay", 7) {
        assert_eq!(weight(&row["w"]).decayed(int(&row["amount"])), weight(&row["result"]), "{row}");
    }
    for row in vectors.rows("one epoch: decay, then the deltas in order", 9) {
        let decayed = weight(&row["w"]).decayed(int(&row["amount"]));
        let result = ints(&row["deltas"]).into_iter().fold(decayed, Weight::updated);
        assert_eq!(result, weight(&row["result"]), "{row}");
    }
}

fn trajectory(vectors: &Vectors) {
    let rewarded = delta(Settings::DEFAULT_RATE, edge::quality(0.8).unwrap());
    let punished = delta(Settings::DEFAULT_RATE, edge::quality(0.2).unwrap());
    let decay = edge::setting(0.01).unwrap();
    let (mut r, mut p) = (Weight::HALF, Weight::HALF);
    let mut separations = Vec::new();
    for row in vectors.rows("standard trajectory", 20) {
        (r, p) = (r.decayed(decay).updated(rewarded), p.decayed(decay).updated(punished));
        assert_eq!((r, p), (weight(&row["w of R"]), weight(&row["w of P"])), "{row}");
        separations.push(r.units() - p.units());
        assert_eq!(separations.last(), Some(&int::<u32>(&row["S_t"])), "{row}");
    }
    let row = &vectors.rows("factor", 1)[0];
    assert_eq!((separations[0], separations[19]), (int::<u32>(&row["S_1"]), int::<u32>(&row["S_20"])));
    let factor = f64::from(separations[19]) / f64::from(separations[0]);
    assert_eq!(format!("{factor:.12}"), row["S_20 / S_1"].as_str().unwrap());
    assert!((factor - 12.5).abs() < 1e-6);
    assert_eq!(format!("{:.3e}", factor - 12.5), row["minus 12.5"].as_str().unwrap().replace("e-07", "e-7"));
}

fn clocks(vectors: &Vectors) {
    let mut clock = DecayClock::default();
    let mut potentials: Vec<u32> = Vec::new();
    for row in vectors.rows("decay clock: memories a, b, c", 7) {
        match row["step"].as_str().unwrap().split(' ').collect::<Vec<_>>()[..] {
            ["start"] => potentials = ints(&row["weight"]),
            ["decay", amount] => assert_eq!(clock.advance(amount.parse().unwrap()), Advance::Moved),
            ["delta", delta, "on", name] => {
                let p = &mut potentials["abc".find(name).unwrap()];
                *p = clock.updated(*p, delta.parse().unwrap());
            }
            _ => panic!("{row} is no step"),
        }
        assert_eq!(clock.units(), int::<u32>(&row["D"]), "{row}");
        assert_eq!(potentials, ints::<u32>(&row["p"]), "{row}");
        let weights: Vec<_> = potentials.iter().map(|&p| clock.weight(p).units()).collect();
        assert_eq!(weights, ints::<u32>(&row["weight"]), "{row}");
    }

    let row = &vectors.rows("decays of 0.01 before the first fold", 1)[0];
    let mut clock = DecayClock::default();
    for _ in 0..int::<u32>(&row["decays without fold"]) {
        assert_eq!(clock.advance(10_737_418), Advance::Moved);
    }
    assert_eq!(clock.units(), int::<u32>(&row["D after them"]));
    assert!(matches!(clock.advance(10_737_418), Advance::Fold { .. }));
    assert_eq!(clock.units(), 0);

    for row in vectors.rows("fold", 5) {
        let mut clock = DecayClock::from_units(int(&row["D"])).unwrap();
        let mut potentials = ints::<u32>(&row["p"]);
        if let Advance::Fold { subtract } = clock.advance(int(&row["amount"])) {
            potentials.iter_mut().for_each(|p| *p = folded(*p, subtract));
        }
        assert_eq!(clock.units(), int::<u32>(&row["D'"]), "{row}");
        assert_eq!(potentials, ints::<u32>(&row["p'"]), "{row}");
        let weights: Vec<_> = potentials.iter().map(|&p| clock.weight(p).units()).collect();
        assert_eq!(weights, ints::<u32>(&row["weight'"]), "{row}");
    }

    let row = &vectors.rows("rank: (id, p, D) from three partitions", 1)[0];
    let memories = [(1, 5, 10), (2, 7, 10), (3, 25, 10), (4, 9, 10), (9, 130, 100), (8, 40, 0), (7, 40, 0)];
    let mut order = memories.map(|(id, p, d)| (DecayClock::from_units(d).unwrap().weight(p), MemoryId(id)));
    order.sort_by(|a, b| rank_order(*a, *b));
    assert_eq!(order.map(|(_, id)| id.0 as i64).to_vec(), ints::<i64>(&row["by the law"]));
}

fn hashes(vectors: &Vectors) {
    for row in vectors.rows("mix64", 8) {
        let id = row["id"].as_u64().unwrap();
        assert_eq!(u128::from(mix64(id)), hex(&row["mix64"]), "{row}");
        assert_eq!(partition_of(MemoryId(id), 256), PartitionId(int(&row["mod 256"])), "{row}");
        assert_eq!(partition_of(MemoryId(id), 1_000), PartitionId(int(&row["mod 1000"])), "{row}");
    }
    for row in vectors.rows("keys", 4) {
        let id = key_id(row["key"].as_str().unwrap().as_bytes());
        assert_eq!((u128::from(id.0), Some(id.0)), (hex(&row["id (hex)"]), row["id"].as_u64()), "{row}");
        assert_eq!(partition_of(id, 256), PartitionId(int(&row["partition of 256"])), "{row}");
    }
    // f16 [1, -2, 0.5], little-endian.
    let features = [0x00, 0x3c, 0x00, 0xc0, 0x00, 0x38];
    let memories = [
        (1, Weight::HALF, 0, content_hash(None, &[])),
        (42, Weight::ZERO, 7, content_hash(Some((FeatureType::F16, &features)), b"hello")),
        (u64::MAX, Weight::ONE, 255, content_hash(None, &[0])),
    ];
    let mut digest = Digest::default();
    for (row, (id, weight, group, content)) in vectors.rows("digest of one memory", 3).iter().zip(memories) {
        assert_eq!(content, hex(&row["content hash"]), "{row}");
        assert_eq!(memory_hash(MemoryId(id), weight, Group(group), content), hex(&row["memory hash"]), "{row}");
        digest.add(MemoryId(id), weight, Group(group), content);
    }
    assert_eq!(digest.to_string(), vectors.rows("their wrapping sum", 1)[0]["digest"].as_str().unwrap());
    assert_eq!(content_hash(Some((FeatureType::F32, &[])), &[]), 0, "no features and an empty payload are nothing");
}

/// Returns the digest of the standard experiment after `epochs` epochs, by weight arithmetic alone.
fn standard_digest(memories: u64, epochs: u32) -> Digest {
    let weights = [42_949_673, -42_949_672]
        .map(|delta| (0..epochs).fold(Weight::HALF, |weight, _| weight.decayed(10_737_418).updated(delta)));
    let mut digest = Digest::default();
    for id in 0..memories {
        let group = id & 1;
        digest.add(MemoryId(id), weights[group as usize], Group(group as u8), 0);
    }
    digest
}

#[test]
fn the_standard_experiment_has_the_published_digests_up_to_a_million() {
    let vectors = Vectors::load();
    let mut sizes = Vec::new();
    for row in vectors.rows("digest of the standard experiment", 5) {
        let memories = int::<u64>(&row["N"]);
        if memories <= 1_000_000 {
            sizes.push(memories);
            assert_eq!(
                standard_digest(memories, int(&row["epochs"])).to_string(),
                row["digest"].as_str().unwrap(),
                "{row}"
            );
        }
    }
    assert_eq!(sizes, [1_000, 1_000, 100_000, 1_000_000]);
    assert_eq!(standard_digest(1_000, 17), standard_digest(1_000, 20), "final from epoch 17 on");
    assert_ne!(standard_digest(1_000, 16), standard_digest(1_000, 17));
}

#[test]
fn weights_above_one_and_clocks_above_the_fold_are_rejected() {
    assert_eq!(Weight::from_units(ONE), Some(Weight::ONE));
    assert_eq!(Weight::from_units(ONE + 1), None);
    assert!(DecayClock::from_units((1 << 31) - 1).is_some());
    assert_eq!(DecayClock::from_units(1 << 31), None);
}
