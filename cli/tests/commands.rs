//! Output streams and exit codes of commands without a running cluster.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{self, Command};

const CLUSTER: &str = "apiVersion: engram.dev/v1alpha1
kind: LearnerCluster
metadata: { name: demo }
spec: { workers: 2 }
";

struct Output {
    code: i32,
    out: String,
    err: String,
}

/// Runs `engram` with a private home directory, so that no local cluster is found.
fn engram(home: &Path, arguments: &[&str]) -> Output {
    with(home, arguments, &[])
}

fn with(home: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engram"));
    for name in ["XDG_STATE_HOME", "ENGRAM_ADDRESS", "ENGRAM_STATE_DIR", "ENGRAM_CLUSTER", "NO_COLOR", "CLICOLOR_FORCE"]
    {
        command.env_remove(name);
    }
    command.env("HOME", home).current_dir(home).args(arguments).envs(variables.iter().copied());
    let process::Output { status, stdout, stderr } = command.output().expect("failed to start the binary");
    let text = |bytes| String::from_utf8(bytes).expect("output is not UTF-8");
    Output { code: status.code().expect("the command was killed by a signal"), out: text(stdout), err: text(stderr) }
}

fn home() -> tempfile::TempDir {
    tempfile::tempdir().expect("failed to create a temporary folder")
}

fn write(home: &Path, name: &str, text: &str) -> String {
    fs::write(home.join(name), text).expect("a file in failed to create a temporary folder");
    name.to_owned()
}

#[test]
fn exit_codes_are_as_documented() {
    let home = home();
    let home = home.path();
    let file = write(home, "cluster.yaml", CLUSTER);
    let wrong = write(home, "wrong.yaml", &CLUSTER.replace("workers", "worker"));
    let gpu = write(home, "gpu.yaml", &CLUSTER.replace("workers: 2", "workers: 2, gpu: { mode: Required }"));
    let state = home.join("newer");
    fs::create_dir(&state).unwrap();
    fs::write(state.join("cluster.json"), r#"{"formatVersion": 99}"#).unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let cases: &[(i32, &str, &[&str])] = &[
        (0, "", &["validate", &file]),
        (0, "", &["--help"]),
        (2, "ENG-0101", &["validate", &wrong]),
        (2, "ENG-0101", &["up", &wrong]),
        (2, "give a file", &["up", "-d", "-"]),
        (2, "unexpected argument", &["validate", "--misspelt"]),
        (2, "unrecognized subcommand", &["nothing"]),
        (3, "ENG-0302", &["validate", "absent.yaml"]),
        (3, "unknown error code", &["explain", "ENG-9999"]),
        (3, "ENG-0408", &["status"]),
        (3, "ENG-0408", &["ps"]),
        (3, "ENG-0408", &["down"]),
        (3, "ENG-0408", &["down", "--cluster", "demo", "--delete-data", "--yes"]),
        (5, "ENG-0201", &["up", &gpu]),
        (5, "ENG-0201", &["up", &file, "--gpu", "required"]),
        (5, "ENG-0402", &["up", &file, "--port-base", &port]),
        (8, "ENG-0404", &["up", &file, "--state-dir", state.to_str().unwrap()]),
    ];
    // These cases need a machine without a GPU.
    let has_gpu = engram_kernels::gpu::cuda::probe().is_ok();
    for (code, text, arguments) in cases.iter().filter(|(_, text, _)| !(has_gpu && *text == "ENG-0201")) {
        let output = engram(home, arguments);
        assert_eq!(output.code, *code, "engram {}: {}", arguments.join(" "), output.err);
        assert!(output.err.contains(text), "engram {}: {}", arguments.join(" "), output.err);
        assert!(*code == 0 || output.out.is_empty(), "errors do not go to stdout: {}", output.out);
    }
    assert!(!home.join(".local").exists(), "a rejected start leaves no files");
    assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "a newer state directory is not changed");
}

