//! Time of one Fisher matrix, for `cargo run --release -p engram-information --example fisher -- 10000 1000`.

use engram_information::{LEAVES, combine, partial_sums};
use std::time::Instant;

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<usize>().expect("a number"));
    let (samples, parameters) = (arguments.next().unwrap_or(10_000), arguments.next().unwrap_or(1_000));
    let scores: Vec<f32> =
        (0..samples * parameters).map(|it| (it * 48_271 % 2_147_483_647) as f32 / 1e9 - 1.0).collect();
    for _ in 0..3 {
        let began = Instant::now();
        let parts = partial_sums(&scores, parameters, 0..LEAVES, samples).expect("finite scores");
        let matrix = combine(parts, parameters, samples as u64).expect("every leaf");
        println!(
            "P = {parameters}, N = {samples}: {:.1} ms (trace {})",
            began.elapsed().as_secs_f64() * 1e3,
            matrix.trace()
        );
    }
}
