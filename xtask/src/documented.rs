//! Every documented `cargo xtask` command parses.

#[path = "../../cli/tests/extract/mod.rs"]
mod extract;

use clap::CommandFactory as _;

const PROGRAM: &str = "cargo xtask";

#[test]
fn documented_commands_parse() {
    let grammar = super::Arguments::command();
    let mut mentions = extract::documented(PROGRAM);
    extract::help_texts(PROGRAM, &grammar, PROGRAM, &mut mentions);
    assert!(mentions.len() > 50, "only {} commands found", mentions.len());
    let failures: Vec<String> =
        mentions.iter().filter_map(|mention| extract::failure(&grammar, PROGRAM, mention)).collect();
    assert!(failures.is_empty(), "{} of {} fail:\n{}", failures.len(), mentions.len(), failures.join("\n"));
}
