//! The validation report: scores per fold, baselines on the same folds, and who wins.

use serde::{Deserialize, Serialize};

use crate::band::Band;
use crate::baseline::Baseline;
use crate::error::Error;
use crate::fold::TaskResult;
use crate::inverse::Inversion;
use crate::measure::{Scores, r2};
use crate::random::Stream;
use crate::settings::Settings;
use crate::spectra::Spectra;

/// Resamples of the block bootstrap.
const RESAMPLES: u64 = 1_000;
/// Width of a block in nm: neighbouring wavelengths are correlated.
const BLOCK_NM: f64 = 20.0;

/// Scores of a baseline on one fold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BaselineScores {
    /// Which baseline.
    pub baseline: Baseline,
    /// Its scores.
    pub scores: Scores,
}

/// The results of one fold.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FoldReport {
    /// The held-out concentration in ppb.
    pub ppb: f64,
    /// Whether it lies at an end of the axis.
    pub extrapolation: bool,
    /// The held-out spectrum.
    pub truth: Vec<f64>,
    /// Mean prediction of all starts.
    pub prediction: Vec<f64>,
    /// Standard deviation of the predictions over the starts; zero with one start.
    pub deviation: Vec<f64>,
    /// Standard deviation over the training spectra as sources, mean over the starts: how consistent the models are.
    pub spread: Vec<f64>,
    /// Calibrated band, if the run calibrates bands.
    pub band: Option<Band>,
    /// Concentration estimated from the held-out spectrum.
    pub inversion: Option<Inversion>,
    /// Scores of the mean prediction.
    pub scores: Scores,
    /// RMSE of each start alone.
    pub start_rmse: Vec<f64>,
    /// The six baselines.
    pub baselines: Vec<BaselineScores>,
    /// Root of the mean validation loss in absorbance: how well the models reproduce differences between training spectra at
    /// wavelengths that were not trained on.
    pub fit_error: f64,
    /// The baseline with the least RMSE.
    pub best_baseline: Baseline,
    /// RMSE of the model minus that of the best baseline: 5 % and 95 % quantiles of a paired bootstrap over blocks of
    /// 20 nm.
    pub rmse_difference: (f64, f64),
}

impl FoldReport {
    /// RMSE of the best baseline.
    pub fn best_baseline_rmse(&self) -> f64 {
        self.baselines.iter().map(|b| b.scores.rmse).fold(f64::INFINITY, f64::min)
    }

    /// Whether more than half of the error is already there in differences of training spectra.
    pub fn is_underfitted(&self) -> bool {
        self.fit_error > 0.5 * self.scores.rmse
    }

    /// Why the model is worse than the best baseline, if it is.
    pub fn reason(&self) -> Option<String> {
        let (fit, kind) = (self.fit_error, if self.extrapolation { "outside" } else { "between" });
        (!self.wins()).then(|| match self.is_underfitted() {
            true => {
                format!("its models are underfitted: they reproduce differences of training spectra to {fit:.4} only")
            }
            false => format!(
                "its models reproduce differences of training spectra to {fit:.4}, so the error arises {kind} them"
            ),
        })
    }

    /// Whether the model's RMSE is at most that of the best baseline.
    pub fn wins(&self) -> bool {
        self.scores.rmse <= self.best_baseline_rmse()
    }
}

/// A complete leave-one-out. It exists only if every fold has results of the same settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Hash of the settings.
    pub settings: String,
    /// Wavelengths in nm.
    pub nm: Vec<f64>,
    /// One report per concentration.
    pub folds: Vec<FoldReport>,
    /// R2 over all folds and wavelengths together; none for flat spectra.
    pub pooled_r2: Option<f64>,
    /// Mean RMSE of the model over the folds.
    pub mean_rmse: f64,
    /// Mean RMSE of each baseline over the folds, in the order of [`Baseline::ALL`].
    pub baseline_mean_rmse: Vec<f64>,
    /// Noise level of the data, if it is known: differences below it are not results.
    pub noise_level: Option<f64>,
    /// Who wins and in which folds the model loses, in two sentences.
    pub verdict: String,
}

