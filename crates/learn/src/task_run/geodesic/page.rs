//! The report page of a leave-one-out validation.

use super::super::page::{Chart, Page, Points, Section};
use super::report::{
    Extras, REQUIRED_R2, best_baseline, coverage_sentence, engine_sentence, estimate, inversion_sentence,
    latent_sentence, leaking_sentence, mean_rmse,
};
use super::{FoldOutcome, Geodesic, Outcomes};
use crate::report::Ink;
use engram_geodesic::{Agreement, Baseline, FoldReport, Report};

/// Inks of lines that have no meaning of their own.
const INKS: [Ink; 5] = [Ink::Memory, Ink::Frequent, Ink::Recent, Ink::Punished, Ink::Axis];

pub(super) fn page(run: &Geodesic, report: &Report, outcomes: &Outcomes, extras: &Extras) -> Page {
    let (baseline, mean) = best_baseline(report);
    let number = |value: Option<f64>| value.map_or("undefined".to_owned(), |value| format!("{value:.4}"));
    let mut sections = vec![scores(report), differences(report), baselines(report, extras)];
    sections.extend(samples(extras));
    sections.push(inversions(report));
    sections.extend(report.folds.iter().flat_map(|fold| [spectrum(report, fold), residuals(report, fold)]));
    sections
        .extend(shown_model(report, outcomes).into_iter().flat_map(|it| [metric(report, it), geodesics(report, it)]));
    sections.extend([engines(run, report, outcomes), losses(report, outcomes), starts(report, outcomes)]);
    let models = outcomes.folds.len() + outcomes.all.len() + outcomes.calibrations.len();
    Page {
        kind: "Geodesic run",
        title: "Leave-one-out of the geodesic spectral model".into(),
        about: format!(
            "{}: {} concentrations, {} wavelengths, {} start{} per fold. Each fold is predicted by models that have not seen its \
             spectrum; scaling, early stopping and settings come from the other spectra.",
            run.source.description,
            report.folds.len(),
            report.nm.len(),
            run.starts,
            if run.starts == 1 { "" } else { "s" }
        ),
        verdicts: verdicts(report, extras),
        tiles: vec![
            ("mean RMSE", format!("{:.4}", report.mean_rmse), "of the geodesic model over the folds".into()),
            ("best baseline", format!("{mean:.4}"), format!("mean RMSE of {}", baseline.name())),
            ("pooled R2", number(report.pooled_r2), "over all folds and wavelengths".into()),
            ("noise level", number(report.noise_level), "differences below it are not results".into()),
        ],
        sections,
        foot: format!("Settings {}. {models} models.", report.settings),
    }
}

/// Sentences on top of the page, each with whether it is a good one.
fn verdicts(report: &Report, extras: &Extras) -> Vec<(bool, String)> {
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
    let mean = best_baseline(report).1;
    let wins = report.verdict.starts_with("The geodesic model wins");
    let covers = report.coverage(true).is_some_and(|coverage| coverage >= 0.8);
    let inverts = report.folds.iter().filter(|it| !it.extrapolation).all(holds);
    [(wins, report.verdict.clone()), r2]
        .into_iter()
        .chain(coverage_sentence(report).map(|text| (covers, text)))
        .chain(inversion_sentence(report).map(|text| (inverts, text)))
        .chain(
            latent_sentence(report, &extras.latent)
                .map(|text| (!extras.latent.is_empty() && mean_rmse(&extras.latent) <= mean, text)),
        )
        .chain(leaking_sentence(report, &extras.leaking).map(|text| (false, text)))
        .collect()
}

fn holds(fold: &FoldReport) -> bool {
    fold.inversion.is_none_or(|it| it.low <= fold.ppb && fold.ppb <= it.high)
}

/// Scores of the model per fold.
fn scores(report: &Report) -> Section {
    let header = ["fold", "R2", "RMSE", "MAE", "peak error (nm)", "cosine", "angle", "derivatives"];
    let text =
        |value: Option<f64>, digits: usize| value.map_or("undefined".into(), |value| format!("{value:.digits$}"));
    let row = |fold: &FoldReport| {
        let s = &fold.scores;
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
        ]
    };
    Section {
        title: "Scores per fold".into(),
        caption: "Scores of the mean prediction of all starts. Peaks are sought at 500 nm and above. Angle: between the spectra as \
                  vectors, in radians. Derivatives: correlation of the slopes, which noise lowers."
            .into(),
        chart: None,
        table: Some((header.map(str::to_owned).to_vec(), report.folds.iter().map(row).collect())),
    }
}