#[test]
fn unusable_state_directories_are_reported_before_anything_starts() {
    let home = home();
    let home = home.path();
    let file = write(home, "cluster.yaml", CLUSTER);
    let obstacle = write(home, "a-file", "");
    let output = engram(home, &["up", &file, "--port-base", "0", "--state-dir", &format!("{obstacle}/state")]);
    assert_eq!(output.code, 1, "{}", output.err);
    assert!(output.err.contains("ENG-0405") && output.err.contains("a-file/state"), "{}", output.err);
    let foreign = home.join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("letter.txt"), "dear").unwrap();
    let output = engram(home, &["up", &file, "--port-base", "0", "--state-dir", "foreign"]);
    assert_eq!(output.code, 5, "{}", output.err);
    assert!(output.err.contains("ENG-0403") && output.err.contains("letter.txt"), "{}", output.err);
    assert_eq!(fs::read_to_string(foreign.join("letter.txt")).unwrap(), "dear");
}

#[test]
fn immutable_fields_do_not_change_at_a_later_start() {
    let home = home();
    let home = home.path();
    let created = |name: &str| {
        format!(
            r#"{{"formatVersion":1,"cluster":"{:032x}","name":"{name}","memories":0,"spec":{{"workers":5,"partitions":64}}}}"#,
            7
        )
    };
    fs::create_dir(home.join("state")).unwrap();
    let path = home.join("state/cluster.json");
    fs::write(&path, created("demo")).unwrap();
    let up = |text: &str| {
        let file = write(home, "cluster.yaml", text);
        let output = engram(home, &["up", &file, "--port-base", "0", "--state-dir", "state"]);
        (output.code, output.err)
    };
    let (code, err) = up(&CLUSTER.replace("workers: 2", "workers: 5"));
    assert_eq!(code, 5, "{err}");
    assert!(err.contains("ENG-0108") && err.contains("spec.partitions is 256") && err.contains("64"), "{err}");
    fs::write(&path, created("other")).unwrap();
    let (code, err) = up(CLUSTER);
    assert_eq!(code, 5, "{err}");
    assert!(err.contains("ENG-0403") && err.contains("other"), "{err}");
    assert_eq!(fs::read_to_string(&path).unwrap(), created("other"), "a rejected start changes nothing");
}

#[test]
fn closed_ports_are_unreachable() {
    let home = home();
    // An ephemeral port, outside of the range that local clusters use.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let output = engram(home.path(), &["status", "--address", &format!("127.0.0.1:{port}")]);
    assert_eq!(output.code, 6, "{}", output.err);
    assert!(output.err.contains("ENG-0601"), "{}", output.err);
}

#[test]
fn results_go_to_stdout_in_the_requested_format() {
    let home = home();
    let home = home.path();
    let file = write(home, "cluster.yaml", CLUSTER);
    let effective = engram(home, &["config", "show", &file, "--effective"]);
    assert!(effective.out.contains("partitions: 256"), "{}", effective.out);
    let again = write(home, "effective.yaml", &effective.out);
    assert_eq!(engram(home, &["validate", &again]).code, 0, "the output is a valid manifest");
    let schema: serde_json::Value = serde_json::from_str(&engram(home, &["config", "schema"]).out).unwrap();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    assert_eq!(engram(home, &["config", "schema", "Pod"]).code, 2);
    let version: serde_json::Value = serde_json::from_str(&engram(home, &["version", "-o", "json"]).out).unwrap();
    assert_eq!(version["client"], env!("CARGO_PKG_VERSION"));
    let code = engram(home, &["explain", "0402"]);
    assert!(code.out.starts_with("ENG-0402: port in use\n"), "{}", code.out);
    let codes = engram(home, &["explain"]);
    assert!(codes.out.starts_with("code\texit\ttitle\n"), "tab-separated in a pipe: {}", codes.out);
    let codes = engram(home, &["explain", "-o", "json"]);
    assert_eq!(serde_json::from_str::<serde_json::Value>(&codes.out).unwrap()["kind"], "List");
    for shell in ["bash", "zsh", "fish"] {
        assert!(engram(home, &["completions", shell]).out.contains("engram"), "{shell}");
    }
}

