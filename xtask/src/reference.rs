//! Reference pages in Markdown, made from what programs of the workspace print and from the schema of manifests.
//!
//! Text in, text out: `generate` runs the programs and writes the files.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Returns `docs/reference/metrics.md`. `worker` and `operator` have a line `name, type, unit, labels, help` with tabs for each metric.
///
/// # Errors
/// When a line has other columns.
pub(crate) fn metrics(worker: &str, operator: &str) -> Result<String> {
    let mut page = "# Metrics\n\n\
        Written by `cargo xtask generate` from the registries of the programs. Workers and operators serve them on port 9090 under\n\
        `/metrics`. A histogram has the series `_bucket`, `_sum` and `_count`.\n"
        .to_owned();
    for (title, lines) in [("Workers", worker), ("Operators", operator)] {
        let _ = write!(
            page,
            "\n## {title}\n\n| metric | type | unit | labels | meaning |\n| --- | --- | --- | --- | --- |\n"
        );
        for line in lines.lines() {
            let columns: Vec<&str> = line.split('\t').collect();
            ensure!(columns.len() == 5, "a metric is name, type, unit, labels and help: {line}");
            let [name, metric_type, unit, labels, help] = [0, 1, 2, 3, 4].map(|index| cell(columns[index]));
            let labels: Vec<String> = labels.split_whitespace().map(|label| format!("`{label}`")).collect();
            let _ = writeln!(page, "| `{name}` | {metric_type} | {unit} | {} | {help} |", labels.join(", "));
        }
    }
    Ok(page)
}

/// Returns `docs/reference/manifest.md`, a table of the fields of each kind in the JSON Schema of manifests.
///
/// # Errors
/// When the schema is not a choice of objects that name their kind.
pub(crate) fn manifest(schema: &str) -> Result<String> {
    let schema: Value = serde_json::from_str(schema)?;
    let kinds = schema["oneOf"].as_array().context("the schema is a choice of kinds")?;
    let mut page = "# Manifest\n\n\
        Written by `cargo xtask generate` from [manifest.schema.json](manifest.schema.json), which editors can complete and check\n\
        manifests with. `apiVersion` is `engram.dev/v1alpha1`. A field in **bold** is required. `[]` marks the entries of a list.\n"
        .to_owned();
    for kind in kinds {
        let properties = &kind["properties"];
        let name = properties["kind"]["const"].as_str().context("a kind has a name")?;
        let _ =
            write!(page, "\n## {name}\n\n| field of `spec` | type | default | meaning |\n| --- | --- | --- | --- |\n");
        fields(&mut page, "", &properties["spec"]);
    }
    Ok(page)
}

/// Adds a row for each property of `object` and of what is in it.
fn fields(page: &mut String, prefix: &str, object: &Value) {
    let required: Vec<&str> = object["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, property) in object["properties"].as_object().into_iter().flatten() {
        let path = format!("{prefix}{name}");
        let shown = if required.contains(&name.as_str()) { format!("**`{path}`**") } else { format!("`{path}`") };
        // Defaults of objects are those of their fields.
        let default = match &property["default"] {
            Value::Null | Value::Object(_) | Value::Array(_) => String::new(),
            value => format!("`{value}`"),
        };
        let meaning = cell(property["description"].as_str().unwrap_or_default());
        let _ = writeln!(page, "| {shown} | {} | {default} | {meaning} |", value_type(property));
        fields(page, &format!("{path}."), property);
        fields(page, &format!("{path}[]."), &property["items"]);
    }
}

/// The type of a property: its values where they are few, with its range.
fn value_type(property: &Value) -> String {
    let words: Vec<String> = words(property).into_iter().map(|word| format!("`{word}`")).collect();
    if !words.is_empty() {
        return words.join(", ");
    }
    let name = match &property["type"] {
        Value::String(name) => name.clone(),
        Value::Array(names) => {
            names.iter().filter_map(Value::as_str).filter(|name| *name != "null").collect::<Vec<_>>().join(" or ")
        }
        _ => String::new(),
    };
    if name == "array" {
        return format!("list of {}", value_type(&property["items"])).trim_end_matches(" of ").to_owned();
    }
    match (&property["minimum"], &property["maximum"]) {
        (Value::Null, Value::Null) => name,
        (least, Value::Null) => format!("{name}, at least {least}"),
        (Value::Null, most) => format!("{name}, at most {most}"),
        (least, most) => format!("{name}, {least} to {most}"),
    }
}

