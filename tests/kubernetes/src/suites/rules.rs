//! Every rule of the definitions on an API server: what it refuses, with its words, and the nearest that it takes. Nothing is made but what
//! a rule of changes needs.

#[path = "../../../../operator/tests/rules/examples.rs"]
mod examples;

use super::Check;
use super::helpers::WHILE;
use super::operator::define;
use crate::cluster::Cluster;
use crate::http::Refused;
use crate::process::until;
use anyhow::{Context, Result, bail, ensure};
use examples::{BLOCKS, CHANGES, ROWS, RUN, Row, kind_of, object};
use serde_json::{Value, json};

/// The status with which an object is refused for what is in it.
const INVALID: u16 = 422;

pub(super) fn checks() -> Vec<Check> {
    vec![
        Check {
            name: "every rule of the definitions refuses, and takes the nearest that it may",
            run: refuse_and_take,
        },
        Check { name: "every rule of changes refuses, and takes the nearest that it may", run: refuse_changes },
    ]
}

fn path(plural: &str) -> String {
    format!("/apis/engram.dev/v1alpha1/namespaces/default/{plural}")
}

/// Tries to make an object, and makes nothing.
fn tried(cluster: &Cluster, plural: &str, object: &Value) -> Result<Value> {
    cluster.api().create(&format!("{}?dryRun=All", path(plural)), object)
}

/// It was refused, in these words.
fn refused(outcome: Result<Value>, words: &str, what: &Value) -> Result<()> {
    let Err(error) = outcome else { bail!("taken, and refused should be by {words:?}: {what}") };
    let said = error.downcast_ref::<Refused>().with_context(|| format!("no answer for {what}"))?.clone();
    ensure!(said.status == INVALID && said.message.contains(words), "{what}: not {words:?}: {said}");
    Ok(())
}

fn refuse_and_take(cluster: &Cluster) -> Result<String> {
    define(cluster)?;
    until("the kinds", WHILE, || tried(cluster, "learnerruns", &object("learnerruns", RUN)).map(Some))?;
    let mut wrong = Vec::new();
    let mut check = |plural: &str, object: &Value, words: Option<&str>| {
        let outcome = tried(cluster, plural, object);
        let checked = match words {
            Some(words) => refused(outcome, words, object),
            None => outcome.map(drop).with_context(|| format!("refused: {object}")),
        };
        wrong.extend(checked.err().map(|error| format!("{error:#}")));
    };
    for Row { plural, message, refused, taken } in ROWS {
        check(plural, &object(plural, refused), Some(message));
        check(plural, &object(plural, taken), None);
    }
    for block in BLOCKS {
        let mut run = object("learnerruns", RUN);
        run["spec"][block] = json!({});
        check("learnerruns", &run, Some(&format!("spec.{block} belongs")));
        let (mut run, kind) = (object("learnerruns", RUN), kind_of(block));
        run["spec"]["kind"] = kind.as_str().into();
        check("learnerruns", &run, Some(&format!("spec.kind: {kind} is not supported yet")));
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(format!("{} rules", ROWS.len() + 2 * BLOCKS.len()))
}

fn refuse_changes(cluster: &Cluster) -> Result<String> {
    for &(plural, message, old, bad, taken) in CHANGES {
        let [old, bad, good] = [old, bad, taken].map(|text| object(plural, text));
        let name = old["metadata"]["name"].as_str().context("an example has a name")?;
        let place = format!("{}/{name}", path(plural));
        cluster.api().create(&path(plural), &old).with_context(|| format!("refused: {old}"))?;
        if let Some(status) = old.get("status") {
            cluster.api().patch(&format!("{place}/status"), crate::MERGE, &json!({ "status": status }))?;
        }
        let change = |new: &Value| {
            let spec = json!({ "spec": new["spec"] });
            cluster.api().patch(&format!("{place}?dryRun=All"), crate::MERGE, &spec)
        };
        refused(change(&bad), message, &bad)?;
        change(&good).with_context(|| format!("refused: {good}"))?;
        cluster.api().delete(&place, None)?;
    }
    Ok(format!("{} rules", CHANGES.len()))
}
