//! Every documented `engram` command parses.

mod extract;

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
