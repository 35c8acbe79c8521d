//! The three workloads as a user runs them, against independent values.

use super::*;
use crate::task_run::run_locally;
use engram_api::{
    DataFile, Decode, DecodeSource, Graph, GraphSemiring, MarkovModel, MarkovSynthetic, TropicalClassify,
};
use engram_tropical::{HiddenMarkovModel, Matrix, power};

fn spec_of(decode: Option<DecodeSource>, classify: Option<TropicalClassify>, graph: Option<Graph>) -> TropicalRun {
    TropicalRun { decode: decode.map(|source| Decode { source }), classify, graph }
}

fn model() -> MarkovModel {
    MarkovModel {
        prior: vec![0.6, 0.4, 0.0],
        transition: vec![vec![0.7, 0.2, 0.1], vec![0.0, 0.5, 0.5], vec![0.3, 0.3, 0.4]],
        emission: vec![vec![0.5, 0.4, 0.1], vec![0.1, 0.3, 0.6], vec![0.25, 0.25, 0.5]],
        observations: vec![0, 1, 2, 2, 1, 0],
    }
}

/// Runs all stages of the decoder by itself and returns the path.
fn decoded(source: &DecodeSource) -> (Vec<u16>, f64) {
    let workload = DecodeWorkload::new(source).unwrap();
    let run = TropicalTasks { workloads: vec![Box::new(DecodeWorkload::new(source).unwrap())] };
    let mut results = Vec::new();
    loop {
        let tasks = run.plan(&results).unwrap();
        if tasks.is_empty() {
            break;
        }
        let context = crate::task_run::local::LocalContext::default();
        results.push(tasks.iter().map(|task| run.execute(task, &context).unwrap()).collect());
    }
    let (path, score, _) = workload.result(&run.results_of(0, &results)).unwrap();
    (path, score)
}

#[test]
fn decoded_path_is_the_best_of_all_paths() {
    let model = model();
    let (path, score) = decoded(&DecodeSource::Model(model.clone()));
    let probability = |path: &[usize]| {
        let mut product = model.prior[path[0]] * model.emission[path[0]][model.observations[0] as usize];
        for (pair, &symbol) in path.windows(2).zip(&model.observations[1..]) {
            product *= model.transition[pair[0]][pair[1]] * model.emission[pair[1]][symbol as usize];
        }
        product
    };
    let of_code = |code: usize| (0..6).map(|at| code / 3_usize.pow(at) % 3).collect::<Vec<usize>>();
    let best = (0..729).map(of_code).max_by(|a, b| probability(a).total_cmp(&probability(b))).unwrap();
    assert_eq!(path.iter().map(|&it| it as usize).collect::<Vec<_>>(), best);
    // Logarithms are rounded to 2^-12, twelve of them.
    assert!((score - probability(&best).ln()).abs() < 12.0 / 8192.0, "{score}");
}

#[test]
fn products_of_blocks_give_the_path_of_the_sequential_decoder() {
    // 300 observations in blocks of a few steps; short enough for f32 sums of the sequential decoder to be exact.
    let source = DecodeSource::Synthetic(MarkovSynthetic { states: 7, symbols: 5, length: 300, seed: 9 });
    let chain = chain::Chain::new(&source).unwrap();
    let symbols = chain.symbols;
    let emission: Vec<f32> = (0..7).flat_map(|state| chain.emission.row(state).to_vec()).collect();
    let transition: Vec<f32> =
        (0..49).map(|index| chain.steps[0].entries()[index] - chain.emission.row(index % 7)[0]).collect();
    let first = chain.start();
    let symbol = chain.observations[0] as usize;
    let prior = (0..7).map(|state| first[state] as f32 - chain.emission.row(state)[symbol]).collect();
    let model = HiddenMarkovModel::new(
        prior,
        &Matrix::new("transition", 7, 7, transition).unwrap(),
        Matrix::new("emission", 7, symbols, emission).unwrap(),
    );
    let expected = model.unwrap().decode(&chain.observations).unwrap();
    let (path, score) = decoded(&source);
    assert_eq!(path.iter().map(|&it| u32::from(it)).collect::<Vec<_>>(), expected.states);
    assert_eq!(score as f32, expected.score);
}

