//! `cargo xtask generate`: files that are generated and committed, so that they can be read without running a command.
//!
//! `--check` regenerates and compares them: CI fails on drift.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{self, Profile};
use crate::{process, reference};

/// Programs that print generated files. They are examples, because they link the libraries that they describe.
const REFERENCE: &str = "reference";
const CLI_REFERENCE: &str = "cli-reference";
const WORKER_METRICS: &str = "worker-metrics";
const OPERATOR_METRICS: &str = "operator-metrics";
const PROGRAMS: &[&str] = &[REFERENCE, CLI_REFERENCE, WORKER_METRICS, OPERATOR_METRICS];

/// A committed generated file, and the program and argument that print it.
struct GeneratedFile {
    path: &'static str,
    program: &'static str,
    argument: &'static str,
}

/// The page of all metrics, from the lists of two programs.
const METRICS: &str = "docs/reference/metrics.md";
/// The JSON Schema of manifests, and the page that is made of it.
const MANIFEST_SCHEMA: &str = "docs/reference/manifest.schema.json";
const MANIFEST: &str = "docs/reference/manifest.md";

/// The schema of the operator's file, and that of the chart's values, one of which is such a file.
const OPERATOR_SCHEMA: &str = "docs/reference/operator-configuration.schema.json";
const VALUES_SCHEMA: &str = "charts/engram/values.schema.json";

/// All generated files.
const FILES: &[GeneratedFile] = &[
    GeneratedFile { path: "docs/reference/cli.md", program: CLI_REFERENCE, argument: "" },
    GeneratedFile { path: "docs/reference/errors.md", program: REFERENCE, argument: "errors" },
    GeneratedFile { path: MANIFEST_SCHEMA, program: REFERENCE, argument: "schema" },
    GeneratedFile { path: OPERATOR_SCHEMA, program: REFERENCE, argument: "operator-schema" },
    GeneratedFile { path: "crds/learnerclusters.yaml", program: REFERENCE, argument: "learnerclusters" },
    GeneratedFile { path: "crds/learnerruns.yaml", program: REFERENCE, argument: "learnerruns" },
    GeneratedFile { path: "crds/partitionmaps.yaml", program: REFERENCE, argument: "partitionmaps" },
];

/// The definitions of the kinds, and the templates of the chart that they are installed with.
const DEFINITIONS: &[(&str, &str)] = &[
    ("crds/learnerclusters.yaml", "charts/engram/templates/crds/learnerclusters.yaml"),
    ("crds/learnerruns.yaml", "charts/engram/templates/crds/learnerruns.yaml"),
    ("crds/partitionmaps.yaml", "charts/engram/templates/crds/partitionmaps.yaml"),
];

/// Prefix of a definition in its template.
const HEAD: &str = "{{- /* Written by `cargo xtask generate`; do not edit. */ -}}\n{{- if .Values.crds.enabled }}\n";
/// Annotations added to its metadata.
const METADATA: &str = concat!(
    "  {{- $keep := ternary (dict \"helm.sh/resource-policy\" \"keep\") dict .Values.crds.keep }}\n",
    "  {{- include \"engram.metadata\" (dict \"root\" . \"annotations\" $keep) | nindent 2 }}\n",
);

/// Returns a definition as a template of the chart.
///
/// # Errors
/// When the definition contains template syntax, or starts unexpectedly.
fn template(definition: &str) -> Result<String> {
    ensure!(!definition.contains("{{"), "a definition contains template syntax");
    let start = definition.find("apiVersion:").context("a definition has an apiVersion")?;
    let (head, tail) = definition[start..].split_once("\nspec:\n").context("a definition has a spec")?;
    Ok(format!("{HEAD}{head}\n{METADATA}spec:\n{tail}{{{{- end }}}}\n"))
}

/// Returns the schema of the chart's values with the schema of `config` from `file`; the template sets its version and kind.
///
/// # Errors
/// When the schema has no `config` in the expected form.
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

/// Writes the files, or compares them with `check`.
///
/// # Errors
/// When a command fails, or with `check` when a file is stale.
pub(crate) fn run(check: bool) -> Result<()> {
    // Of the whole workspace, like `cargo xtask test`: otherwise dependencies would have other features and be built again.
    let profile = Profile::of_tests()?;
    let examples = PROGRAMS.iter().flat_map(|program| ["--example", program]);
    process::run(&mut profile.cargo("build", ["-q", "--workspace"].into_iter().chain(examples)))?;
    let mut stale = Vec::new();
    for (name, fresh) in files(&profile.folder().join("examples"))? {
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
    if !stale.is_empty() {
        bail!("stale files (run `cargo xtask generate`): {}", stale.join(", "));
    }
    Ok(())
}

/// Returns the path and the content of each generated file. `examples` is the folder of the programs.
fn files(examples: &Path) -> Result<Vec<(&'static str, String)>> {
    let output = |program: &str, argument: &str| {
        let path = examples.join(format!("{program}{}", std::env::consts::EXE_SUFFIX));
        process::read(Command::new(path).arg(argument))
    };
    let mut files = Vec::new();
    for file in FILES {
        let content = output(file.program, file.argument)?;
        if let Some((_, path)) = DEFINITIONS.iter().find(|(definition, _)| *definition == file.path) {
            files.push((*path, template(&content)?));
        }
        if file.path == OPERATOR_SCHEMA {
            let values = fs::read_to_string(workspace::root().join(VALUES_SCHEMA))?;
            files.push((VALUES_SCHEMA, with_config(&values, &content)?));
        }
        if file.path == MANIFEST_SCHEMA {
            files.push((MANIFEST, reference::manifest(&content)?));
        }
        files.push((file.path, content));
    }
    files.push((METRICS, reference::metrics(&output(WORKER_METRICS, "")?, &output(OPERATOR_METRICS, "")?)?));
    Ok(files)
}
