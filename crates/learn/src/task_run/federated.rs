//! The report page of a Federated run.

use super::TaskError;
use super::page::{Chart, Page, Section};
use crate::report::Ink;
use crate::run::{FederatedRow, FederatedState};

/// Name, color and points of a line of a chart.
type Line = (&'static str, Ink, Vec<(f64, f64)>);

/// Renders the page of a Federated run: result, figures, the course of loss, participation and privacy, and the clients.
///
/// # Errors
/// A figure is not finite.
pub fn federated_page(
    name: &str,
    about: &str,
    verdicts: Vec<(bool, String)>,
    tiles: Vec<(&'static str, String, String)>,
    state: &FederatedState,
) -> Result<String, TaskError> {
    let points = |value: &dyn Fn(&FederatedRow) -> Option<f64>| {
        let points = state.history.iter().filter_map(|row| Some((row.version as f64, value(row)?)));
        points.collect::<Vec<(f64, f64)>>()
    };
    let section = |title: &str, caption: &str, lines: Vec<Line>| {
        let is_drawn = lines.iter().any(|(.., points)| points.len() > 1);
        let lines = lines.into_iter().map(|(name, ink, points)| (name.to_owned(), ink, points)).collect();
        Section {
            title: title.to_owned(),
            caption: caption.to_owned(),
            chart: is_drawn.then_some(Chart { lines, logarithmic: false, x_name: "version" }),
            table: None,
        }
    };
    let mut sections = vec![
        section(
            "Loss",
            "Loss of the model that the clients of a round downloaded, on their own data, weighted by samples.",
            vec![("loss", Ink::Memory, points(&|row| row.loss))],
        ),
        section(
            "Participation",
            "Updates in each version, and clients that had a task and sent none in time.",
            vec![
                ("updates", Ink::Rewarded, points(&|row| Some(row.updates.into()))),
                ("missing", Ink::Punished, points(&|row| Some(row.missing.into()))),
            ],
        ),
    ];
    let spent = points(&|row| row.epsilon);
    if !spent.is_empty() {
        let caption = "Epsilon spent after each round, by the privacy loss distribution: the value that is charged.";
        sections.push(section("Privacy", caption, vec![("epsilon", Ink::Recent, spent)]));
    }
    sections.push(clients(state));
    let page = Page {
        kind: "Federated run",
        title: name.to_owned(),
        about: about.to_owned(),
        verdicts,
        tiles,
        sections,
        foot: "Losses are measured by the clients. Everything else is measured by the worker that drove the rounds."
            .to_owned(),
    };
    page.render()
}

fn clients(state: &FederatedState) -> Section {
    let header = ["client", "updates", "samples", "loss"].map(str::to_owned).to_vec();
    let row = |(name, client): (&String, &crate::run::ClientRow)| {
        let loss = client.loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
        vec![name.clone(), client.updates.to_string(), client.samples.to_string(), loss]
    };
    let caption = "Updates that were aggregated, samples of the last one, and the loss that the client measured last.";
    let further = format!(" Only the first {} clients are listed.", state.clients.len());
    Section {
        title: "Clients".to_owned(),
        caption: caption.to_owned() + if state.has_further_clients { &further } else { "" },
        chart: None,
        table: Some((header, state.clients.iter().map(row).collect())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_shows_loss_participation_and_clients_and_what_was_spent_of_a_budget() {
        let page = |epsilon: Option<f64>| {
            let row = |version: u64| FederatedRow {
                version,
                updates: 4,
                missing: 1,
                loss: Some(1.0 / version as f64),
                epsilon: epsilon.map(|it| it * version as f64),
                seconds: 1.0,
            };
            let mut state = FederatedState { history: (1..=3).map(row).collect(), ..FederatedState::default() };
            state.count("phone-7", 1_234, Some(0.25));
            federated_page("fleet", "", Vec::new(), Vec::new(), &state).unwrap()
        };
        let (private, plain) = (page(Some(0.5)), page(None));
        for text in ["Loss", "Participation", "updates", "missing", "phone-7", "1234", "0.2500"] {
            assert!(private.contains(text) && plain.contains(text), "{text}");
        }
        let charts = |page: &str| page.matches("<svg").count();
        assert_eq!((charts(&private), charts(&plain)), (3, 2));
        assert!(private.contains("Epsilon spent") && !plain.contains("Epsilon spent"));
    }

    #[test]
    fn page_states_that_it_does_not_list_all_clients() {
        let mut state = FederatedState::default();
        let page = |state: &FederatedState| federated_page("fleet", "", Vec::new(), Vec::new(), state).unwrap();
        (0..100).for_each(|client| state.count(&format!("c{client}"), 3, None));
        assert!(!page(&state).contains("Only the first"));
        state.count("c100", 3, None);
        assert!(page(&state).contains("Only the first 100 clients are listed."));
    }
}