impl Report {
    /// Scores task results against the held-out spectra. `results` may come in any order; a task that was run twice
    /// counts once.
    ///
    /// # Errors
    /// [`Error::Incomplete`] if a fold has no result, results come from other settings or two results of one task
    /// differ, [`Error::Length`] if a prediction does not fit the wavelengths.
    pub fn new(
        spectra: &Spectra,
        settings: &Settings,
        results: &[TaskResult],
        noise_level: Option<f64>,
    ) -> Result<Self, Error> {
        let hash = format!("{:032x}", settings.hash());
        let mut sorted: Vec<&TaskResult> = results.iter().collect();
        sorted.sort_by_key(|r| r.task);
        sorted.dedup();
        for (i, r) in sorted.iter().enumerate() {
            let name = format!("fold {}, start {}", r.task.fold, r.task.start);
            if r.settings != hash {
                return Err(Error::Incomplete(format!("{name} ran with other settings")));
            }
            if i > 0 && sorted[i - 1].task == r.task {
                return Err(Error::Incomplete(format!("two results of {name} differ")));
            }
            let expected = spectra.nm().len();
            if r.prediction.len() != expected || r.spread.len() != expected {
                let actual = r.prediction.len().min(r.spread.len());
                return Err(Error::Length { field: "prediction", actual, expected });
            }
        }
        let mut folds = Vec::new();
        for fold in 0..spectra.ppb().len() {
            let own: Vec<&TaskResult> = sorted.iter().copied().filter(|r| r.task.fold == fold).collect();
            if own.is_empty() {
                return Err(Error::Incomplete(format!("fold {fold} has no result")));
            }
            folds.push(fold_report(spectra, fold, &own)?);
        }
        let count = folds.len() as f64;
        let mean_rmse = folds.iter().map(|f| f.scores.rmse).sum::<f64>() / count;
        let baseline_mean_rmse: Vec<f64> = (0..Baseline::ALL.len())
            .map(|b| folds.iter().map(|f| f.baselines[b].scores.rmse).sum::<f64>() / count)
            .collect();
        let pool = |of: fn(&FoldReport) -> &[f64]| folds.iter().flat_map(of).copied().collect::<Vec<f64>>();
        let pooled_r2 = r2(&pool(|f| &f.truth), &pool(|f| &f.prediction));
        let verdict = verdict(&folds, mean_rmse, &baseline_mean_rmse, noise_level);
        let nm = spectra.nm().to_vec();
        Ok(Self { settings: hash, nm, folds, pooled_r2, mean_rmse, baseline_mean_rmse, noise_level, verdict })
    }

    /// The report as JSON.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("numbers and strings have a JSON form")
    }

    /// Why the model loses, a line per fold that it loses.
    pub fn losses(&self) -> Vec<String> {
        let line = |fold: &FoldReport| {
            let kind = if fold.extrapolation { "extrapolation" } else { "interpolation" };
            let (model, other, name) = (fold.scores.rmse, fold.best_baseline_rmse(), fold.best_baseline.name());
            let reason = fold.reason()?;
            Some(format!("{} ppb ({kind}): {model:.4} against {other:.4} of {name}; {reason}", fold.ppb))
        };
        self.folds.iter().filter_map(line).collect()
    }

    /// A table of R2 and RMSE per fold, of the model and the baselines, the verdict, and the reason of each lost fold.
    pub fn table(&self) -> String {
        let entry = |s: &Scores| format!("{}/{:.4}", s.r2.map_or("undef".into(), |r| format!("{r:.4}")), s.rmse);
        let mut out = format!("{:<22}", "R2/RMSE");
        self.folds.iter().for_each(|f| out.push_str(&format!("{:>16}", format!("{} ppb", f.ppb))));
        out.push_str("       mean RMSE\n");
        let mut row = |name: &str, scores: &dyn Fn(&FoldReport) -> Scores, mean: f64| {
            out.push_str(&format!("{name:<22}"));
            self.folds.iter().for_each(|f| out.push_str(&format!("{:>16}", entry(&scores(f)))));
            out.push_str(&format!("{mean:>16.4}\n"));
        };
        row("geodesic model", &|f| f.scores, self.mean_rmse);
        for (b, baseline) in Baseline::ALL.iter().enumerate() {
            row(baseline.name(), &|f| f.baselines[b].scores, self.baseline_mean_rmse[b]);
        }
        out.push_str(&format!("{}\n", self.verdict));
        self.losses().iter().for_each(|loss| out.push_str(&format!("  {loss}\n")));
        out
    }
}

