//! Findings of a leave-one-out validation: figures, sentences, and the page.

use super::page::page;
use super::{Geodesic, Outcomes};
use crate::task_run::{TaskError, TaskFindings};
use engram_geodesic::{Baseline, FoldReport, Inversion, LeakingResult, Report, Scores, TaskResult, invert};
use std::collections::BTreeMap;

/// R2 that the model must exceed in every fold with structure.
pub(super) const REQUIRED_R2: f64 = 0.7;
/// Probability of the intervals of samples.
const CONFIDENCE: f64 = 0.9;
/// Most samples that the outputs name; all are on the page.
const MAX_NAMED_SAMPLES: usize = 16;

/// What a report says besides the leave-one-out itself.
pub(super) struct Extras {
    /// Scores of the mean prediction of the leaking models, by fold; empty without them.
    pub(super) leaking: Vec<Scores>,
    /// Scores of the geometry of two dimensions, by fold; empty unless it predicts every fold.
    pub(super) latent: Vec<Scores>,
    /// Name and estimated concentration of each sample.
    pub(super) samples: Vec<(String, Inversion)>,
}

/// Summarizes a report, the training of its models, and the predictions of models that have seen all spectra.
pub(super) fn findings(run: &Geodesic, report: &Report, outcomes: &Outcomes) -> Result<TaskFindings, TaskError> {
    let (leaking, latent) = (leaking_scores(run, report, outcomes), latent_scores(report, outcomes));
    let extras = Extras { leaking, latent, samples: samples(run, outcomes)? };
    let mut summary: Vec<String> = report.table().lines().map(str::to_owned).collect();
    summary.extend(sentences(report, &extras));
    summary.push(engine_sentence(run, outcomes));
    let clean: Vec<&TaskResult> = outcomes.folds.iter().map(|it| &it.result).collect();
    Ok(TaskFindings {
        metrics: metrics(report, &clean, &extras).into_iter().chain(engine_metric(outcomes)).collect(),
        outputs: outputs(report, &extras),
        summary,
        page: page(run, report, outcomes, &extras).render()?,
    })
}

/// The sentences after the table.
pub(super) fn sentences(report: &Report, extras: &Extras) -> Vec<String> {
    let optional = [
        latent_sentence(report, &extras.latent),
        leaking_sentence(report, &extras.leaking),
        coverage_sentence(report),
        inversion_sentence(report),
    ];
    let sample = |(name, found): &(String, Inversion)| format!("{name}: {}.", estimate(found));
    optional.into_iter().flatten().chain(extras.samples.iter().map(sample)).collect()
}

/// Largest difference of a prediction from that of the closed form; none if the closed form predicts.
fn from_closed_form(outcomes: &Outcomes) -> Option<f64> {
    outcomes.folds.iter().filter_map(|it| it.from_closed_form).reduce(f64::max)
}

fn engine_metric(outcomes: &Outcomes) -> Option<(String, f64)> {
    Some(("max_difference_from_closed_form".to_owned(), from_closed_form(outcomes)?))
}

/// Which engine predicts, and what that changes.
pub(super) fn engine_sentence(run: &Geodesic, outcomes: &Outcomes) -> String {
    match from_closed_form(outcomes) {
        None => "The closed form predicts.".into(),
        Some(difference) => format!(
            "{} predicts; its absorbances differ from those of the closed form by at most {difference:.1e}.",
            run.settings.engine.name()
        ),
    }
}

fn leaking_scores(run: &Geodesic, report: &Report, outcomes: &Outcomes) -> Vec<Scores> {
    let leaking: Vec<&LeakingResult> = outcomes.all.iter().map(|(predictions, _)| predictions).collect();
    if leaking.is_empty() || !run.leaking {
        return Vec::new();
    }
    let starts = leaking.len() as f64;
    let score = |(fold, truth): (usize, &FoldReport)| {
        let mean = |w: usize| leaking.iter().map(|it| it.predictions[fold][w]).sum::<f64>() / starts;
        let predicted: Vec<f64> = (0..report.nm.len()).map(mean).collect();
        Scores::new(&report.nm, &truth.truth, &predicted)
    };
    report.folds.iter().enumerate().map(score).collect()
}

