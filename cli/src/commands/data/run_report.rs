//! Reports of runs: of learning epochs, or of tasks.

use crate::output_file::OutputFile;
use anyhow::Context as _;
use engram_client::Client;
use engram_learn::report::{self, RunReport};
use engram_learn::task_run::TaskReport;
use serde::Serialize;
use serde_json::Value;
use std::path::Path;

/// Report of a run.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Report {
    Learning(Box<RunReport>),
    Tasks(Box<TaskReport>),
}

impl Report {
    /// Reads the report of a run.
    ///
    /// # Errors
    /// The request fails, or the report has an unknown format.
    pub(crate) async fn read(client: &Client, name: &str) -> anyhow::Result<Self> {
        let json = client.report(name).await?;
        let unknown = || format!("the report of run {name} has an unknown format");
        let value: Value = serde_json::from_str(&json).with_context(unknown)?;
        if value["kind"] == TaskReport::KIND {
            let mut report: TaskReport = serde_json::from_value(value).with_context(unknown)?;
            // `engram profile` shows it; it can be as long as the rest of the report.
            report.timeline.clear();
            return Ok(Self::Tasks(Box::new(report)));
        }
        Ok(Self::Learning(serde_json::from_str(&json).with_context(unknown)?))
    }

    /// Returns the text for the terminal.
    pub(crate) fn summary(&self) -> String {
        match self {
            Self::Learning(report) => report::summary(report),
            Self::Tasks(report) => {
                report.findings.summary.iter().map(|line| format!("{}\n", engram_api::printable(line))).collect()
            }
        }
    }

    /// Writes the report as an HTML page, atomically.
    ///
    /// # Errors
    /// The run has no page yet, or the page cannot be rendered or written.
    pub(crate) fn write_page(&self, path: &Path) -> anyhow::Result<()> {
        let page = match self {
            Self::Learning(report) => report::page(report)?,
            Self::Tasks(report) if report.page.is_empty() => {
                anyhow::bail!("run {} has no report page, because it has not succeeded", report.run)
            }
            Self::Tasks(report) => report.page.clone(),
        };
        OutputFile::write(path, page.as_bytes()).with_context(|| format!("failed to write {}", path.display()))
    }
}
