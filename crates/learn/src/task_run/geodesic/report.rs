//! The report of a leave-one-out validation.

use super::super::page::{Chart, Page, Section};
use super::Geodesic;
use crate::report::Ink;
use crate::task_run::{TaskError, TaskFindings};
use engram_geodesic::{Baseline, FoldReport, LeakingResult, Report, Scores, TaskResult};
use std::collections::BTreeMap;

/// R2 that the model must exceed in every fold with structure.
const REQUIRED_R2: f64 = 0.7;

/// Summarizes a report, the training of its models, and the predictions of models that have seen all spectra.
pub(super) fn findings(
    run: &Geodesic,
    report: &Report,
    clean: &[TaskResult],
    leaking: &[LeakingResult],
) -> Result<TaskFindings, TaskError> {
    let leaking = leaking_scores(report, leaking);
    let mut summary: Vec<String> = report.table().lines().map(str::to_owned).collect();
    summary.extend(leaking_sentence(report, &leaking));
    Ok(TaskFindings {
        metrics: metrics(report, clean, &leaking),
        outputs: outputs(report),
        summary,
        page: page(run, report, clean, &leaking).render()?,
    })
}

/// Scores of the mean prediction of the leaking models, by fold.
fn leaking_scores(report: &Report, leaking: &[LeakingResult]) -> Vec<Scores> {
    if leaking.is_empty() {
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

fn mean_rmse(scores: &[Scores]) -> f64 {
    scores.iter().map(|it| it.rmse).sum::<f64>() / scores.len() as f64
}

fn leaking_sentence(report: &Report, leaking: &[Scores]) -> Option<String> {
    (!leaking.is_empty()).then(|| {
        format!(
            "Leaking variant, not a validation: models that have seen all spectra reach a mean RMSE of {:.4}, against {:.4} of the \
             clean models above.",
            mean_rmse(leaking),
            report.mean_rmse
        )
    })
}

fn best_baseline(report: &Report) -> (Baseline, f64) {
    let means = Baseline::ALL.into_iter().zip(report.baseline_mean_rmse.iter().copied());
    means.min_by(|a, b| a.1.total_cmp(&b.1)).expect("there are six baselines")
}

fn metrics(report: &Report, clean: &[TaskResult], leaking: &[Scores]) -> BTreeMap<String, f64> {
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
    metrics.extend(report.pooled_r2.map(|r2| ("pooled_r2".to_owned(), r2)));
    let least = folds.iter().filter_map(|fold| fold.scores.r2).min_by(f64::total_cmp);
    metrics.extend(least.map(|r2| ("min_r2".to_owned(), r2)));
    metrics.extend(report.noise_level.map(|level| ("noise_level".to_owned(), level)));
    if !leaking.is_empty() {
        metrics.insert("leaking_mean_rmse".to_owned(), mean_rmse(leaking));
    }
    metrics
}

fn outputs(report: &Report) -> BTreeMap<String, String> {
    let (baseline, mean) = best_baseline(report);
    let winner = if report.mean_rmse < mean { "geodesic model" } else { baseline.name() };
    BTreeMap::from([
        ("verdict".to_owned(), report.verdict.clone()),
        ("lowest_mean_rmse".to_owned(), winner.to_owned()),
        ("settings".to_owned(), report.settings.clone()),
    ])
}

fn page(run: &Geodesic, report: &Report, clean: &[TaskResult], leaking: &[Scores]) -> Page {
    let (baseline, mean) = best_baseline(report);
    let wins = report.verdict.starts_with("The geodesic model wins");
    let weak: Vec<String> = report
        .folds
        .iter()
        .filter(|fold| fold.scores.r2.is_some_and(|r2| r2 <= REQUIRED_R2))
        .map(|fold| format!("{} ppb", fold.ppb))
        .collect();
    let r2 = if weak.is_empty() {
        (true, format!("R2 is above {REQUIRED_R2} in every fold with structure."))
    } else {
        (false, format!("R2 is {REQUIRED_R2} or less at {}.", weak.join(", ")))
    };
    let number = |value: Option<f64>| value.map_or("undefined".to_owned(), |value| format!("{value:.4}"));
    let mut sections = vec![scores(report), baselines(report, leaking)];
    sections.extend(report.folds.iter().map(|fold| spectrum(report, fold)));
    sections.push(starts(report, clean));
    Page {
        kind: "Geodesic run",
        title: "Leave-one-out of the geodesic spectral model".into(),
        about: format!(
            "{}: {} concentrations, {} wavelengths, {} start{} per fold. Each fold is predicted by models that have not seen its \
             spectrum; scaling, early stopping and settings come from the other spectra.",
            run.source,
            report.folds.len(),
            report.nm.len(),
            run.starts,
            if run.starts == 1 { "" } else { "s" }
        ),
        verdicts: [(wins, report.verdict.clone()), r2]
            .into_iter()
            .chain(leaking_sentence(report, leaking).map(|text| (false, text)))
            .collect(),
        tiles: vec![
            ("mean RMSE", format!("{:.4}", report.mean_rmse), "of the geodesic model over the folds".into()),
            ("best baseline", format!("{mean:.4}"), format!("mean RMSE of {}", baseline.name())),
            ("pooled R2", number(report.pooled_r2), "over all folds and wavelengths".into()),
            ("noise level", number(report.noise_level), "differences below it are not results".into()),
        ],
        sections,
        foot: format!("Settings {}. {} models.", report.settings, clean.len()),
    }
}

/// Scores of the model per fold.
fn scores(report: &Report) -> Section {
    let header =
        ["fold", "R2", "RMSE", "MAE", "peak error (nm)", "cosine", "angle", "derivatives", "against the best baseline"];
    let text =
        |value: Option<f64>, digits: usize| value.map_or("undefined".into(), |value| format!("{value:.digits$}"));
    let row = |fold: &FoldReport| {
        let (s, (low, high)) = (&fold.scores, fold.rmse_difference);
        let kind = if fold.extrapolation { ", extrapolation" } else { "" };
        vec![
            format!("{} ppb{kind}", fold.ppb),
            text(s.r2, 4),
            format!("{:.4}", s.rmse),
            format!("{:.4}", s.mae),
            text(s.peak_error_nm, 1),
            text(s.cosine, 5),
            text(s.spectral_angle, 4),
            text(s.derivative_correlation, 4),
            format!("{:+.4} ({low:+.4} to {high:+.4})", s.rmse - fold.best_baseline_rmse()),
        ]
    };
    Section {
        title: "Scores per fold".into(),
        caption: "Scores of the mean prediction of all starts. Peaks are sought at 500 nm and above. The last column is the RMSE minus \
                  that of the best baseline of the fold, with the 5 % and 95 % quantiles of a paired bootstrap over blocks of 20 nm."
            .into(),
        chart: None,
        table: Some((header.map(str::to_owned).to_vec(), report.folds.iter().map(row).collect())),
    }
}

/// RMSE of the model and the baselines per fold.
fn baselines(report: &Report, leaking: &[Scores]) -> Section {
    let mut header = vec!["RMSE".to_owned()];
    header.extend(report.folds.iter().map(|fold| format!("{} ppb", fold.ppb)));
    header.push("mean".into());
    let row = |name: &str, values: Vec<f64>, mean: f64| {
        let numbers = values.into_iter().chain([mean]).map(|value| format!("{value:.4}"));
        [name.to_owned()].into_iter().chain(numbers).collect::<Vec<String>>()
    };
    let model = report.folds.iter().map(|fold| fold.scores.rmse).collect();
    let mut rows = vec![row("geodesic model", model, report.mean_rmse)];
    for (b, baseline) in Baseline::ALL.iter().enumerate() {
        let values = report.folds.iter().map(|fold| fold.baselines[b].scores.rmse).collect();
        rows.push(row(baseline.name(), values, report.baseline_mean_rmse[b]));
    }
    if !leaking.is_empty() {
        let values = leaking.iter().map(|it| it.rmse).collect();
        rows.push(row("leaking variant (has seen the spectra)", values, mean_rmse(leaking)));
    }
    Section {
        title: "Baselines on the same folds".into(),
        caption: "A result counts only if every fold is at least as good as the best simple baseline.".into(),
        chart: None,
        table: Some((header, rows)),
    }
}

/// Measured and predicted spectrum of a fold.
fn spectrum(report: &Report, fold: &FoldReport) -> Section {
    let line = |values: &dyn Fn(usize) -> f64| report.nm.iter().enumerate().map(|(w, nm)| (*nm, values(w))).collect();
    let residual = |w: usize| fold.truth[w] - fold.prediction[w];
    let spread = fold.deviation.iter().sum::<f64>() / fold.deviation.len() as f64;
    Section {
        title: format!("{} ppb", fold.ppb),
        caption: format!(
            "Absorbance over wavelength in nm. {} RMSE {:.4}, {:.4} of the best baseline, {}. Mean standard deviation over the starts \
             {spread:.4}.",
            if fold.extrapolation { "Extrapolation." } else { "Interpolation." },
            fold.scores.rmse,
            fold.best_baseline_rmse(),
            fold.best_baseline.name()
        ),
        chart: Some(Chart {
            lines: vec![
                ("measured".into(), Ink::Frequent, line(&|w| fold.truth[w])),
                ("predicted".into(), Ink::Memory, line(&|w| fold.prediction[w])),
                ("residual".into(), Ink::Recent, line(&residual)),
            ],
            logarithmic: false,
            x_name: "nm",
        }),
        table: None,
    }
}

/// Training of each model.
fn starts(report: &Report, clean: &[TaskResult]) -> Section {
    let header = ["model", "steps", "training loss", "validation loss", "RMSE", "parameters"];
    let row = |result: &TaskResult| {
        let fold = &report.folds[result.task.fold];
        let rmse = fold.start_rmse.get(result.task.start as usize).map_or("-".into(), |rmse| format!("{rmse:.4}"));
        vec![
            format!("{} ppb, start {}", fold.ppb, result.task.start + 1),
            result.steps.to_string(),
            format!("{:.3e}", result.training_loss),
            format!("{:.3e}", result.validation_loss),
            rmse,
            result.parameters.chars().take(12).collect(),
        ]
    };
    Section {
        title: "Training".into(),
        caption: "Standardised losses of each model; the validation split is a part of the wavelengths of the training spectra.".into(),
        chart: None,
        table: Some((header.map(str::to_owned).to_vec(), clean.iter().map(row).collect())),
    }
}