fn latent_scores(report: &Report, outcomes: &Outcomes) -> Vec<Scores> {
    let of = |(fold, truth): (usize, &FoldReport)| {
        let mut own = outcomes.folds.iter().filter(|it| it.result.task.fold == fold);
        let predicted = own.find_map(|it| it.latent.as_ref())?;
        Some(Scores::new(&report.nm, &truth.truth, predicted))
    };
    report.folds.iter().enumerate().map(of).collect::<Option<_>>().unwrap_or_default()
}

/// How the geometry of two dimensions compares with the Gaussian process.
pub(super) fn latent_sentence(report: &Report, latent: &[Scores]) -> Option<String> {
    let at = Baseline::ALL.iter().position(|it| *it == Baseline::RbfGp)?;
    let better = |(fold, own): (&FoldReport, &Scores)| own.rmse <= fold.baselines[at].scores.rmse;
    Some(if latent.is_empty() {
        "The geometry of two dimensions has no result: it needs 5 to 16 concentrations, and geodesics that reach each of them.".into()
    } else {
        format!(
            "The geometry of two dimensions, concentration and a latent of the spectrum, has a mean RMSE of {:.4}, against {:.4} of \
             RBF-GP; it is at least as good in {} of {} folds.",
            mean_rmse(latent),
            report.baseline_mean_rmse[at],
            report.folds.iter().zip(latent).filter(|it| better(*it)).count(),
            latent.len()
        )
    })
}

fn samples(run: &Geodesic, outcomes: &Outcomes) -> Result<Vec<(String, Inversion)>, TaskError> {
    let found = |(i, sample): (usize, &engram_geodesic::Sample)| {
        let profiles: Vec<_> = outcomes.all.iter().filter_map(|(_, profiles)| profiles.get(i).cloned()).collect();
        let found = invert(&profiles, CONFIDENCE).map_err(|error| TaskError::Failed(error.to_string()))?;
        Ok((sample.name.clone(), found))
    };
    run.source.samples.iter().enumerate().map(found).collect()
}

pub(super) fn mean_rmse(scores: &[Scores]) -> f64 {
    scores.iter().map(|it| it.rmse).sum::<f64>() / scores.len() as f64
}

pub(super) fn leaking_sentence(report: &Report, leaking: &[Scores]) -> Option<String> {
    (!leaking.is_empty()).then(|| {
        format!(
            "Leaking variant, not a validation: models that have seen all spectra reach a mean RMSE of {:.4}, against {:.4} of the \
             clean models above.",
            mean_rmse(leaking),
            report.mean_rmse
        )
    })
}

/// Coverage of the calibrated bands, if there are any.
pub(super) fn coverage_sentence(report: &Report) -> Option<String> {
    let percent = |coverage: f64| 100.0 * coverage;
    let (all, interior) = (report.coverage(false)?, report.coverage(true)?);
    let by_fold = report
        .folds
        .iter()
        .filter_map(|fold| Some(format!("{} ppb {:.0} %", fold.ppb, percent(fold.band.as_ref()?.coverage))));
    Some(format!(
        "The 90 % bands contain {:.0} % of the held-out absorbances, {:.0} % in the interior folds ({}).",
        percent(all),
        percent(interior),
        by_fold.collect::<Vec<_>>().join(", ")
    ))
}

/// An estimated concentration with its interval.
pub(super) fn estimate(found: &Inversion) -> String {
    let limit = if found.at_limit { ", at the end of the range that was searched" } else { "" };
    format!(
        "{:.1} ppb, 90 % interval {:.1} to {:.1}, RMSE of the closest prediction {:.4}{limit}",
        found.ppb, found.low, found.high, found.rmse
    )
}