/// The words that a property takes.
fn words(property: &Value) -> Vec<&str> {
    let choices = property["oneOf"].as_array().into_iter().flatten().filter_map(|choice| choice["const"].as_str());
    let listed = property["enum"].as_array().into_iter().flatten().filter_map(Value::as_str);
    choices.chain(listed).collect()
}

/// `text` as a cell of a table.
fn cell(text: &str) -> String {
    text.replace('\n', " ").replace('|', "\\|").trim().to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::words::files;
    use crate::workspace;

    fn read(path: &str) -> String {
        std::fs::read_to_string(workspace::root().join(path)).expect("a file of the checkout is UTF-8")
    }

    #[test]
    fn fields_of_objects_and_lists_are_rows() {
        let schema = r#"{"oneOf": [{"properties": {"kind": {"const": "K"}, "spec": {"required": ["a"], "properties": {
            "a": {"type": "integer", "minimum": 1, "maximum": 3, "description": "One\nof | three"},
            "b": {"type": "array", "items": {"properties": {"c": {"oneOf": [{"const": "X"}, {"const": "Y"}], "default": "X"}}}}
        }}}}]}"#;
        let page = manifest(schema).expect("the schema has a kind");
        assert!(page.contains("| **`a`** | integer, 1 to 3 |  | One of \\| three |"), "{page}");
        assert!(page.contains("| `b[].c` | `X`, `Y` | `\"X\"` |  |"), "{page}");
    }

    #[test]
    fn metric_is_a_row() {
        let page = metrics("engram_up\tgauge\t\tworker cluster\tWhether", "").expect("the line has five columns");
        assert!(page.contains("| `engram_up` | gauge |  | `worker`, `cluster` | Whether |"), "{page}");
        assert!(metrics("engram_up", "").is_err());
    }

    /// Names in `text` that look like a metric.
    fn metric_names(text: &str) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for (at, _) in text.match_indices("engram_") {
            let name: String =
                text[at..].chars().take_while(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || *c == '_').collect();
            let (before, after) = (text[..at].chars().next_back(), &text[at + name.len()..]);
            // Paths and log targets name crates, and `engram_gpu_*` stands for several metrics.
            let is_crate =
                after.starts_with("::") || after.starts_with('=') && !after.starts_with("==") || after.starts_with('*');
            if !is_crate && !before.is_some_and(|c| c.is_ascii_alphanumeric() || "_-/.".contains(c)) {
                names.insert(name);
            }
        }
        names
    }

    /// Words in `text` that begin with `Engram` and a capital, as alerts do.
    fn alert_names(text: &str) -> BTreeSet<&str> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric());
        words
            .filter(|word| {
                word.strip_prefix("Engram").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
            })
            .collect()
    }

    #[test]
    fn every_alert_is_documented() {
        let (rules, page) = (read("charts/engram/files/alerts.yaml"), read("docs/observability.md"));
        let alerts: BTreeSet<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
        assert_eq!(alert_names(&page), alerts);
    }

    #[test]
    fn documented_metrics_and_those_of_alerts_and_dashboard_are_exported() {
        let page = read("docs/reference/metrics.md");
        let exported: BTreeSet<&str> =
            page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`')).map(|(name, _)| name).collect();
        let histograms = ["_bucket", "_sum", "_count"];
        let is_exported = |name: &str| {
            exported.contains(name)
                || histograms.iter().any(|suffix| name.strip_suffix(suffix).is_some_and(|name| exported.contains(name)))
        };
        let documents = |path: &String| {
            path.ends_with(".md") && !path.starts_with("docs/reference/") || path.starts_with("charts/engram/files/")
        };
        let mut unknown = BTreeSet::new();
        for path in files().expect("git lists the files").iter().filter(|path| documents(path)) {
            let names = metric_names(&read(path));
            unknown.extend(names.into_iter().filter(|name| !is_exported(name)).map(|name| format!("{path}: {name}")));
        }
        assert!(unknown.is_empty(), "no program exports these metrics (docs/reference/metrics.md): {unknown:#?}");
    }
}
