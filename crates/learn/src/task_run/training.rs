//! The report page of a Replay run.

use super::TaskError;
use super::page::{Chart, Page, Section};
use crate::report::Ink;
use crate::run::TrainingRow;

/// Name, ink and points of a line.
type NamedLine = (String, Ink, Vec<(f64, f64)>);

/// Renders the page of a Replay run: result, figures, and the course of loss, efficiency and throughput.
///
/// # Errors
/// A figure is not finite.
pub fn training_page(
    name: &str,
    about: &str,
    verdicts: Vec<(bool, String)>,
    tiles: Vec<(&'static str, String, String)>,
    history: &[TrainingRow],
) -> Result<String, TaskError> {
    let line = |name: &str, ink: Ink, value: fn(&TrainingRow) -> f64| {
        (name.to_owned(), ink, history.iter().map(|row| (row.step as f64, value(row))).collect::<Vec<_>>())
    };
    let section = |title: &str, caption: &str, lines: Vec<NamedLine>| Section {
        title: title.to_owned(),
        caption: caption.to_owned(),
        chart: (history.len() > 1).then_some(Chart { lines, logarithmic: false, x_name: "step" }),
        table: None,
    };
    let page = Page {
        kind: "Replay run",
        title: name.to_owned(),
        about: about.to_owned(),
        verdicts,
        tiles,
        sections: vec![
            section("Loss", "Mean loss over the batch of a step.", vec![line("loss", Ink::Memory, |row| row.loss)]),
            section(
                "Efficiency",
                "Samples per second of the group, divided by what its members compute without communication.",
                vec![line("efficiency", Ink::Rewarded, |row| row.efficiency)],
            ),
            section(
                "Throughput",
                "Samples per second of all members.",
                vec![line("samples/s", Ink::Frequent, |row| row.samples_per_s)],
            ),
            section("Members", "Workers that train.", vec![line("members", Ink::Recent, |row| row.members.into())]),
        ],
        foot: "Every number is measured by the members of the group.".to_owned(),
    };
    page.render()
}
