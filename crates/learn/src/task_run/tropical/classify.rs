//! A tropical network and a logistic regression on the same samples.
//!
//! Stage 0 trains every candidate on the training samples and measures it on the validation samples. Stage 1 trains the best candidate of
//! either model on both and measures it on the test samples, which decide nothing.

use super::fit::{Candidate, Fit, ModelKind, Parts, fit};
use super::{Findings, Section, Workload};
use crate::report::Ink;
use crate::task_run::page::Chart;
use crate::task_run::samples::{Dataset, Split};
use crate::task_run::wire::{decode, encode};
use crate::task_run::{StageResults, Task, TaskContext, TaskError};
use engram_api::TropicalClassify;
use serde::{Deserialize, Serialize};

/// Weight decays that are tried for the logistic regression, so that it is no weaker than it can be.
const DECAYS: [f64; 3] = [0.0, 0.03, 0.3];

/// Input of a task.
#[derive(Serialize, Deserialize)]
struct Order {
    candidate: Candidate,
    /// Whether it is trained for the test samples.
    last: bool,
}

pub(super) struct ClassifyWorkload {
    settings: TropicalClassify,
    data: Dataset,
    split: Split,
}

impl ClassifyWorkload {
    pub(super) fn new(settings: &TropicalClassify, file: Option<&[u8]>) -> Result<Self, TaskError> {
        let mut data = Dataset::load(&settings.data, file, "spec.tropical.classify.data")?;
        let split = Split::of(&mut data, settings.test, settings.seed)?;
        Ok(Self { settings: settings.clone(), data, split })
    }

    fn candidates(&self) -> Vec<Candidate> {
        let rates = || self.settings.learning_rates.iter().copied();
        let network = |rate: f64| {
            (0..self.settings.starts).map(move |start| Candidate {
                model: ModelKind::Tropical,
                rate,
                decay: 0.0,
                start,
            })
        };
        let regression =
            |rate: f64| DECAYS.map(|decay| Candidate { model: ModelKind::Logistic, rate, decay, start: 0 });
        rates().flat_map(network).chain(rates().flat_map(regression)).collect()
    }

    fn parts(&self, last: bool) -> Parts {
        let (training, evaluation) = if last {
            (self.split.all_but_test(), &self.split.test)
        } else {
            (self.split.training.clone(), &self.split.validation)
        };
        Parts {
            width: self.data.width,
            classes: self.data.classes.len(),
            training: self.data.select(&training),
            evaluation: self.data.select(evaluation),
        }
    }

    fn task(&self, candidate: Candidate, last: bool) -> Task {
        let Candidate { model, rate, decay, start } = candidate;
        let (name, units) = match model {
            ModelKind::Tropical => ("tropical network", u64::from(self.settings.hidden)),
            ModelKind::Logistic => ("logistic regression", 1),
        };
        let stage = if last { "final " } else { "" };
        Task {
            name: format!("classify: {stage}{name}, rate {rate}, decay {decay}, start {}", start + 1),
            input: encode(&Order { candidate, last }),
            cost: u64::from(self.settings.epochs) * self.data.len() as u64 * self.data.width as u64 * units,
        }
    }
}

/// Returns the best candidate of a model: highest accuracy, then lowest loss, then first.
fn best_fit(fits: &[Fit], model: ModelKind) -> Result<&Fit, TaskError> {
    let own = fits.iter().filter(|fit| fit.candidate.model == model);
    let better = |a: &Fit, b: &Fit| {
        let (a, b) = (&a.evaluation, &b.evaluation);
        b.accuracy > a.accuracy || (b.accuracy == a.accuracy && b.loss < a.loss)
    };
    own.reduce(|best, fit| if better(best, fit) { fit } else { best })
        .ok_or_else(|| TaskError::Failed("no candidate was trained".to_owned()))
}

fn fits(stage: &StageResults) -> Result<Vec<Fit>, TaskError> {
    stage.iter().map(|result| decode(result)).collect()
}

impl Workload for ClassifyWorkload {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        match results {
            [] => Ok(self.candidates().into_iter().map(|it| self.task(it, false)).collect()),
            [candidates] => {
                let fits = fits(candidates)?;
                let chosen = [ModelKind::Tropical, ModelKind::Logistic].map(|model| best_fit(&fits, model));
                chosen.into_iter().map(|fit| Ok(self.task(fit?.candidate, true))).collect()
            }
            _ => Ok(Vec::new()),
        }
    }

    fn execute(&self, input: &[u8], context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let order: Order = decode(input)?;
        Ok(encode(&fit(order.candidate, &self.parts(order.last), &self.settings, context)?))
    }

    fn finish(&self, results: &[StageResults], report: &mut Findings) -> Result<(), TaskError> {
        let (candidates, last) = (fits(&results[0])?, fits(&results[1])?);
        let (network, regression) = (best_fit(&last, ModelKind::Tropical)?, best_fit(&last, ModelKind::Logistic)?);
        self.verdict(network, regression, report);
        report.section(curves(network, regression));
        report.section(self.confusion(network));
        report.section(table_of(&candidates));
        Ok(())
    }
}

