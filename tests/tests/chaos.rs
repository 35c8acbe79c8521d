//! Faults on real processes: what was acknowledged is there in the end, once, on every copy.

use engram_tests::engram;

/// Bounded so that the whole test, start and last look included, ends within five minutes on two cores.
const SECONDS: &str = "240";

#[test]
fn acknowledged_operations_survive_kills_pauses_and_cuts_exactly_once() {
    let arguments = ["chaos", "--kills", "20", "--pauses", "5", "--cuts", "5", "--seconds", SECONDS, "-o", "json"];
    let ran = engram(arguments, "").ended(0);
    let outcome = ran.json();
    println!("{}", ran.stderr);
    println!("{}", serde_json::to_string_pretty(&outcome).expect("JSON can be written"));
    let faults = outcome["faults"].as_array().expect("faults are a list");
    let done: u64 = faults.iter().filter_map(|fault| fault["done"].as_u64()).sum();
    assert_eq!(done, 30, "every fault was done, and healed before the next one");
    let ledger = &outcome["ledger"];
    let acked = ledger["acked"].as_u64().expect("it is a number");
    assert!(acked >= 200_000, "{acked} operations are too few to say anything");
    for wrong in ["lost", "doubled", "conjured"] {
        assert_eq!(ledger[wrong], 0, "{wrong}");
    }
    assert_eq!(outcome["replicas"]["different"], 0, "copies differ");
    // A campaign in which nothing was done to links, or no operation met a fault, would show nothing.
    let network = &outcome["network"];
    for counter in ["connections", "passedBytes", "blackHoles"] {
        assert_ne!(network[counter], 0, "{counter}");
    }
    assert!(faults.iter().any(|fault| fault["unavailable"]["count"] != 0), "no operation ever waited");
}
