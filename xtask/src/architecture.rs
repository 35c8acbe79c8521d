//! Every function that docs/architecture.md names is in the file that it names.

use std::fs;

use crate::workspace;

/// The heading of the tables.
const SECTION: &str = "## Functions on these paths";

/// The heading of the table of a store's owners.
const STORE: &str = "## The store";

/// Returns the texts in backticks of a cell of a table.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

/// Returns the page from a heading to the next.
fn section<'a>(page: &'a str, heading: &str) -> &'a str {
    let section = page.split_once(heading).unwrap().1;
    section.split("\n## ").next().unwrap()
}

fn source(file: &str) -> String {
    fs::read_to_string(workspace::root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

#[test]
fn owners_of_the_store_exist() {
    let page = fs::read_to_string(workspace::root().join("docs/architecture.md")).unwrap();
    let mut checked = 0;
    for row in section(&page, STORE).lines().filter(|line| line.starts_with("| `")) {
        let (owner, file) = (names(row).next().unwrap(), names(row).last().unwrap());
        let source = source(file);
        assert!(source.contains(&format!("struct {owner} {{")), "{file} has no struct {owner}");
        checked += 1;
    }
    assert_eq!(checked, 4);
}

#[test]
fn functions_of_the_architecture_exist() {
    let page = fs::read_to_string(workspace::root().join("docs/architecture.md")).unwrap();
    let (mut checked, mut missing) = (0, Vec::new());
    for row in section(&page, SECTION).lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let &[_, functions, file] = &cells[..] else { panic!("a row has three cells: {row}") };
        let Some(file) = names(file).next() else { continue };
        let source = source(file);
        for name in names(functions) {
            checked += 1;
            if !source.contains(&format!("fn {name}(")) && !source.contains(&format!("fn {name}<")) {
                missing.push(format!("{file} has no function {name}"));
            }
        }
    }
    assert!(checked > 50, "only {checked} functions found");
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}