fn fold_report(spectra: &Spectra, fold: usize, results: &[&TaskResult]) -> Result<FoldReport, Error> {
    let (nm, truth) = (spectra.nm(), spectra.row(fold));
    let starts = results.len() as f64;
    let prediction: Vec<f64> =
        (0..nm.len()).map(|w| results.iter().map(|r| r.prediction[w]).sum::<f64>() / starts).collect();
    let spread = |w: usize| results.iter().map(|r| (r.prediction[w] - prediction[w]).powi(2)).sum::<f64>();
    let sources = |w: usize| results.iter().map(|r| r.spread[w]).sum::<f64>() / starts;
    let deviation = (0..nm.len()).map(|w| (spread(w) / (starts - 1.0).max(1.0)).sqrt()).collect();
    let training = spectra.without(fold)?;
    let mut baselines = Vec::new();
    let mut best: Option<(f64, Baseline, Vec<f64>)> = None;
    for baseline in Baseline::ALL {
        let predicted = baseline.predict(&training, spectra.ppb()[fold]);
        let scores = Scores::new(nm, truth, &predicted);
        if best.as_ref().is_none_or(|b| scores.rmse < b.0) {
            best = Some((scores.rmse, baseline, predicted));
        }
        baselines.push(BaselineScores { baseline, scores });
    }
    let (_, best_baseline, best_prediction) = best.expect("there are six baselines");
    Ok(FoldReport {
        ppb: spectra.ppb()[fold],
        extrapolation: fold == 0 || fold + 1 == spectra.ppb().len(),
        truth: truth.to_vec(),
        scores: Scores::new(nm, truth, &prediction),
        start_rmse: results.iter().map(|r| crate::measure::rmse(truth, &r.prediction)).collect(),
        baselines,
        fit_error: training.deviation() * (results.iter().map(|r| r.validation_loss).sum::<f64>() / starts).sqrt(),
        best_baseline,
        rmse_difference: bootstrap(nm, truth, &prediction, &best_prediction, fold as u64),
        prediction,
        deviation,
        spread: (0..nm.len()).map(sources).collect(),
        band: None,
        inversion: None,
    })
}

/// 5 % and 95 % quantiles of RMSE(a) - RMSE(b) over resampled blocks of wavelengths.
fn bootstrap(nm: &[f64], truth: &[f64], a: &[f64], b: &[f64], seed: u64) -> (f64, f64) {
    let count = (((nm[nm.len() - 1] - nm[0]) / BLOCK_NM) as usize).max(1);
    let mut blocks = vec![(0.0, 0.0, 0.0); count];
    for w in 0..nm.len() {
        let block = &mut blocks[(((nm[w] - nm[0]) / BLOCK_NM) as usize).min(count - 1)];
        *block = (block.0 + (truth[w] - a[w]).powi(2), block.1 + (truth[w] - b[w]).powi(2), block.2 + 1.0);
    }
    let stream = Stream::new(seed, 3);
    let mut differences: Vec<f64> = (0..RESAMPLES)
        .map(|r| {
            let mut sum = (0.0, 0.0, 0.0);
            for k in 0..count as u64 {
                let block = blocks[stream.below(r * count as u64 + k, count)];
                sum = (sum.0 + block.0, sum.1 + block.1, sum.2 + block.2);
            }
            let of = |squares: f64| if sum.2 > 0.0 { f64::sqrt(squares / sum.2) } else { 0.0 };
            of(sum.0) - of(sum.1)
        })
        .collect();
    differences.sort_by(f64::total_cmp);
    (differences[RESAMPLES as usize / 20], differences[RESAMPLES as usize * 19 / 20])
}