/// The model next to the best baseline of each fold, and why it loses.
fn differences(report: &Report) -> Section {
    let header = ["fold", "RMSE", "best baseline", "its RMSE", "difference", "5 % to 95 %", "fit", "result"];
    let row = |fold: &FoldReport| {
        let (low, high) = fold.rmse_difference;
        let result = match (fold.wins(), fold.is_underfitted(), fold.extrapolation) {
            (true, ..) => "wins",
            (false, true, _) => "loses: underfitted",
            (false, false, true) => "loses: extrapolation",
            (false, false, false) => "loses: interpolation",
        };
        vec![
            format!("{} ppb", fold.ppb),
            format!("{:.4}", fold.scores.rmse),
            fold.best_baseline.name().to_owned(),
            format!("{:.4}", fold.best_baseline_rmse()),
            format!("{:+.4}", fold.scores.rmse - fold.best_baseline_rmse()),
            format!("{low:+.4} to {high:+.4}"),
            format!("{:.4}", fold.fit_error),
            result.to_owned(),
        ]
    };
    Section {
        title: "Against the best baseline of each fold".into(),
        caption: "Difference: RMSE of the model minus that of the baseline, with quantiles of a paired bootstrap over blocks of 20 nm. \
                  Fit: error of the models in differences between their training spectra, at wavelengths that they were not trained \
                  on. A model whose fit is above half of its RMSE is underfitted: more training steps help. Otherwise the error arises \
                  between or outside the training spectra."
            .into(),
        chart: None,
        table: Some((header.map(str::to_owned).to_vec(), report.folds.iter().map(row).collect())),
    }
}

/// RMSE of the model and the baselines per fold.
fn baselines(report: &Report, extras: &Extras) -> Section {
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
    let others =
        [("geometry of two dimensions", &extras.latent), ("leaking variant (has seen the spectra)", &extras.leaking)];
    for (name, scores) in others.into_iter().filter(|(_, scores)| !scores.is_empty()) {
        rows.push(row(name, scores.iter().map(|it| it.rmse).collect(), mean_rmse(scores)));
    }
    let line = |of: &dyn Fn(&FoldReport) -> f64| -> Points {
        // The scale is logarithmic.
        report.folds.iter().map(|fold| (fold.ppb, of(fold).max(1e-9))).collect()
    };
    let drawn = [Baseline::RbfGp, Baseline::Pchip, Baseline::LinearClamped, Baseline::MeanOfOthers];
    let mut lines = vec![("geodesic model".to_owned(), INKS[0], line(&|fold| fold.scores.rmse))];
    for (baseline, ink) in drawn.into_iter().zip(&INKS[1..]) {
        let b = Baseline::ALL.iter().position(|it| *it == baseline).expect("all baselines are listed");
        lines.push((baseline.name().to_owned(), *ink, line(&|fold| fold.baselines[b].scores.rmse)));
    }
    Section {
        title: "Baselines on the same folds".into(),
        caption: "RMSE over the held-out concentration in ppb; lower is better. A result counts only if every fold is at least as good \
                  as the best simple baseline. The geometry of two dimensions is no baseline: it learns, per principal component of the \
                  training spectra, a metric of the plane of concentration and latent in which one geodesic passes through all training \
                  spectra."
            .into(),
        chart: Some(Chart { lines, logarithmic: true, x_name: "ppb" }),
        table: Some((header, rows)),
    }
}

/// Estimated concentrations of the samples, if there are any.
fn samples(extras: &Extras) -> Option<Section> {
    let row = |(name, found): &(String, engram_geodesic::Inversion)| vec![name.clone(), estimate(found)];
    (!extras.samples.is_empty()).then(|| Section {
        title: "Samples of unknown concentration".into(),
        caption: "Estimated by models that were trained on all spectra. A closest prediction that is farther away than the noise \
                  means that the sample is not what the spectra describe."
            .into(),
        chart: None,
        table: Some((
            vec!["sample".into(), "concentration".into()],
            extras.samples.iter().map(row).collect(),
        )),
    })
}

