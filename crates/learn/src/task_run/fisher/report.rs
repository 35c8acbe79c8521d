//! Figures, sentences and page of a Fisher run.

use super::curve::{Curve, Method};
use super::{FisherTasks, Trained};
use crate::report::Ink;
use crate::task_run::page::{Chart, Page, Section};
use crate::task_run::{TaskError, TaskFindings};
use engram_information::FisherMatrix;
use xxhash_rust::xxh3::xxh3_64;

/// Eigenvalues below this share of the largest one are rounding errors of f32 scores.
const RANK: f64 = 1e-10;
/// The smallest eigenvalue may be this share of the mean below 0, by rounding.
const NEGATIVE: f64 = 1e-6;

/// What the spectrum says.
struct Spectrum {
    /// Descending.
    values: Vec<f64>,
    rank: usize,
    effective: f64,
    /// Whether no eigenvalue is negative beyond rounding.
    positive: bool,
}

impl Spectrum {
    fn of(ascending: &[f64], matrix: &FisherMatrix, damping: f64) -> Self {
        let values: Vec<f64> = ascending.iter().rev().copied().collect();
        let largest = values.first().copied().unwrap_or(0.0);
        let rank = values.iter().filter(|&&it| it > RANK * largest).count();
        let share = |&value: &f64| value.max(0.0) / (value.max(0.0) + damping);
        let effective = if damping > 0.0 { values.iter().map(share).sum() } else { rank as f64 };
        let smallest = values.last().copied().unwrap_or(0.0);
        Self { positive: smallest >= -NEGATIVE * matrix.trace() / values.len() as f64, values, rank, effective }
    }
}

/// Returns the curve of a method with the lowest validation loss.
fn best_curve(curves: &[Curve], method: Method) -> Result<&Curve, TaskError> {
    let own = curves.iter().filter(|curve| curve.method == method);
    own.min_by(|a, b| a.validation.loss.total_cmp(&b.validation.loss))
        .ok_or_else(|| TaskError::Failed(format!("there is no curve of {}", method.name())))
}

impl FisherTasks {
    pub(super) fn summarize(
        &self,
        trained: &Trained,
        curves: &[Curve],
        matrix: &FisherMatrix,
        eigenvalues: &[f64],
    ) -> Result<TaskFindings, TaskError> {
        let spectrum = Spectrum::of(eigenvalues, matrix, self.spec.damping);
        let (natural, sgd) = (best_curve(curves, Method::Natural)?, best_curve(curves, Method::Sgd)?);
        let verdicts = self.verdicts(trained, &spectrum, natural, sgd);
        let tile = |name, value: String, note: &str| (name, value, note.to_owned());
        let page = Page {
            kind: "Fisher run",
            title: "Fisher information of a classifier".to_owned(),
            about: format!(
                "{}: {} parameters, {} Fisher matrix over {} samples, damping {}.",
                self.data.name,
                self.parameters,
                self.spec.form,
                matrix.samples(),
                self.spec.damping
            ),
            verdicts: verdicts.clone(),
            tiles: vec![
                tile("test accuracy", format!("{:.2} %", trained.test.accuracy * 100.0), "of the trained classifier"),
                tile("effective dimension", format!("{:.1}", spectrum.effective), "sum of l / (l + damping)"),
                tile("rank", format!("{} of {}", spectrum.rank, self.parameters), "eigenvalues above rounding"),
                tile("trace", format!("{:.4}", matrix.trace()), "sum of the eigenvalues"),
            ],
            sections: vec![spectrum.section(), curve_section(natural, sgd), self.classes(trained), candidates(curves)],
            foot:
                "The matrix is summed in partition-invariant order: the same bits for any number of shards and workers."
                    .to_owned(),
        };
        let mut bytes = Vec::new();
        crate::task_run::wire::put_f64(&mut bytes, matrix.packed());
        Ok(TaskFindings {
            metrics: self.metrics(trained, &spectrum, natural, sgd, matrix),
            outputs: [("fisherDigest".to_owned(), format!("{:016x}", xxh3_64(&bytes)))].into(),
            summary: verdicts.into_iter().map(|(_, text)| text).collect(),
            page: page.render()?,
        })
    }

