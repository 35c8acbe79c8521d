//! The spectra of a run: generated, or a table.

use super::invalid;
use crate::task_run::TaskError;
use engram_api::{SpectraName, SpectraSource, SyntheticSpectra};
use engram_geodesic::{Generator, Noise, REFERENCE_PPB, Sample, Spectra, noise_level};

/// Most cells of a table, so that the predictions of a task fit into its result.
const MAX_CELLS: usize = 100_000;
/// Most concentrations: each is a fold.
const MAX_FOLDS: usize = 64;
/// Most samples of unknown concentration: each is a profile in the result of a task.
const MAX_SAMPLES: usize = 32;
/// Range of the wavelengths of generated spectra in nm.
const SYNTHETIC_NM: (f64, f64) = (200.0, 800.0);
const CSV: &str = "spec.geodesic.source.csv";

/// Spectra and what they are.
pub(super) struct Source {
    pub(super) spectra: Spectra,
    /// Spectra whose concentration is to be estimated.
    pub(super) samples: Vec<Sample>,
    /// What the spectra are, for the report.
    pub(super) description: String,
    /// Noise level, if it is known.
    pub(super) noise_level: Option<f64>,
}

impl Source {
    pub(super) fn new(spec: &SpectraSource, data: Option<&[u8]>) -> Result<Self, TaskError> {
        match spec {
            SpectraSource::Synthetic(synthetic) => generated(synthetic),
            SpectraSource::Csv(_) => table(data.unwrap_or_default()),
        }
    }
}

/// Returns generated spectra.
fn generated(spec: &SyntheticSpectra) -> Result<Source, TaskError> {
    let generator = match spec.name {
        SpectraName::S1 => Generator::Linear,
        SpectraName::S2 => Generator::Hump,
        SpectraName::S3 => Generator::Convex,
        SpectraName::S4 => Generator::Mixed,
    };
    let noise = Noise {
        additive: spec.noise,
        gain: spec.gain,
        offset: spec.offset,
        slope: spec.slope,
        shift_nm: spec.shift_nm,
        concentration: spec.concentration,
    };
    let step = (SYNTHETIC_NM.1 - SYNTHETIC_NM.0) / f64::from(spec.wavelengths.max(2) - 1);
    let nm: Vec<f64> = (0..spec.wavelengths).map(|i| SYNTHETIC_NM.0 + step * f64::from(i)).collect();
    let draw = |seed: u64| {
        let spectra = generator.spectra(&REFERENCE_PPB, &nm, &noise, seed);
        spectra.map_err(|error| invalid("spec.geodesic.source.synthetic", &error))
    };
    let spectra = draw(spec.seed)?;
    // Two replicates differ by their noise only.
    let replicate = draw(spec.seed.wrapping_add(1))?;
    let all = |spectra: &Spectra| (0..REFERENCE_PPB.len()).flat_map(|i| spectra.row(i).to_vec()).collect::<Vec<_>>();
    let noise_level = Some(noise_level(&all(&spectra), &all(&replicate)));
    let description = format!("generated spectra {} with noise {} and seed {}", spec.name, spec.noise, spec.seed);
    Ok(Source { spectra, samples: Vec::new(), description, noise_level })
}

/// Reads a table of spectra and samples.
fn table(data: &[u8]) -> Result<Source, TaskError> {
    let text = std::str::from_utf8(data).map_err(|error| invalid(CSV, &error))?;
    let (spectra, samples) = Spectra::with_samples(text).map_err(|error| invalid(CSV, &error))?;
    let (folds, cells) = (spectra.ppb().len(), (spectra.ppb().len() + samples.len()) * spectra.nm().len());
    if !(4..=MAX_FOLDS).contains(&folds) {
        return Err(invalid(CSV, &format!("it has {folds} concentrations; allowed: 4 to {MAX_FOLDS}")));
    }
    if samples.len() > MAX_SAMPLES {
        return Err(invalid(CSV, &format!("it has {} samples; allowed: up to {MAX_SAMPLES}", samples.len())));
    }
    if cells > MAX_CELLS {
        return Err(invalid(CSV, &format!("it has {cells} absorbances; allowed: up to {MAX_CELLS}")));
    }
    Ok(Source { spectra, samples, description: "a CSV file".to_owned(), noise_level: None })
}
