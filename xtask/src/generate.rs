//! `cargo xtask generate`: files that are made by a command and committed, so that they can be read without running it.
//!
//! `--check` makes them again and compares: CI fails on drift.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::process;
use crate::workspace::{self, Profile};

/// The program that writes what is generated to its standard output: an example, since it needs the library that it tells of.
const PROGRAM: &str = "reference";

/// A committed file and what the program is to write for it.
struct Generated {
    path: &'static str,
    what: &'static str,
}

/// The schema of the operator's file, and that of the chart's values, one of which is such a file.
const OPERATOR_SCHEMA: &str = "docs/reference/operator-configuration.schema.json";
const VALUES_SCHEMA: &str = "charts/engram/values.schema.json";

/// Everything that is generated.
const FILES: &[Generated] = &[
    Generated { path: "docs/reference/errors.md", what: "errors" },
    Generated { path: "docs/reference/manifest.schema.json", what: "schema" },
    Generated { path: OPERATOR_SCHEMA, what: "operator-schema" },
    Generated { path: "crds/learnerclusters.yaml", what: "learnerclusters" },
    Generated { path: "crds/learnerruns.yaml", what: "learnerruns" },
    Generated { path: "crds/partitionmaps.yaml", what: "partitionmaps" },
];

/// The definitions of the kinds, and the templates of the chart that they are installed with.
const DEFINITIONS: &[(&str, &str)] = &[
    ("crds/learnerclusters.yaml", "charts/engram/templates/crds/learnerclusters.yaml"),
    ("crds/learnerruns.yaml", "charts/engram/templates/crds/learnerruns.yaml"),
    ("crds/partitionmaps.yaml", "charts/engram/templates/crds/partitionmaps.yaml"),
];

/// What stands before a definition in its template.
const HEAD: &str = "{{- /* Written by `cargo xtask generate`; do not edit. */ -}}\n{{- if .Values.crds.enabled }}\n";
/// What is added to its metadata.
const METADATA: &str = concat!(
    "  {{- $keep := ternary (dict \"helm.sh/resource-policy\" \"keep\") dict .Values.crds.keep }}\n",
    "  {{- include \"engram.metadata\" (dict \"root\" . \"annotations\" $keep) | nindent 2 }}\n",
);

/// A definition as a template of the chart.
///
/// # Errors
/// When the definition holds what the template language would take for its own, or does not begin as all of them do.
fn template(definition: &str) -> Result<String> {
    ensure!(!definition.contains("{{"), "a definition holds a brace of the template language");
    let start = definition.find("apiVersion:").context("a definition has an apiVersion")?;
    let (head, tail) = definition[start..].split_once("\nspec:\n").context("a definition has a spec")?;
    Ok(format!("{HEAD}{head}\n{METADATA}spec:\n{tail}{{{{- end }}}}\n"))
}

/// The schema of the chart's values `values` with that of `config` in it as `file` has it: its version and kind are the template's.
///
/// # Errors
/// When there is no `config` in it, written as all values are.
fn with_config(values: &str, file: &str) -> Result<String> {
    const START: &str = "\n    \"config\": ";
    const END: &str = "\n    }";
    let mut schema: serde_json::Value = serde_json::from_str(file)?;
    let root = schema.as_object_mut().context("a schema is an object")?;
    root.retain(|keyword, _| keyword != "$schema" && keyword != "required");
    let indented = format!("{schema:#}").replace('\n', "\n    ");
    let (before, rest) = values.split_once(START).context("the chart's schema has no config")?;
    let (_, after) = rest.split_once(END).context("the chart's config has no end")?;
    Ok(format!("{before}{START}{indented}{after}"))
}

/// Writes the files, or with `check` compares them.
///
/// # Errors
/// When a command fails, or with `check` when a file is not what its command writes.
pub(crate) fn run(check: bool) -> Result<()> {
    // Of the whole workspace, as `cargo xtask test` selects it: on its own, its dependencies would have other features and be built once
    // more.
    let profile = Profile::of_tests()?;
    process::run(&mut profile.cargo("build", ["-q", "--workspace", "--example", PROGRAM]))?;
    let program = profile.folder().join("examples").join(format!("{PROGRAM}{}", std::env::consts::EXE_SUFFIX));
    let mut stale = Vec::new();
    for file in FILES {
        let fresh = process::read(Command::new(&program).arg(file.what))?;
        let copy = DEFINITIONS.iter().find(|(definition, _)| *definition == file.path);
        let mut copy = copy.map(|(_, path)| anyhow::Ok((*path, template(&fresh)?))).transpose()?;
        if file.path == OPERATOR_SCHEMA {
            let values = fs::read_to_string(workspace::root().join(VALUES_SCHEMA))?;
            copy = Some((VALUES_SCHEMA, with_config(&values, &fresh)?));
        }
        for (name, fresh) in [(file.path, fresh)].into_iter().chain(copy) {
            let path = workspace::root().join(name);
            let committed = fs::read_to_string(&path).ok();
            if committed.as_deref() == Some(fresh.as_str()) {
                continue;
            }
            if check {
                stale.push(name);
            } else {
                fs::write(&path, fresh).with_context(|| format!("failed to write {}", path.display()))?;
                println!("wrote {name}");
            }
        }
    }
    if !stale.is_empty() {
        bail!("not what its command writes (run `cargo xtask generate`): {}", stale.join(", "));
    }
    Ok(())
}