fn verdict(folds: &[FoldReport], mean: f64, baseline_means: &[f64], noise: Option<f64>) -> String {
    let mut best = 0;
    for b in 1..baseline_means.len() {
        if baseline_means[b] < baseline_means[best] {
            best = b;
        }
    }
    let (name, best_mean) = (Baseline::ALL[best].name(), baseline_means[best]);
    let lost: Vec<String> = folds.iter().filter(|f| !f.wins()).map(|f| f.ppb.to_string()).collect();
    let margin = best_mean - mean;
    let overall = if margin <= 0.0 {
        format!("The best baseline, {name}, wins: mean RMSE {best_mean:.4} against {mean:.4} of the geodesic model.")
    } else if noise.is_some_and(|n| margin < n) || !lost.is_empty() {
        format!(
            "No clear winner: the geodesic model has mean RMSE {mean:.4} against {best_mean:.4} of {name}, but the \
             difference is below the noise level or some folds are worse."
        )
    } else {
        format!("The geodesic model wins: mean RMSE {mean:.4} against {best_mean:.4} of the best baseline, {name}.")
    };
    match &lost[..] {
        [] => overall,
        [one] => format!("{overall} The model loses at {one} ppb."),
        [first @ .., last] => format!("{overall} The model loses at {} and {last} ppb.", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fold::tasks;
    use crate::generate::{Generator, Noise};
    use crate::spectra::{REFERENCE_PPB, reference_nm};

    /// Results with the truth plus a constant error as prediction.
    fn results(spectra: &Spectra, settings: &Settings, error: f64) -> Vec<TaskResult> {
        tasks(6, 1)
            .into_iter()
            .map(|task| TaskResult {
                task,
                prediction: spectra.row(task.fold).iter().map(|a| a + error).collect(),
                spread: vec![0.0; spectra.nm().len()],
                validation_loss: 0.0,
                training_loss: 0.0,
                steps: 1,
                parameters: String::new(),
                settings: format!("{:032x}", settings.hash()),
            })
            .collect()
    }

    #[test]
    fn verdict_names_the_winner_and_the_lost_folds() {
        let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        let settings = Settings::default();
        let report = |error| Report::new(&spectra, &settings, &results(&spectra, &settings, error), None).unwrap();
        let good = report(0.0001);
        assert!(good.verdict.starts_with("The geodesic model wins") && good.folds.iter().all(FoldReport::wins));
        assert!(good.folds.iter().all(|f| f.rmse_difference.1 < 0.0));
        let mixed = report(0.01);
        assert!(mixed.verdict.ends_with("The model loses at 10, 20, 30 and 40 ppb."), "{}", mixed.verdict);
        let losses = mixed.losses();
        assert!(losses.len() == 4 && losses[0].starts_with("10 ppb (interpolation): 0.0100 against "), "{losses:?}");
        assert!(losses[0].ends_with("so the error arises between them") && mixed.table().contains(&losses[3]));
        assert!(report(0.1).verdict.starts_with("The best baseline, RBF-GP, wins"));
        let read: Report = serde_json::from_str(&good.to_json()).unwrap();
        assert_eq!(read.verdict, good.verdict);
    }

    #[test]
    fn reports_without_all_folds_or_with_other_settings_are_refused() {
        let spectra = Generator::Mixed.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        let settings = Settings::default();
        let all = results(&spectra, &settings, 0.0);
        assert!(matches!(Report::new(&spectra, &settings, &all[1..], None), Err(Error::Incomplete(_))));
        let other = Settings { seed: 1, ..settings };
        assert!(matches!(Report::new(&spectra, &other, &all, None), Err(Error::Incomplete(_))));
        let mut twice = all.clone();
        twice.push(all[2].clone());
        assert_eq!(
            Report::new(&spectra, &settings, &twice, None).unwrap().to_json(),
            Report::new(&spectra, &settings, &all, None).unwrap().to_json()
        );
    }

    #[test]
    fn flat_held_out_spectra_have_no_r2_and_do_not_spoil_the_report() {
        let spectra = Generator::Hump.spectra(&REFERENCE_PPB, &reference_nm(), &Noise::default(), 0).unwrap();
        let settings = Settings::default();
        let report = Report::new(&spectra, &settings, &results(&spectra, &settings, 0.001), None).unwrap();
        let undefined: Vec<f64> = report.folds.iter().filter(|f| f.scores.r2.is_none()).map(|f| f.ppb).collect();
        assert_eq!(undefined, [0.0, 60.0]);
        assert!(report.table().contains("undef/0.0010") && report.pooled_r2.is_some_and(f64::is_finite));
        // Every reported fold keeps its prediction.
        assert!(report.folds.iter().all(|f| f.prediction.len() == 601 && f.truth.len() == 601));
    }
}
