//! Every validation rule of the CustomResourceDefinitions rejects and accepts its examples, and the Rust validation agrees.
//!
//! CEL rules are evaluated by a library, without an API server. The suite `rules` of the Kubernetes tests repeats this with an API server.

#[path = "rules/examples.rs"]
mod examples;

use engram_api::{crd, parse_object};
use examples::{BLOCKS, CHANGES, ROWS, RUN, Row, kind_of, object};
use kube_cel::Validator;
use serde_json::{Value, json};

fn schema(plural: &str) -> Value {
    crd::definition(plural).expect("a kind")["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone()
}

/// Messages of the rules that reject `new`.
fn refusals(plural: &str, new: &Value, old: Option<&Value>) -> Vec<String> {
    match Validator::new().validate(&schema(plural), new, old) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.into_vec().into_iter().map(|error| error.message).collect(),
    }
}

#[test]
fn rules_reject_and_accept_their_examples_as_the_checker_does() {
    for Row { plural, message, refused, taken } in ROWS {
        let bad = object(plural, refused);
        let found = refusals(plural, &bad, None);
        assert!(found.iter().any(|found| found.starts_with(message)), "{refused}: {message}: {found:?}");
        let good = object(plural, taken);
        assert_eq!(refusals(plural, &good, None), [""; 0], "{taken}");
        assert!(parse_object(&bad).is_err(), "the checker accepts {refused}");
        if let Err(problems) = parse_object(&good) {
            panic!("{taken}: {}", problems.render(false));
        }
    }
    for (plural, message, old, refused, taken) in CHANGES {
        let [old, bad, good] = [old, refused, taken].map(|text| object(plural, text));
        let found = refusals(plural, &bad, Some(&old));
        assert!(found.iter().any(|found| found.starts_with(message)), "{refused}: {message}: {found:?}");
        assert_eq!(refusals(plural, &good, Some(&old)), [""; 0], "{taken}");
    }
}

#[test]
fn every_rule_has_an_example() {
    fn rules(schema: &Value, found: &mut Vec<String>) {
        match schema {
            Value::Object(fields) => {
                for rule in fields.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten() {
                    found.push(rule["message"].as_str().expect("every rule has a message").to_owned());
                }
                fields.values().for_each(|value| rules(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| rules(value, found)),
            _ => {}
        }
    }
    let mut missing = Vec::new();
    for plural in crd::PLURALS {
        let mut messages = Vec::new();
        rules(&schema(plural), &mut messages);
        let is_block =
            |message: &String| BLOCKS.iter().any(|block| message.starts_with(&format!("spec.{block} belongs")));
        messages.retain(|message| !is_block(message) && !message.starts_with("spec.kind: "));
        for message in messages {
            let mut covered = ROWS.iter().filter(|row| row.plural == plural).map(|row| row.message);
            let mut changed = CHANGES.iter().filter(|change| change.0 == plural).map(|change| change.1);
            let begins = |start: &str| message.starts_with(start);
            if !covered.any(begins) && !changed.any(begins) {
                missing.push(format!("{plural}: {message}"));
            }
        }
    }
    assert_eq!(missing, [""; 0], "rules without an example");
    for block in BLOCKS {
        let mut run = object("learnerruns", RUN);
        run["spec"][block] = json!({});
        assert_eq!(refusals("learnerruns", &run, None).len(), 1, "{block}");
        assert!(parse_object(&run).is_err(), "{block}");

        let mut run = object("learnerruns", RUN);
        let kind = kind_of(block);
        run["spec"]["kind"] = kind.as_str().into();
        let found = refusals("learnerruns", &run, None);
        let is_unsupported = |message: &String| message.starts_with(&format!("spec.kind: {kind} is not supported yet"));
        assert!(found.iter().any(is_unsupported), "{found:?}");
        assert!(parse_object(&run).is_err(), "{kind}");
    }
}
