//! Pages of `docs/results` that several commands write: each command replaces its own section.

use std::fs;

use anyhow::{Context, Result};

use crate::workspace;

/// Replaces the section of this heading in a page of `docs/results`, or appends it; a page that does not exist begins with `title`.
///
/// # Errors
/// The page cannot be read or written.
pub(crate) fn replace_section(page: &str, title: &str, heading: &str, body: &str) -> Result<()> {
    let path = workspace::root().join("docs/results").join(page);
    let old = match fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => format!("# {title}\n"),
        read => read.with_context(|| format!("failed to read {}", path.display()))?,
    };
    fs::write(&path, with_section(&old, heading, body))
        .with_context(|| format!("failed to write {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Returns a page in which the section of this heading has this body.
fn with_section(page: &str, heading: &str, body: &str) -> String {
    let own = format!("## {heading}");
    let (mut before, mut after) = (Vec::new(), Vec::new());
    let (mut is_found, mut is_inside) = (false, false);
    for line in page.lines() {
        if line.starts_with("## ") {
            is_inside = line == own;
            is_found |= is_inside;
        }
        match (is_inside, is_found) {
            (true, _) => {}
            (false, false) => before.push(line),
            (false, true) => after.push(line),
        }
    }
    let section = format!("{own}\n\n{}", body.trim());
    let parts = [before.join("\n").trim().to_owned(), section, after.join("\n").trim().to_owned()];
    let parts: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    parts.join("\n\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_section_is_replaced_and_the_others_stay() {
        let page = with_section("# Page\n", "One", "a\n");
        assert_eq!(page, "# Page\n\n## One\n\na\n");
        let page = with_section(&page, "Two", "b");
        assert_eq!(with_section(&page, "One", "c"), "# Page\n\n## One\n\nc\n\n## Two\n\nb\n");
        assert_eq!(with_section(&page, "Two", "d"), "# Page\n\n## One\n\na\n\n## Two\n\nd\n");
    }
}
