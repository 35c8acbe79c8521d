//! Leave-one-out of the geometry of two dimensions next to the Gaussian process, on S4.
//!
//! `cargo run -p engram-geodesic --example latent [NOISE] [SEED]`

use engram_geodesic::{Axes, Baseline, Generator, LatentModel, Noise, REFERENCE_PPB, reference_nm, rmse};

fn main() -> Result<(), engram_geodesic::Error> {
    let mut arguments = std::env::args().skip(1);
    let additive = arguments.next().and_then(|noise| noise.parse().ok()).unwrap_or(0.005);
    let seed = arguments.next().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let noise = Noise { additive, ..Noise::default() };
    let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &noise, seed)?;
    let axes = Axes::new(spectra.ppb(), spectra.nm())?;
    println!("ppb  two dimensions  RBF-GP  pchip  width  largest miss");
    let mut sums = [0.0; 3];
    for (fold, &ppb) in REFERENCE_PPB.iter().enumerate() {
        let training = spectra.without(fold)?;
        let model = LatentModel::fit(&training, axes)?;
        let miss = model.paths().iter().map(|path| path.miss).fold(0.0, f64::max);
        let error = |prediction: &[f64]| rmse(spectra.row(fold), prediction);
        let values = [
            error(&model.predict(ppb)?),
            error(&Baseline::RbfGp.predict(&training, ppb)),
            error(&Baseline::Pchip.predict(&training, ppb)),
        ];
        println!("{ppb:>3}  {:.4}  {:.4}  {:.4}  {}  {miss:.1e}", values[0], values[1], values[2], model.width);
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value / 6.0);
    }
    println!("mean {:.4}  {:.4}  {:.4}", sums[0], sums[1], sums[2]);
    Ok(())
}
