//! Synthetic spectra S1 to S4, with the errors of real instruments on request.

use serde::{Deserialize, Serialize};

use crate::error::{Error, in_range};
use crate::random::Stream;
use crate::spectra::Spectra;

/// A generator of spectra; formulas in terms of x = ppb / 60 and the wavelength w in nm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Generator {
    /// S1: linear in concentration.
    Linear,
    /// S2: non-monotone with a kink; flat at 0 and 60 ppb.
    Hump,
    /// S3: monotone and separable.
    Convex,
    /// S4: peak shift, hump, convex band and a short-wave edge; about three components.
    Mixed,
}

/// Errors added to a spectrum; all deviations default to 0.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct Noise {
    /// Deviation of the additive noise, per concentration and wavelength, in [0, 1]. The generators' own: S2 0.01, S3 0.02.
    pub additive: f64,
    /// Deviation of the gain, per spectrum, in [0, 1].
    pub gain: f64,
    /// Deviation of the offset, per spectrum, in [0, 1].
    pub offset: f64,
    /// Deviation of the change of the baseline over the whole range, per spectrum, in [0, 1].
    pub slope: f64,
    /// Largest shift of the wavelength axis, per spectrum, in nm, in [0, 10].
    pub shift_nm: f64,
    /// Relative deviation of the true concentration from its label, per spectrum, in [0, 1].
    pub concentration: f64,
}

/// `exp(-((w - m) / d)^2)`.
fn bell(w: f64, m: f64, d: f64) -> f64 {
    (-((w - m) / d).powi(2)).exp()
}

/// `exp(-(w - m)^2 / (2 d^2))`.
fn normal_band(w: f64, m: f64, d: f64) -> f64 {
    (-(w - m).powi(2) / (2.0 * d * d)).exp()
}

impl Generator {
    /// Absorbance without noise at a concentration in ppb and a wavelength in nm.
    pub fn absorbance(self, ppb: f64, w: f64) -> f64 {
        let x = ppb / 60.0;
        let turn = std::f64::consts::PI * x;
        match self {
            Self::Linear => x * normal_band(w, 450.0, 100.0) * (1.0 + 0.1 * (w / 50.0).sin()),
            Self::Hump => {
                let (a, d) = (if x < 0.5 { 2.0 * x } else { 2.0 * (1.0 - x) }, 50.0 + 20.0 * x);
                a * (bell(w, 520.0, d) + bell(w, 650.0, d)) + 0.1 * x
            }
            Self::Convex => {
                let bands = 0.8 * normal_band(w, 450.0, 80.0)
                    + 0.3 * normal_band(w, 350.0, 60.0)
                    + 0.1 * normal_band(w, 600.0, 200.0);
                (x + 0.3 * x * x) * (1.0 + 0.5 * ((w - 400.0) / 100.0).sin()) * bands
            }
            Self::Mixed => {
                0.10 + 0.9 * (-(w - 200.0) / 45.0).exp()
                    + (0.30 + 0.25 * turn.sin()) * bell(w, 525.0 + 20.0 * x, 45.0 + 15.0 * x)
                    + (0.20 + 0.30 * x * x) * bell(w, 650.0 - 10.0 * x, 55.0)
                    + 0.06 * (2.0 * turn).sin() * bell(w, 360.0, 40.0)
            }
        }
    }

    /// Spectra with noise, clamped at 0. A value depends on the seed, its concentration's position and its wavelength's
    /// position only. Without noise nothing is clamped that the formula does not make negative.
    ///
    /// # Errors
    /// If a noise setting is out of range or an axis is not increasing.
    pub fn spectra(self, ppb: &[f64], nm: &[f64], noise: &Noise, seed: u64) -> Result<Spectra, Error> {
        let deviations = [
            ("additive", noise.additive),
            ("gain", noise.gain),
            ("offset", noise.offset),
            ("slope", noise.slope),
            ("concentration", noise.concentration),
        ];
        for (field, value) in deviations {
            in_range(field, value, 0.0, 1.0, "in [0, 1]")?;
        }
        in_range("shiftNm", noise.shift_nm, 0.0, 10.0, "in [0, 10]")?;
        let middle = 0.5 * (nm.first().unwrap_or(&0.0) + nm.last().unwrap_or(&0.0));
        let range = (nm.last().unwrap_or(&1.0) - nm.first().unwrap_or(&0.0)).max(f64::MIN_POSITIVE);
        let mut absorbance = Vec::with_capacity(ppb.len() * nm.len());
        for (i, ppb) in ppb.iter().enumerate() {
            let own = Stream::new(seed, u64::MAX - i as u64);
            let gain = 1.0 + noise.gain * own.normal(0);
            let offset = noise.offset * own.normal(1);
            let slope = noise.slope * own.normal(2);
            let shift = noise.shift_nm * (2.0 * own.uniform(3) - 1.0);
            let true_ppb = ppb * (1.0 + noise.concentration * own.normal(4));
            let additive = Stream::new(seed, i as u64 + 1);
            for (j, w) in nm.iter().enumerate() {
                let clean = gain * self.absorbance(true_ppb, w + shift) + offset + slope * (w - middle) / range;
                absorbance.push((clean + noise.additive * additive.normal(j as u64)).max(0.0));
            }
        }
        Spectra::new(ppb.to_vec(), nm.to_vec(), absorbance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spectra::{REFERENCE_PPB, reference_nm};

    #[test]
    fn mixed_spectra_equal_the_check_values() {
        let checks = [
            (0.0, 525.0, 0.401_799_442_305),
            (30.0, 525.0, 0.633_414_926_406),
            (60.0, 650.0, 0.597_813_340_603),
            (10.0, 360.0, 0.177_671_968_106),
            (40.0, 200.0, 0.999_999_994_153),
        ];
        for (ppb, nm, expected) in checks {
            let value = Generator::Mixed.absorbance(ppb, nm);
            assert!((value - expected).abs() < 1e-12, "A({ppb}, {nm}) = {value}");
        }
    }

    #[test]
    fn linear_spectra_are_linear_and_flat_hump_ends_are_flat() {
        for nm in reference_nm() {
            let linear = |ppb| Generator::Linear.absorbance(ppb, nm);
            assert!((linear(40.0) - 2.0 * linear(20.0)).abs() < 1e-15);
            assert!((Generator::Hump.absorbance(60.0, nm) - 0.1).abs() < 1e-15);
            let ratio = Generator::Convex.absorbance(60.0, nm) / Generator::Convex.absorbance(30.0, nm);
            assert!((ratio - 1.3 / 0.575).abs() < 1e-12);
        }
    }

    #[test]
    fn noise_has_the_requested_deviation_and_repeats_from_the_seed() {
        let noise = Noise { additive: 0.02, ..Noise::default() };
        let draw = |seed| Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &noise, seed).unwrap();
        let clean = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        let (noisy, mut sum) = (draw(1), 0.0);
        for i in 0..6 {
            sum += noisy.row(i).iter().zip(clean.row(i)).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
        }
        assert!(((sum / 3606.0).sqrt() / 0.02 - 1.0).abs() < 0.05);
        let refused = Generator::Mixed.spectra(&[0.0], &[200.0, 201.0], &Noise { gain: 2.0, ..noise }, 1);
        assert!(matches!(refused, Err(Error::Range { field: "gain", .. })));
    }
}