    fn metrics(
        &self,
        trained: &Trained,
        spectrum: &Spectrum,
        natural: &Curve,
        sgd: &Curve,
        matrix: &FisherMatrix,
    ) -> std::collections::BTreeMap<String, f64> {
        let last = |curve: &Curve| curve.losses.last().copied().unwrap_or(f64::MAX);
        [
            ("parameters", self.parameters as f64),
            ("test_accuracy", trained.test.accuracy),
            ("test_loss", trained.test.loss),
            ("fisher_trace", matrix.trace()),
            ("fisher_rank", spectrum.rank as f64),
            ("fisher_largest_eigenvalue", spectrum.values.first().copied().unwrap_or(0.0)),
            ("fisher_smallest_eigenvalue", spectrum.values.last().copied().unwrap_or(0.0)),
            ("effective_dimension", spectrum.effective),
            ("natural_gradient_loss", last(natural)),
            ("natural_gradient_accuracy", natural.test.accuracy),
            ("sgd_loss", last(sgd)),
            ("sgd_accuracy", sgd.test.accuracy),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }

    fn verdicts(&self, trained: &Trained, spectrum: &Spectrum, natural: &Curve, sgd: &Curve) -> Vec<(bool, String)> {
        let last = |curve: &Curve| curve.losses.last().copied().unwrap_or(f64::MAX);
        let sign =
            if spectrum.positive { "no eigenvalue is negative beyond rounding" } else { "an eigenvalue is NEGATIVE" };
        let matrix = format!(
            "{} Fisher matrix of {} parameters at a test accuracy of {:.2} %: rank {}, effective dimension {:.1}; {sign}.",
            self.spec.form,
            self.parameters,
            trained.test.accuracy * 100.0,
            spectrum.rank,
            spectrum.effective
        );
        let (ours, theirs) = (last(natural), last(sgd));
        let reached = natural.losses.iter().position(|&loss| loss <= theirs);
        let steps = self.spec.steps;
        let race = match reached {
            Some(step) => format!("natural gradients reach the final loss of SGD after {step} of {steps} steps"),
            None => format!("natural gradients do not reach the final loss of SGD in {steps} steps"),
        };
        let curve = format!(
            "Training loss after {steps} steps of {} samples: natural gradient {ours:.4} (rate {}), SGD {theirs:.4} (rate {}); {race}. Test \
             accuracy {:.2} % and {:.2} %.",
            self.spec.batch,
            natural.rate,
            sgd.rate,
            natural.test.accuracy * 100.0,
            sgd.test.accuracy * 100.0
        );
        vec![(spectrum.positive, matrix), (ours <= theirs, curve)]
    }

    fn classes(&self, trained: &Trained) -> Section {
        let row = |class: usize| {
            let own = || {
                self.split.test.iter().zip(&trained.predicted).filter(|it| self.data.labels[*it.0] as usize == class)
            };
            let (count, hits) = (own().count(), own().filter(|it| *it.1 as usize == class).count());
            let share = format!("{:.1} %", 100.0 * hits as f64 / count.max(1) as f64);
            vec![self.data.classes[class].clone(), count.to_string(), hits.to_string(), share]
        };
        Section {
            title: "Accuracy by class".to_owned(),
            caption: "Test samples of the trained classifier.".to_owned(),
            chart: None,
            table: Some((
                header(["class", "samples", "right", "accuracy"]),
                (0..self.data.classes.len()).map(row).collect(),
            )),
        }
    }
}

impl Spectrum {
    /// Eigenvalues that are 0 but for rounding have no logarithm and are left out.
    fn section(&self) -> Section {
        let shown = self.values.iter().take(self.rank.max(1)).map(|value| value.max(f64::MIN_POSITIVE));
        let points = (1..).map(f64::from).zip(shown).collect();
        Section {
            title: "Spectrum".to_owned(),
            caption: format!(
                "Eigenvalues of the Fisher matrix in descending order. {} of {} are 0 but for rounding and not shown.",
                self.values.len() - self.rank,
                self.values.len()
            ),
            chart: Some(Chart {
                lines: vec![("eigenvalue".to_owned(), Ink::Memory, points)],
                logarithmic: true,
                x_name: "number of the eigenvalue",
            }),
            table: None,
        }
    }
}

fn header<const N: usize>(names: [&str; N]) -> Vec<String> {
    names.map(str::to_owned).to_vec()
}

fn curve_section(natural: &Curve, sgd: &Curve) -> Section {
    let line = |ink: Ink, curve: &Curve| {
        let points = (0..).map(f64::from).zip(curve.losses.iter().map(|loss| loss.max(f64::MIN_POSITIVE))).collect();
        (format!("{}, rate {}", curve.method.name(), curve.rate), ink, points)
    };
    Section {
        title: "Training".to_owned(),
        caption: "Loss on the training samples by step. Both methods see the same samples in the same order."
            .to_owned(),
        chart: Some(Chart {
            lines: vec![line(Ink::Frequent, sgd), line(Ink::Memory, natural)],
            logarithmic: true,
            x_name: "step",
        }),
        table: None,
    }
}

fn candidates(curves: &[Curve]) -> Section {
    let row = |curve: &Curve| {
        let last = curve.losses.last().copied().unwrap_or(f64::MAX);
        let diverged = curve.validation.loss == f64::MAX;
        let shown = |value: f64| if diverged { "diverged".to_owned() } else { format!("{value:.4}") };
        let (loss, validation) = (shown(last), shown(curve.validation.loss));
        let test = format!("{:.2} %", curve.test.accuracy * 100.0);
        vec![curve.method.name().to_owned(), curve.rate.to_string(), loss, validation, test]
    };
    Section {
        title: "Step sizes".to_owned(),
        caption: "The curve of the lowest validation loss of each method is shown above.".to_owned(),
        chart: None,
        table: Some((
            header(["method", "step size", "training loss", "validation loss", "test accuracy"]),
            curves.iter().map(row).collect(),
        )),
    }
}