/// Concentrations estimated from the held-out spectra.
fn inversions(report: &Report) -> Section {
    let header = ["fold", "estimate (ppb)", "error (ppb)", "90 % interval", "contains the true one", "RMSE"];
    let row = |fold: &FoldReport| {
        let found = fold.inversion?;
        Some(vec![
            format!("{} ppb", fold.ppb),
            format!("{:.2}{}", found.ppb, if found.at_limit { " (end of the range)" } else { "" }),
            format!("{:+.2}", found.ppb - fold.ppb),
            format!("{:.2} to {:.2}", found.low, found.high),
            if holds(fold) { "yes".into() } else { "no".into() },
            format!("{:.4}", found.rmse),
        ])
    };
    Section {
        title: "Concentration from a spectrum".into(),
        caption: "The concentration whose predicted spectrum is closest to the held-out one, by the models that have not seen it. The \
                  interval is a bootstrap over blocks of 20 nm and over the starts."
            .into(),
        chart: None,
        table: Some((header.map(str::to_owned).to_vec(), report.folds.iter().filter_map(row).collect())),
    }
}

/// The outline of a band between two curves over the wavelengths.
fn outline(nm: &[f64], low: &dyn Fn(usize) -> f64, high: &dyn Fn(usize) -> f64) -> Points {
    let forth = (0..nm.len()).map(|w| (nm[w], low(w)));
    let back = (0..nm.len()).rev().map(|w| (nm[w], high(w)));
    forth.chain(back).chain([(nm[0], low(0))]).collect()
}

/// Measured and predicted spectrum of a fold.
fn spectrum(report: &Report, fold: &FoldReport) -> Section {
    let line = |values: &dyn Fn(usize) -> f64| report.nm.iter().enumerate().map(|(w, nm)| (*nm, values(w))).collect();
    let spread = fold.deviation.iter().sum::<f64>() / fold.deviation.len() as f64;
    let mut lines = Vec::new();
    if let Some(band) = &fold.band {
        let outline = outline(&report.nm, &|w| band.low[w], &|w| band.high[w]);
        lines.push(("90 % band".to_owned(), Ink::Memory, outline));
    }
    lines.push(("measured".to_owned(), Ink::Frequent, line(&|w| fold.truth[w])));
    lines.push(("predicted".to_owned(), Ink::Memory, line(&|w| fold.prediction[w])));
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
        chart: Some(Chart { lines, logarithmic: false, x_name: "nm" }),
        table: None,
    }
}

/// What remains of a fold's spectrum.
fn residuals(report: &Report, fold: &FoldReport) -> Section {
    let mut lines = Vec::new();
    if let Some(band) = &fold.band {
        let below = |w: usize| band.low[w] - fold.prediction[w];
        let above = |w: usize| band.high[w] - fold.prediction[w];
        lines.push(("90 % band".to_owned(), Ink::Memory, outline(&report.nm, &below, &above)));
    }
    let residual = (0..report.nm.len()).map(|w| (report.nm[w], fold.truth[w] - fold.prediction[w]));
    lines.push(("measured minus predicted".to_owned(), Ink::Recent, residual.collect()));
    let covered = fold.band.as_ref().map(|band| format!(" The band contains {:.0} % of it.", 100.0 * band.coverage));
    Section {
        title: format!("{} ppb: residual", fold.ppb),
        caption: format!("Absorbance over wavelength in nm.{}", covered.unwrap_or_default()),
        chart: Some(Chart { lines, logarithmic: false, x_name: "nm" }),
        table: None,
    }
}

/// The model whose metric is shown: the first start of a fold in the middle.
fn shown_model<'a>(report: &Report, outcomes: &'a Outcomes) -> Option<&'a FoldOutcome> {
    outcomes.folds.iter().find(|it| it.result.task.fold == report.folds.len() / 2)
}

fn metric(report: &Report, outcome: &FoldOutcome) -> Section {
    let figure = &outcome.metric;
    let fold = &report.folds[outcome.result.task.fold];
    let line = |(i, nm): (usize, &f64)| {
        let points = figure.ppb.iter().copied().zip(figure.g[i].iter().copied()).collect();
        (format!("{nm:.0} nm"), INKS[i % INKS.len()], points)
    };
    let row = |(i, nm): (usize, &f64)| {
        let range = |values: &[f64]| {
            let (low, high) =
                values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(a, b), x| (a.min(*x), b.max(*x)));
            format!("{low:.3} to {high:.3}")
        };
        vec![format!("{nm:.0} nm"), range(&figure.g[i]), range(&figure.gamma[i])]
    };
    Section {
        title: "Learned metric".into(),
        caption: format!(
            "g over concentration in ppb, of the model without {} ppb. Between two concentrations only its integrals are determined by \
             the data; its shape there is that of the smoothness term.",
            fold.ppb
        ),
        chart: Some(Chart {
            lines: figure.nm.iter().enumerate().map(line).collect(),
            logarithmic: false,
            x_name: "ppb",
        }),
        table: Some((
            ["wavelength", "g", "Christoffel symbol"].map(str::to_owned).to_vec(),
            figure.nm.iter().enumerate().map(row).collect(),
        )),
    }
}

