//! Time of one max-plus product, for `cargo run --release -p engram-tropical --example product -- 1024`.

use engram_tropical::{Matrix, product};
use std::time::Instant;

fn main() {
    let size: usize = std::env::args().nth(1).map_or(1024, |text| text.parse().expect("a size"));
    let threads = std::env::args().nth(2).map_or(1, |text| text.parse().expect("a number of threads"));
    let entries = |seed: u32| -> Vec<f32> {
        (0..(size * size) as u32).map(|it| (it.wrapping_mul(2_654_435_761 ^ seed) >> 8) as f32 * 1e-6).collect()
    };
    let left = Matrix::new("left", size, size, entries(1)).expect("finite entries");
    let right = Matrix::new("right", size, size, entries(2)).expect("finite entries");
    for _ in 0..5 {
        let began = Instant::now();
        let result = product(&left, &right, threads).expect("square matrices");
        let seconds = began.elapsed().as_secs_f64();
        let sum: f64 = result.entries().iter().map(|&it| f64::from(it)).sum();
        println!(
            "{size}^3 on {threads} threads: {:.1} ms, {:.1} G steps/s (sum {sum})",
            seconds * 1e3,
            (size as f64).powi(3) / seconds / 1e9
        );
    }
}