fn errors_ppb(report: &Report) -> Vec<f64> {
    let error = |fold: &FoldReport| Some((fold.inversion.as_ref()?.ppb - fold.ppb).abs());
    report.folds.iter().filter_map(error).collect()
}

fn intervals_that_hold(report: &Report) -> usize {
    let holds = |fold: &&FoldReport| fold.inversion.is_some_and(|it| it.low <= fold.ppb && fold.ppb <= it.high);
    report.folds.iter().filter(holds).count()
}

/// How well concentrations are estimated from held-out spectra.
pub(super) fn inversion_sentence(report: &Report) -> Option<String> {
    let errors = errors_ppb(report);
    (!errors.is_empty()).then(|| {
        format!(
            "Concentrations estimated from the held-out spectra are off by {:.1} ppb in the mean; {} of {} intervals of 90 % contain the \
             true one.",
            errors.iter().sum::<f64>() / errors.len() as f64,
            intervals_that_hold(report),
            errors.len()
        )
    })
}

pub(super) fn best_baseline(report: &Report) -> (Baseline, f64) {
    let means = Baseline::ALL.into_iter().zip(report.baseline_mean_rmse.iter().copied());
    means.min_by(|a, b| a.1.total_cmp(&b.1)).expect("there are six baselines")
}

fn metrics(report: &Report, clean: &[&TaskResult], extras: &Extras) -> BTreeMap<String, f64> {
    let folds = &report.folds;
    let mean = |of: fn(&FoldReport) -> f64| folds.iter().map(of).sum::<f64>() / folds.len() as f64;
    let mut metrics = BTreeMap::from([
        ("folds".to_owned(), folds.len() as f64),
        ("folds_won".to_owned(), folds.iter().filter(|fold| fold.wins()).count() as f64),
        ("mean_rmse".to_owned(), report.mean_rmse),
        ("mean_mae".to_owned(), mean(|fold| fold.scores.mae)),
        ("best_baseline_mean_rmse".to_owned(), best_baseline(report).1),
        ("training_steps".to_owned(), clean.iter().map(|it| it.steps).sum::<u64>() as f64),
    ]);
    let least = folds.iter().filter_map(|fold| fold.scores.r2).min_by(f64::total_cmp);
    let errors = errors_ppb(report);
    let optional = [
        ("pooled_r2", report.pooled_r2),
        ("min_r2", least),
        ("noise_level", report.noise_level),
        ("leaking_mean_rmse", (!extras.leaking.is_empty()).then(|| mean_rmse(&extras.leaking))),
        ("two_dimensional_mean_rmse", (!extras.latent.is_empty()).then(|| mean_rmse(&extras.latent))),
        ("band_coverage", report.coverage(false)),
        ("band_coverage_interior", report.coverage(true)),
        ("concentration_error_ppb", (!errors.is_empty()).then(|| errors.iter().sum::<f64>() / errors.len() as f64)),
        ("concentration_intervals_held", (!errors.is_empty()).then(|| intervals_that_hold(report) as f64)),
    ];
    metrics.extend(optional.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    metrics
}

fn outputs(report: &Report, extras: &Extras) -> BTreeMap<String, String> {
    let (baseline, mean) = best_baseline(report);
    let winner = if report.mean_rmse < mean { "geodesic model" } else { baseline.name() };
    let mut outputs = BTreeMap::from([
        ("verdict".to_owned(), report.verdict.clone()),
        ("lowest_mean_rmse".to_owned(), winner.to_owned()),
        ("settings".to_owned(), report.settings.clone()),
    ]);
    let named = extras.samples.iter().take(MAX_NAMED_SAMPLES);
    outputs.extend(named.map(|(name, found)| (format!("sample_{name}"), estimate(found))));
    outputs
}
