//! Every function that docs/architecture.md names is in the file that it names.

use std::fs;

use crate::workspace;

/// The heading of the tables.
const SECTION: &str = "## Functions on these paths";

/// Returns the texts in backticks of a cell of a table.
fn names(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

#[test]
fn functions_of_the_architecture_exist() {
    let page = fs::read_to_string(workspace::root().join("docs/architecture.md")).unwrap();
    let section = page.split_once(SECTION).unwrap().1;
    let section = section.split("\n## ").next().unwrap();
    let (mut checked, mut missing) = (0, Vec::new());
    for row in section.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let &[_, functions, file] = &cells[..] else { panic!("a row has three cells: {row}") };
        let Some(file) = names(file).next() else { continue };
        let source = fs::read_to_string(workspace::root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
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