impl ClassifyWorkload {
    fn verdict(&self, network: &Fit, regression: &Fit, report: &mut Findings) {
        let (ours, theirs) = (network.evaluation.accuracy, regression.evaluation.accuracy);
        let truth = || self.split.test.iter().map(|&sample| self.data.labels[sample]);
        let pairs = || network.predicted.iter().zip(&regression.predicted).zip(truth());
        let only_ours = pairs().filter(|((a, b), truth)| *a == truth && *b != truth).count();
        let only_theirs = pairs().filter(|((a, b), truth)| *a != truth && *b == truth).count();
        let winner = match ours.total_cmp(&theirs) {
            std::cmp::Ordering::Greater => "the tropical network is better",
            std::cmp::Ordering::Equal => "both are equal",
            std::cmp::Ordering::Less => "logistic regression is better",
        };
        let text = format!(
            "{} test samples of {}: tropical network {:.2} %, logistic regression {:.2} %; {winner}. {only_ours} samples are right with the \
             network alone, {only_theirs} with the regression alone.",
            self.split.test.len(),
            self.data.name,
            ours * 100.0,
            theirs * 100.0
        );
        report.verdict(ours >= theirs, text);
        report.metric("tropical_accuracy", ours);
        report.metric("logistic_accuracy", theirs);
        report.metric("tropical_loss", network.evaluation.loss);
        report.metric("logistic_loss", regression.evaluation.loss);
        report.output("classifyWinner", winner.to_owned());
        report.tile("tropical network", format!("{:.2} %", ours * 100.0), "of the test samples are right");
        report.tile("logistic regression", format!("{:.2} %", theirs * 100.0), "of the test samples are right");
    }

    /// Rows are true classes, columns are predicted ones.
    fn confusion(&self, fit: &Fit) -> Section {
        let classes = self.data.classes.len();
        let mut counts = vec![0_u32; classes * classes];
        for (&sample, &predicted) in self.split.test.iter().zip(&fit.predicted) {
            counts[self.data.labels[sample] as usize * classes + predicted as usize] += 1;
        }
        let row = |class: usize| {
            let own = &counts[class * classes..][..classes];
            let total: u32 = own.iter().sum();
            let accuracy = format!("{:.1} %", 100.0 * f64::from(own[class]) / f64::from(total.max(1)));
            let cells = own.iter().map(|count| if *count == 0 { "\u{b7}".to_owned() } else { count.to_string() });
            [self.data.classes[class].clone()].into_iter().chain(cells).chain([accuracy]).collect()
        };
        let names = self.data.classes.iter().cloned();
        let header = ["true class".to_owned()].into_iter().chain(names).chain(["right".to_owned()]).collect();
        Section {
            title: "Classes of the tropical network".to_owned(),
            caption: "Test samples by true class (rows) and predicted class (columns).".to_owned(),
            chart: None,
            table: Some((header, (0..classes).map(row).collect())),
        }
    }
}

fn curves(network: &Fit, regression: &Fit) -> Section {
    let line = |name: &str, ink: Ink, fit: &Fit| {
        let points = (1..).zip(&fit.curve).map(|(epoch, &loss)| (f64::from(epoch), loss));
        (name.to_owned(), ink, points.collect())
    };
    let lines =
        vec![line("logistic regression", Ink::Frequent, regression), line("tropical network", Ink::Memory, network)];
    Section {
        title: "Loss on the test samples".to_owned(),
        caption: "Mean cross-entropy after each pass over the training samples. Nothing was chosen by it.".to_owned(),
        chart: Some(Chart { lines, logarithmic: true, x_name: "epoch" }),
        table: None,
    }
}

fn table_of(candidates: &[Fit]) -> Section {
    let header = ["model", "step size", "weight decay", "start", "validation accuracy", "validation loss"];
    let row = |fit: &Fit| {
        let Candidate { model, rate, decay, start } = fit.candidate;
        let name = match model {
            ModelKind::Tropical => "tropical network",
            ModelKind::Logistic => "logistic regression",
        };
        let accuracy = format!("{:.2} %", fit.evaluation.accuracy * 100.0);
        let loss = format!("{:.4}", fit.evaluation.loss);
        vec![name.to_owned(), rate.to_string(), decay.to_string(), (start + 1).to_string(), accuracy, loss]
    };
    Section {
        title: "Candidates".to_owned(),
        caption: "Each was trained on the training samples alone. The best of each model by validation accuracy, then loss, was trained \
                  again on training and validation samples."
            .to_owned(),
        chart: None,
        table: Some((header.map(str::to_owned).to_vec(), candidates.iter().map(row).collect())),
    }
}