#[test]
fn decoding_is_the_same_on_any_number_of_workers_and_better_than_symbols_alone() {
    let source = DecodeSource::Synthetic(MarkovSynthetic { states: 8, symbols: 10, length: 4_000, seed: 5 });
    let run = TropicalTasks::new(&spec_of(Some(source), None, None), None).unwrap();
    let findings = run_locally(&run, 1).unwrap();
    assert_eq!(run_locally(&run, 3).unwrap(), findings);
    let metric = |name: &str| findings.metrics[name];
    assert_eq!(metric("decode_equals_viterbi"), 1.0);
    println!("decoded {}, alone {}", metric("decode_accuracy"), metric("decode_accuracy_by_symbol_alone"));
    assert!(metric("decode_accuracy") > metric("decode_accuracy_by_symbol_alone") + 0.1);
}

#[test]
fn bad_models_are_named_by_field_and_value() {
    let refused = |change: &dyn Fn(&mut MarkovModel)| {
        let mut model = model();
        change(&mut model);
        let spec = spec_of(Some(DecodeSource::Model(model)), None, None);
        TropicalTasks::new(&spec, None).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(refused(&|it| it.prior[1] = 0.5).contains("model.prior sums to 1.1"));
    assert!(refused(&|it| it.prior[1] = f64::NAN).contains("model.prior[1]: NaN is not allowed"));
    assert!(refused(&|it| it.transition[2][0] = -0.3).contains("model.transition[2][0]: -0.3"));
    assert!(refused(&|it| it.transition.truncate(2)).contains("model.transition has 2 rows"));
    assert!(refused(&|it| it.emission[1].truncate(2)).contains("model.emission[1] has 2 values; allowed: 3"));
    assert!(refused(&|it| it.observations[4] = 3).contains("observations[4]: 3 is not allowed; allowed: 0 to 2"));
    assert!(refused(&|it| it.observations.clear()).contains("observations is empty"));
    // A symbol that no state emits: every path has probability 0.
    let mut silent = model();
    silent.emission = vec![vec![0.5, 0.5, 0.0]; 3];
    let run = TropicalTasks::new(&spec_of(Some(DecodeSource::Model(silent)), None, None), None).unwrap();
    assert!(run_locally(&run, 1).unwrap_err().to_string().contains("observations[2]: no state is reachable"));
    assert!(TropicalTasks::new(&TropicalRun::default(), None).is_err());
}

#[test]
fn single_observation_is_decoded_without_blocks() {
    let (path, _) = decoded(&DecodeSource::Model(MarkovModel { observations: vec![2], ..model() }));
    assert_eq!(path, [1], "0.4 x 0.6 against 0.6 x 0.1");
}

/// 12 epochs, one start: about 95 % in a second.
fn short() -> TropicalClassify {
    TropicalClassify { epochs: 12, starts: 1, learning_rates: vec![0.01], hidden: 40, ..TropicalClassify::default() }
}

#[test]
fn both_models_classify_digits() {
    let run = TropicalTasks::new(&spec_of(None, Some(short()), None), None).unwrap();
    let findings = run_locally(&run, 2).unwrap();
    assert_eq!(run_locally(&run, 1).unwrap(), findings, "the same bits in any order of tasks");
    let (network, regression) = (findings.metrics["tropical_accuracy"], findings.metrics["logistic_accuracy"]);
    println!("tropical {network}, logistic {regression}");
    assert!(network > 0.9, "chance is 0.1, 0.95 expected: {network}");
    assert!(regression > 0.9, "{regression}");
    assert!(findings.summary[0].contains("test samples of handwritten digits (built in): tropical network"));
    assert!(findings.page.contains("<svg") && findings.page.contains("true class"));
}

#[test]
fn user_samples_are_classified_and_bad_rows_are_named() {
    let rows: String = (0..120_i32)
        .map(|it| {
            format!("{},{},{}\n", it % 7 - 3, it % 5 - 2, if (it % 7 - 3) + (it % 5 - 2) > 0 { "up" } else { "down" })
        })
        .collect();
    let csv = format!("a,b,side\n{rows}");
    let data =
        serde_json::from_value(serde_json::json!({ "csv": { "file": { "path": "folder/t.csv" }, "label": "side" } }))
            .unwrap();
    let spec = spec_of(None, Some(TropicalClassify { data, epochs: 30, ..short() }), None);
    let findings = run_locally(&TropicalTasks::new(&spec, Some(csv.as_bytes())).unwrap(), 1).unwrap();
    assert!(findings.metrics["tropical_accuracy"] > 0.9, "{findings:?}");
    let refused = |csv: &str| TropicalTasks::new(&spec, Some(csv.as_bytes())).err().unwrap().to_string();
    assert!(refused("a,b,side\n1,x,up\n").contains("t.csv, line 2, column b"));
    assert!(TropicalTasks::new(&spec, None).err().unwrap().to_string().contains("spec.tropical.classify.data.csv"));
    let both = TropicalRun { graph: Some(graph_of(GraphSemiring::MaxPlus, None)), ..spec };
    assert!(TropicalTasks::new(&both, Some(b"0")).err().unwrap().to_string().contains("one file per run"));
}

fn graph_of(semiring: GraphSemiring, power: Option<u32>) -> Graph {
    Graph { file: DataFile { path: Some("g.csv".to_owned()), ..DataFile::default() }, semiring, power }
}

fn graph(text: &str, semiring: GraphSemiring, power: Option<u32>) -> Result<TaskFindings, TaskError> {
    let spec = spec_of(None, None, Some(graph_of(semiring, power)));
    let run = TropicalTasks::new(&spec, Some(text.as_bytes()))?;
    let findings = run_locally(&run, 1)?;
    assert_eq!(run_locally(&run, 3)?, findings);
    Ok(findings)
}

#[test]
fn shortest_paths_and_cycle_mean_of_a_small_graph() {
    // 0 -> 1 (4), 0 -> 2 (1), 2 -> 1 (2), 1 -> 3 (5), 3 -> 0 (1): the cycle 0-2-1-3 has mean 9 / 4.
    let text = "inf,4,1,inf\n,inf,,5\n,2,,\n1,,,\n";
    let findings = graph(text, GraphSemiring::MinPlus, None).unwrap();
    assert!((findings.metrics["graph_cycle_mean"] - 2.25).abs() < 1e-12);
    assert_eq!(findings.metrics["graph_connected_pairs"], 16.0);
    // From 0: itself 0, to 1 by 2 at 3, to 2 at 1, to 3 at 8.
    let row = "<th scope=\"row\">0</th><td>0</td><td>3</td><td>1</td><td>8</td>";
    assert!(findings.page.contains(row), "{}", findings.page);
    assert!(graph("inf,-1\n-1,inf\n", GraphSemiring::MinPlus, None).unwrap().summary[1].contains("no closure"));
}

#[test]
fn power_keeps_missing_edges_missing_and_equals_the_library() {
    let nodes = 70;
    let edge = |index: usize| {
        let (from, to) = (index / nodes, index % nodes);
        if (from * 7 + to * 3) % 11 == 0 { (from as f32 - to as f32) / 8.0 } else { f32::NEG_INFINITY }
    };
    let entries: Vec<f32> = (0..nodes * nodes).map(edge).collect();
    let text: String = entries
        .chunks(nodes)
        .map(|row| row.iter().map(ToString::to_string).collect::<Vec<_>>().join(",") + "\n")
        .collect();
    let expected = power(&Matrix::new("edges", nodes, nodes, entries).unwrap(), 5, 1).unwrap();
    let mut bytes = Vec::new();
    crate::task_run::wire::put_f32(&mut bytes, expected.entries());
    let findings = graph(&text, GraphSemiring::MaxPlus, Some(5)).unwrap();
    assert_eq!(findings.outputs["graphDigest"], format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&bytes)));
    // No edge into node 1 of a chain: missing in every power.
    let chain = graph(",5\n,\n", GraphSemiring::MaxPlus, Some(2)).unwrap();
    assert_eq!(chain.metrics["graph_connected_pairs"], 0.0, "a missing edge plus a weight is missing");
}

#[test]
fn refused_weights_are_named_by_line_and_column() {
    let refused = |text: &str, semiring| graph(text, semiring, None).unwrap_err().to_string();
    let largest = GraphSemiring::MaxPlus;
    assert!(refused("0,NaN\n0,0\n", largest).contains("g.csv, line 1, column 2: \"NaN\""));
    assert!(refused("0,0\ninf,0\n", largest).contains("line 2, column 1: \"inf\""));
    assert!(refused("0,0\n-inf,0\n", GraphSemiring::MinPlus).contains("line 2, column 1: \"-inf\""));
    assert!(refused("0,0\n0,2e30\n", largest).contains("line 2, column 2"));
    assert!(refused("0,0\n0\n", largest).contains("line 2: 1 columns; allowed: 2"));
    assert!(refused("0,0\n", largest).contains("1 rows of 2 columns"));
    assert!(refused("", largest).contains("square"));
}