#[test]
fn autoscaling_of_a_recorded_load_is_simulated_by_both_rules() {
    let home = home();
    let home = home.path();
    let line = |slot: u32| {
        let load = 1_000.0 * (1.2 + (f64::from(slot) * std::f64::consts::TAU / 96.0).sin());
        format!("{},{load}\n", 1_700_000_000 + slot * 900)
    };
    let text: String = std::iter::once("time,load\n".to_owned()).chain((0..96 * 6).map(line)).collect();
    let file = write(home, "load.csv", &text);
    let options =
        ["autoscale", "simulate", "--load", &file, "--capacity", "100", "--target", "0.9", "--startup", "1800"];
    let output = engram(home, &[&options[..], &["-o", "json"]].concat());
    let list: serde_json::Value = serde_json::from_str(&output.out).expect(&output.err);
    let violations = |item: usize| list["items"][item]["violations"].as_u64().unwrap();
    assert_eq!((&list["items"][0]["rule"], &list["items"][1]["rule"]), (&"reactive".into(), &"predictive".into()));
    assert!(violations(1) < violations(0), "{}", output.out);
    let plotted = engram(home, &[&options[..], &["-o", "table"]].concat()).out;
    assert!(plotted.contains("predictive: load █"), "{plotted}");
    let decisions = engram(home, &[&options[..], &["--decisions"]].concat()).out;
    assert!(decisions.starts_with("time\tfrom\tto\treason\tmessage\n2023-11-1"), "{decisions}");
    assert!(decisions.contains("ForecastAboveTarget"), "{decisions}");
    let wrong = write(home, "wrong.csv", "time,load\n0,1\n60,many\n");
    let output = engram(home, &["autoscale", "simulate", "--load", &wrong]);
    assert_eq!(output.code, 2);
    assert!(output.err.contains("wrong.csv, line 3, column load"), "{}", output.err);
    assert_eq!(engram(home, &[&options[..], &["--tolerance", "2"]].concat()).code, 2);
}

#[test]
fn decisions_of_a_file_are_plotted_listed_and_written_as_a_page() {
    let home = home();
    let home = home.path();
    let line = |slot: u32| {
        let (time, load) = (1_700_000_000 + slot * 60, 1_000 + slot * 10);
        let change = if slot == 20 {
            (3, "ForecastAboveTarget,\"Scale from 2 to 3 workers: more is expected.\"")
        } else {
            (2, "OnTarget,")
        };
        format!("{time},{load},2,{},{load},{},180,,Active,{}\n", change.0, load + 200, change.1)
    };
    let header = engram_forecast::history::HEADER;
    let file = write(home, "decisions.csv", &(format!("{header}\n") + &(0..40).map(line).collect::<String>()));
    let explain = ["autoscale", "explain", "--file", &file];
    let table = engram(home, &[&explain[..], &["-o", "table"]].concat()).out;
    assert!(table.contains("40 decisions") && table.contains('▲') && table.contains("more is expected."), "{table}");
    let output = engram(home, &[&explain[..], &["-o", "json"]].concat());
    let list: serde_json::Value = serde_json::from_str(&output.out).expect(&output.err);
    assert_eq!((&list["items"][20]["desired"], &list["items"][20]["upperLoad"]), (&3.into(), &1_400.0.into()));
    let page = home.join("page.html");
    assert_eq!(engram(home, &[&explain[..], &["--to", page.to_str().unwrap()]].concat()).code, 0);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains("<td>ForecastAboveTarget</td>"), "{page}");
    let simulated = engram(home, &["autoscale", "simulate", "--load", &file, "-o", "json"]);
    assert_eq!(simulated.code, 0, "the file is a load too: {}", simulated.err);
    let wrong = write(home, "wrong.csv", &format!("{header}\n1,2,3\n"));
    let output = engram(home, &["autoscale", "explain", "--file", &wrong]);
    assert!(output.code == 2 && output.err.contains("1 invalid lines"), "{}", output.err);
}

#[test]
fn color_follows_flag_environment_and_terminal() {
    let home = home();
    let home = home.path();
    let plain = engram(home, &["status"]).err;
    assert!(!plain.contains('\u{1b}'), "a pipe gets no escape sequences: {plain}");
    let forced = with(home, &["status"], &[("CLICOLOR_FORCE", "1")]).err;
    assert!(forced.contains('\u{1b}'), "{forced}");
    let flag = with(home, &["status", "--color", "always"], &[("NO_COLOR", "1")]).err;
    assert!(flag.contains('\u{1b}'), "the flag overrides the environment: {flag}");
    let never = with(home, &["status", "--color", "never"], &[("CLICOLOR_FORCE", "1")]).err;
    assert!(!never.contains('\u{1b}'), "{never}");
}
