//! Fault injection on real processes: every acknowledged write is applied exactly once on every replica.

use engram_tests::engram;

/// Time limit of the campaign: keeps the whole test within five minutes on two cores.
const SECONDS: &str = "240";

#[test]
fn acknowledged_writes_survive_faults_exactly_once() {
    let arguments =
        ["chaos", "--kills", "20", "--pauses", "5", "--network-faults", "5", "--seconds", SECONDS, "-o", "json"];
    let ran = engram(arguments, "").exits_with(0);
    let outcome = ran.json();
    println!("{}", ran.stderr);
    println!("{}", serde_json::to_string_pretty(&outcome).expect("JSON can be written"));
    let faults = outcome["faults"].as_array().expect("faults are a list");
    let done: u64 = faults.iter().filter_map(|fault| fault["done"].as_u64()).sum();
    assert_eq!(done, 30, "every fault was injected and recovered");
    let ledger = &outcome["ledger"];
    let acked = ledger["acked"].as_u64().expect("acked is a number");
    assert!(acked >= 200_000, "{acked} operations are too few");
    for counter in ["lost", "doubled", "conjured"] {
        assert_eq!(ledger[counter], 0, "{counter}");
    }
    assert_eq!(outcome["replicas"]["different"], 0, "replicas differ");
    // Without network faults, or without affected operations, the campaign proves nothing.
    let network = &outcome["network"];
    for counter in ["connections", "passedBytes", "blackHoles"] {
        assert_ne!(network[counter], 0, "{counter}");
    }
    assert!(faults.iter().any(|fault| fault["unavailable"]["count"] != 0), "no operation was affected");
}