fn geodesics(report: &Report, outcome: &FoldOutcome) -> Section {
    let figure = &outcome.metric;
    let points =
        |of: &dyn Fn(usize) -> f64| (0..figure.times.len()).map(|t| (100.0 * figure.times[t], of(t))).collect();
    let mut lines: Vec<(String, Ink, Points)> = Vec::new();
    for (i, nm) in figure.nm.iter().enumerate() {
        let path = &figure.paths[i];
        let straight = |t: usize| path[0] + figure.times[t] * (path[path.len() - 1] - path[0]);
        lines.push((format!("{nm:.0} nm"), INKS[i % INKS.len()], points(&|t| path[t] - straight(t))));
    }
    lines.push(("straight line".to_owned(), Ink::Grid, points(&|_| 0.0)));
    Section {
        title: "Geodesics".into(),
        caption: format!(
            "Distance in ppb between the geodesic from the lowest to the highest concentration and the straight line, over time in %, \
             of the model without {} ppb.",
            report.folds[outcome.result.task.fold].ppb
        ),
        chart: Some(Chart { lines, logarithmic: false, x_name: "time in %" }),
        table: None,
    }
}

/// Agreement of the engines on the trained metrics, and that of the predictions with those of the closed form.
fn engines(run: &Geodesic, report: &Report, outcomes: &Outcomes) -> Section {
    let header = [
        "model",
        "engine",
        "problems solved by both",
        "not solved",
        "c(t), axis -1 to 1",
        "c'(0), relative",
        "residual",
    ];
    let row = |(outcome, it): (&FoldOutcome, &Agreement)| {
        let result = &outcome.result;
        vec![
            format!("{} ppb, start {}", report.folds[result.task.fold].ppb, result.task.start + 1),
            it.engine.clone(),
            it.compared.to_string(),
            it.unsolved.to_string(),
            format!("{:.1e}", it.max_position),
            format!("{:.1e}", it.max_velocity),
            format!("{:.1e}", it.max_residual),
        ]
    };
    let rows = outcomes.folds.iter().flat_map(|outcome| outcome.agreements.iter().map(move |it| (outcome, it)));
    Section {
        title: "Agreement of the engines".into(),
        caption: format!(
            "Largest differences of shooting, and of shooting over a grid of Christoffel symbols, from the closed form on the trained \
             metrics: geodesics over the whole axis at five wavelengths. {}",
            engine_sentence(run, outcomes)
        ),
        chart: None,
        table: Some((header.map(str::to_owned).to_vec(), rows.map(row).collect())),
    }
}

/// Losses of the first start of each fold, as far as there are inks.
fn losses(report: &Report, outcomes: &Outcomes) -> Section {
    let first = outcomes.folds.iter().filter(|it| it.result.task.start == 0).take(INKS.len());
    let line = |(outcome, ink): (&FoldOutcome, &Ink)| {
        let points = outcome.losses.iter().map(|it| (it.step as f64, it.validation.max(1e-12)));
        (format!("{} ppb", report.folds[outcome.result.task.fold].ppb), *ink, points.collect())
    };
    Section {
        title: "Loss curves".into(),
        caption:
            "Least standardised loss of the inner validation split over steps, of the first start of the first folds."
                .into(),
        chart: Some(Chart { lines: first.zip(&INKS).map(line).collect(), logarithmic: true, x_name: "step" }),
        table: None,
    }
}

/// Training of each model.
fn starts(report: &Report, outcomes: &Outcomes) -> Section {
    let header = ["model", "steps", "training loss", "validation loss", "RMSE", "parameters"];
    let row = |outcome: &FoldOutcome| {
        let result = &outcome.result;
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
        table: Some((header.map(str::to_owned).to_vec(), outcomes.folds.iter().map(row).collect())),
    }
}
