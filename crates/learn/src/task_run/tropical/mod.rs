//! `kind: Tropical`: decodes a hidden Markov model, trains a tropical classifier, analyses a weighted graph.
//!
//! Each of the three is a [`Workload`] with stages of its own. Stage k of the run is stage k of all of them; the first byte of an input and
//! of a result names the workload.

mod chain;
mod classify;
mod decode;
mod fit;
mod graph;
#[cfg(test)]
mod tests;

use super::page::{Page, Section};
use super::{StageResults, Task, TaskContext, TaskError, TaskFindings, TaskRun};
use classify::ClassifyWorkload;
use decode::DecodeWorkload;
use engram_api::TropicalRun;
use graph::GraphWorkload;

/// One of the independent parts of the run.
trait Workload: Send + Sync {
    /// See [`TaskRun::plan`].
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError>;

    /// See [`TaskRun::execute`]; without the byte that names the workload.
    fn execute(&self, input: &[u8], context: &dyn TaskContext) -> Result<Vec<u8>, TaskError>;

    /// Adds figures, sentences and sections to the findings.
    fn finish(&self, results: &[StageResults], report: &mut Findings) -> Result<(), TaskError>;
}

/// Findings and the parts of the page.
#[derive(Default)]
struct Findings {
    task: TaskFindings,
    page: Page,
}

impl Findings {
    /// Adds a result: a line for the terminal and a sentence of the page.
    fn verdict(&mut self, good: bool, text: String) {
        self.task.summary.push(text.clone());
        self.page.verdicts.push((good, text));
    }

    fn metric(&mut self, name: &str, value: f64) {
        self.task.metrics.insert(name.to_owned(), value);
    }

    fn output(&mut self, name: &str, value: String) {
        self.task.outputs.insert(name.to_owned(), value);
    }

    fn tile(&mut self, name: &'static str, value: String, note: &str) {
        self.page.tiles.push((name, value, note.to_owned()));
    }

    fn section(&mut self, section: Section) {
        self.page.sections.push(section);
    }
}

/// A run of kind `Tropical`.
pub struct TropicalTasks {
    workloads: Vec<Box<dyn Workload>>,
}

impl TropicalTasks {
    /// Creates the run. `data` is the content of the file that `classify` or `graph` names.
    ///
    /// # Errors
    /// The specification or the file cannot be used; the error names the field, or line and column.
    pub fn new(spec: &TropicalRun, data: Option<&[u8]>) -> Result<Self, TaskError> {
        let samples = spec.classify.as_ref().and_then(|classify| classify.data.csv_file());
        if spec.graph.is_some() && samples.is_some() {
            return Err(TaskError::Invalid(
                "spec.tropical.graph and spec.tropical.classify.data.csv are both present; allowed: one file per run"
                    .to_owned(),
            ));
        }
        let mut workloads: Vec<Box<dyn Workload>> = Vec::new();
        if let Some(decode) = &spec.decode {
            workloads.push(Box::new(DecodeWorkload::new(&decode.source)?));
        }
        if let Some(classify) = &spec.classify {
            workloads.push(Box::new(ClassifyWorkload::new(classify, data)?));
        }
        if let Some(settings) = &spec.graph {
            workloads.push(Box::new(GraphWorkload::new(settings, data)?));
        }
        if workloads.is_empty() {
            let allowed = "decode, classify, graph, or several of them";
            return Err(TaskError::Invalid(format!("spec.tropical is empty; allowed: {allowed}")));
        }
        Ok(Self { workloads })
    }

    /// Returns the results of one workload, without the byte that names it.
    fn results_of(&self, workload: usize, results: &[StageResults]) -> Vec<StageResults> {
        let own = |stage: &StageResults| -> StageResults {
            let own = stage.iter().filter(|result| result.first() == Some(&(workload as u8)));
            own.map(|result| result[1..].to_vec()).collect()
        };
        // A workload with fewer stages than others ends with its first empty stage.
        results.iter().map(own).take_while(|stage| !stage.is_empty()).collect()
    }
}

/// Puts the number of the workload before its bytes.
fn tagged(workload: usize, bytes: &[u8]) -> Vec<u8> {
    [&[workload as u8], bytes].concat()
}

impl TaskRun for TropicalTasks {
    fn plan(&self, results: &[StageResults]) -> Result<Vec<Task>, TaskError> {
        let mut tasks = Vec::new();
        for (number, workload) in self.workloads.iter().enumerate() {
            let own = self.results_of(number, results);
            if own.len() == results.len() {
                let planned = workload.plan(&own)?.into_iter();
                tasks.extend(planned.map(|task| Task { input: tagged(number, &task.input), ..task }));
            }
        }
        Ok(tasks)
    }

    fn execute(&self, task: &Task, context: &dyn TaskContext) -> Result<Vec<u8>, TaskError> {
        let (number, input) = task.input.split_first().map_or((usize::MAX, &[][..]), |(it, rest)| (*it as usize, rest));
        let unknown = || TaskError::Failed(format!("task {} belongs to no part of this run", task.name));
        let result = self.workloads.get(number).ok_or_else(unknown)?.execute(input, context)?;
        Ok(tagged(number, &result))
    }

    fn finish(&self, results: &[StageResults]) -> Result<TaskFindings, TaskError> {
        let mut findings = Findings::default();
        findings.page.kind = "Tropical run";
        findings.page.title = "Max-plus algebra".to_owned();
        findings.page.about = "Addition is the maximum, multiplication is the sum.".to_owned();
        findings.page.foot = "The same manifest gives the same results on any number of workers.".to_owned();
        for (number, workload) in self.workloads.iter().enumerate() {
            workload.finish(&self.results_of(number, results), &mut findings)?;
        }
        findings.task.page = findings.page.render()?;
        Ok(findings.task)
    }
}
