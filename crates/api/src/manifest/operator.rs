//! Parsing and validation of the operator's configuration file.

use super::check::Check;
use super::{Problems, place, tree, typed};
use crate::code::Code;
use crate::operator::{Configuration, KIND};
use crate::problem::Problem;
use crate::schema::OPERATOR;

/// Parses and validates the operator's configuration file `origin` with the content `text`.
///
/// # Errors
///
/// Returns all problems of the file, in its order, each with its location; an unknown version or kind is reported alone.
pub fn parse_operator_configuration(text: &str, origin: &str) -> Result<Configuration, Problems> {
    let problems = |problems| Problems::new(origin, text, problems);
    let documents = tree::read(text).map_err(|problem| problems(vec![problem]))?;
    let [document] = &documents[..] else {
        let message = format!("the file has {} documents; needed: exactly one, of kind {KIND}", documents.len());
        let second = documents.get(1).map(|document| place(document.referenced));
        return Err(problems(vec![Problem::new(Code::NotAManifest, message).at(second)]));
    };
    let mut invalid = Check::document(text, document, &OPERATOR).problems;
    // The fields of another version or kind cannot be checked.
    if invalid.iter().any(|problem| is_of_header(problem) && problem.code() == Code::NotAManifest) {
        invalid.retain(is_of_header);
    }
    if invalid.is_empty() { typed(document).map_err(|problem| problems(vec![problem])) } else { Err(problems(invalid)) }
}

fn is_of_header(problem: &Problem) -> bool {
    matches!(problem.path(), Some("apiVersion" | "kind"))
}

#[cfg(test)]
mod tests {
    use super::parse_operator_configuration as parse;
    use crate::operator::Configuration;
    use crate::quantity::Duration;

    const HEAD: &str = "apiVersion: operator.engram.dev/v1alpha1\nkind: OperatorConfiguration\n";

    fn problems_of(text: &str) -> Vec<String> {
        let problems = parse(text, "config.yaml").expect_err(text);
        problems.to_string().lines().map(str::to_owned).collect()
    }

    #[test]
    fn a_partial_file_round_trips() {
        assert_eq!(parse(HEAD, "config.yaml").expect("an empty file is valid"), Configuration::default());
        let text = HEAD.to_owned() + "watchNamespaces:\n- ml\nconcurrency: 16\ncertificateLifetime: 10m\n";
        let file = parse(&text, "config.yaml").expect("a valid file");
        assert_eq!(file.concurrency, Some(16));
        assert_eq!(file.certificate_lifetime, Some(Duration::from_millis(600_000)));
        assert_eq!(parse(&file.to_yaml(), "written.yaml").expect("what was written"), file);
    }

    #[test]
    fn an_unknown_version_or_kind_is_the_only_problem() {
        for (wrong, written) in [("v1alpha1", "v9"), ("OperatorConfiguration", "LearnerCluster")] {
            let problems = problems_of(&(HEAD.replace(wrong, written) + "fieldOfTheFuture: 1\n"));
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(
                problems[0].contains(written) && problems[0].contains("; allowed: ") && problems[0].contains(wrong),
                "{problems:?}"
            );
        }
        let absent = problems_of("concurrency: 1\n");
        assert_eq!(absent[0], "config.yaml:1:1: ENG-0105: apiVersion is missing", "{absent:?}");
        assert_eq!(absent.len(), 2, "{absent:?}");
        for documents in ["".to_owned(), HEAD.to_owned() + "---\n" + HEAD] {
            assert_eq!(problems_of(&documents).len(), 1);
        }
    }

    #[test]
    fn every_mistake_names_the_file_the_field_the_value_and_what_is_allowed() {
        const MISTAKES: [(&str, &str); 18] = [
            ("concurency: 4", "3:1: ENG-0101: concurency is not a known field; allowed here: "),
            ("http: { port: 9090 }", "3:9: ENG-0101: http.port is not a known field; allowed here: listen"),
            ("concurrency: many", "3:1: ENG-0102: concurrency is many (text); expected a whole number"),
            ("concurrency: 0", "3:1: ENG-0103: concurrency is 0; allowed: 1 to 256"),
            ("concurrency: 257", "3:1: ENG-0103: concurrency is 257; allowed: 1 to 256"),
            ("concurrency:", "3:1: ENG-0102: concurrency is empty; expected a whole number"),
            (
                "leaderElection: { enabled: yes }",
                "3:19: ENG-0102: leaderElection.enabled is yes (text); expected true or false",
            ),
            ("watchNamespaces: ml", "3:1: ENG-0102: watchNamespaces is ml (text); expected a list"),
            ("watchNamespaces: [ML]", "3:19: ENG-0103: watchNamespaces[0] is ML; allowed: a-z, 0-9 and -, "),
            ("watchNamespaces: [ml, ml]", "3:23: ENG-0103: watchNamespaces is [ml, ml], with ml twice"),
            ("certificateLifetime: 90", "3:1: ENG-0102: certificateLifetime is 90 (a whole number); expected text"),
            ("certificateLifetime: 1 day", "3:1: ENG-0102: certificateLifetime: \"1 day\" is not a duration; write "),
            ("certificateLifetime: 5s", "3:1: ENG-0103: certificateLifetime is 5s; allowed: 6s or more"),
            ("coordinator: { listen: ':7440' }", "3:16: ENG-0103: coordinator.listen is :7440; allowed: an IP address"),
            (
                "coordinator: { addresses: [engram] }",
                "3:28: ENG-0103: coordinator.addresses[0] is engram; allowed: HOST:PORT",
            ),
            (
                "worker: { repository: '' }",
                "3:11: ENG-0103: worker.repository is \"\"; allowed: at least one character",
            ),
            ("logging: { format: json }", "3:12: ENG-0104: logging.format is json; allowed: Text, Json"),
            ("logging: { level: verbose }", "3:12: ENG-0103: logging.level is verbose; allowed: off, error, "),
        ];
        for (mistake, expected) in MISTAKES {
            let problems = problems_of(&format!("{HEAD}{mistake}\n"));
            assert!(
                problems.len() == 1 && problems[0].starts_with(&format!("config.yaml:{expected}")),
                "{mistake}: {problems:?}"
            );
        }
    }
}
