//! Every documented `engram` command parses.

mod extract;

use std::collections::BTreeSet;
use std::fs;

const PROGRAM: &str = "engram";

#[test]
fn documented_commands_parse() {
    let grammar = engram_cli::command();
    let mut mentions = extract::documented(PROGRAM);
    extract::help_texts(PROGRAM, &grammar, PROGRAM, &mut mentions);
    assert!(mentions.len() > 200, "only {} commands found", mentions.len());
    let failures: Vec<String> =
        mentions.iter().filter_map(|mention| extract::failure(&grammar, PROGRAM, mention)).collect();
    assert!(failures.is_empty(), "{} of {} fail:\n{}", failures.len(), mentions.len(), failures.join("\n"));
}

#[test]
fn unknown_commands_and_options_are_reported() {
    let grammar = engram_cli::command();
    let fails = |text: &str| {
        let mut mentions = Vec::new();
        extract::plain(PROGRAM, "test", text, 0, &mut mentions);
        assert_eq!(mentions.len(), 1, "{text}");
        extract::failure(&grammar, PROGRAM, &mentions[0]).is_some()
    };
    assert!(fails("see `engram list clusters`"));
    assert!(fails("stop it: engram down --dat 3"));
    assert!(!fails("stop it: engram down --state-dir {folder} (and wait)"));
    assert!(!fails("  engram list partitions -o json | jq '.items[] | select(.activated | not)'"));
}

/// Returns the rest of every line of `text` that begins with `start`.
fn lines_after<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    text.lines().filter_map(|line| line.trim().strip_prefix(start)).map(str::trim).collect()
}

/// The images that a node needs have one name in the chart, the build and each documented way to the nodes. kind takes no part in the
/// suites of Kubernetes, because it needs Docker.
#[test]
fn documented_images_are_those_that_the_chart_asks_for() {
    let root = extract::root();
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let (values, chart, page) =
        (read("charts/engram/values.yaml"), read("charts/engram/Chart.yaml"), read("docs/install.md"));
    let images: BTreeSet<String> = lines_after(&values, "repository: ").into_iter().map(str::to_owned).collect();
    let versions = lines_after(&chart, "appVersion: ");
    let [version] = versions[..] else { panic!("one version: {versions:?}") };
    for image in &images {
        let name = format!("`localhost/{image}:{version}`");
        assert!(page.contains(&name), "docs/install.md lacks the name {name} of the chart");
    }
    let names: BTreeSet<&str> = images.iter().filter_map(|image| image.strip_prefix("engram/")).collect();
    assert_eq!(names, ["operator", "worker", "worker-cuda"].into());
    let archives = |command: &str| -> BTreeSet<&str> {
        let paths = lines_after(&page, command).into_iter();
        paths
            .map(|path| path.strip_prefix("target/images/").and_then(|it| it.strip_suffix(".tar")).expect(path))
            .collect()
    };
    // There are no GPUs in kind.
    assert_eq!(archives("kind load image-archive "), ["operator", "worker"].into());
    assert_eq!(archives("ctr -n k8s.io images import "), names);
    let pushed = lines_after(&page, "for image in ");
    let [pushed] = pushed[..] else { panic!("one loop over images: {pushed:?}") };
    assert_eq!(pushed.trim_end_matches("; do").split(' ').collect::<BTreeSet<&str>>(), names);
    let copies = lines_after(&page, "skopeo copy oci-archive:target/images/$image.tar docker://");
    let [copy] = copies[..] else { panic!("one copy to a registry: {copies:?}") };
    let registry = copy.strip_suffix(&format!("/engram/$image:{version}")).expect("the names and version of the chart");
    assert!(page.contains(&format!("--set global.imageRegistry={registry}\n")), "the chart is set to another registry");
    let builder = read("xtask/src/images/mod.rs");
    assert!(builder.contains(r#"default_value = "localhost/engram""#), "`cargo xtask images` names images differently");
}
