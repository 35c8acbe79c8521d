//! The command as scripts see it: what it prints where, and how it ends, with no cluster running.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};

const CLUSTER: &str = "apiVersion: engram.dev/v1alpha1
kind: LearnerCluster
metadata: { name: demo }
spec: { workers: 2 }
";

struct Ended {
    code: i32,
    out: String,
    err: String,
}

/// Runs `engram` with a home of its own, so that no cluster of this machine is found.
fn engram(home: &Path, arguments: &[&str]) -> Ended {
    with(home, arguments, &[])
}

fn with(home: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engram"));
    for name in ["XDG_STATE_HOME", "ENGRAM_ADDRESS", "ENGRAM_STATE_DIR", "ENGRAM_CLUSTER", "NO_COLOR", "CLICOLOR_FORCE"]
    {
        command.env_remove(name);
    }
    command.env("HOME", home).current_dir(home).args(arguments).envs(variables.iter().copied());
    let Output { status, stdout, stderr } = command.output().expect("the command starts");
    let text = |bytes| String::from_utf8(bytes).expect("it prints text");
    Ended { code: status.code().expect("no signal ends it"), out: text(stdout), err: text(stderr) }
}

fn home() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

fn write(home: &Path, name: &str, text: &str) -> String {
    fs::write(home.join(name), text).expect("a file in a temporary folder");
    name.to_owned()
}

#[test]
fn every_exit_code_without_a_cluster_means_what_the_help_says() {
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
    // 3 is the code of a file that is not there, of a code that does not exist, and of a cluster that does not run.
    let cases: &[(i32, &str, &[&str])] = &[
        (0, "", &["validate", &file]),
        (0, "", &["--help"]),
        (2, "ENG-0101", &["validate", &wrong]),
        (2, "ENG-0101", &["up", &wrong]),
        (2, "give a file", &["up", "-d", "-"]),
        (2, "unexpected argument", &["validate", "--misspelt"]),
        (2, "unrecognized subcommand", &["nothing"]),
        (3, "ENG-0302", &["validate", "absent.yaml"]),
        (3, "no error code", &["explain", "ENG-9999"]),
        (3, "ENG-0408", &["status"]),
        (3, "ENG-0408", &["ps"]),
        (3, "ENG-0408", &["down"]),
        (3, "ENG-0408", &["down", "--cluster", "demo", "--delete-data", "--yes"]),
        (5, "ENG-0201", &["up", &gpu]),
        (5, "ENG-0201", &["up", &file, "--gpu", "required"]),
        (5, "ENG-0402", &["up", &file, "--port-base", &port]),
        (8, "ENG-0404", &["up", &file, "--state-dir", state.to_str().unwrap()]),
    ];
    // A machine with a GPU has what these miss.
    let has_gpu = engram_kernels::gpu::cuda::probe().is_ok();
    for (code, said, arguments) in cases.iter().filter(|(_, said, _)| !(has_gpu && *said == "ENG-0201")) {
        let ended = engram(home, arguments);
        assert_eq!(ended.code, *code, "engram {}: {}", arguments.join(" "), ended.err);
        assert!(ended.err.contains(said), "engram {}: {}", arguments.join(" "), ended.err);
        assert!(*code == 0 || ended.out.is_empty(), "an error is not data: {}", ended.out);
    }
    assert!(!home.join(".local").exists(), "a start that was refused leaves nothing behind");
    assert_eq!(fs::read_dir(&state).unwrap().count(), 1, "a newer state is left as it was");
}

#[test]
fn a_state_directory_that_cannot_be_used_is_told_before_anything_starts() {
    let home = home();
    let home = home.path();
    let file = write(home, "cluster.yaml", CLUSTER);
    let in_the_way = write(home, "a-file", "");
    let ended = engram(home, &["up", &file, "--port-base", "0", "--state-dir", &format!("{in_the_way}/state")]);
    assert_eq!(ended.code, 1, "{}", ended.err);
    assert!(ended.err.contains("ENG-0405") && ended.err.contains("a-file/state"), "{}", ended.err);
    let foreign = home.join("foreign");
    fs::create_dir(&foreign).unwrap();
    fs::write(foreign.join("letter.txt"), "dear").unwrap();
    let ended = engram(home, &["up", &file, "--port-base", "0", "--state-dir", "foreign"]);
    assert_eq!(ended.code, 5, "{}", ended.err);
    assert!(ended.err.contains("ENG-0403") && ended.err.contains("letter.txt"), "{}", ended.err);
    assert_eq!(fs::read_to_string(foreign.join("letter.txt")).unwrap(), "dear");
}

#[test]
fn nothing_that_was_fixed_at_creation_changes_at_a_later_start() {
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
        let ended = engram(home, &["up", &file, "--port-base", "0", "--state-dir", "state"]);
        (ended.code, ended.err)
    };
    let (code, err) = up(&CLUSTER.replace("workers: 2", "workers: 5"));
    assert_eq!(code, 5, "{err}");
    assert!(err.contains("ENG-0108") && err.contains("spec.partitions is 256") && err.contains("64"), "{err}");
    fs::write(&path, created("other")).unwrap();
    let (code, err) = up(CLUSTER);
    assert_eq!(code, 5, "{err}");
    assert!(err.contains("ENG-0403") && err.contains("other"), "{err}");
    assert_eq!(fs::read_to_string(&path).unwrap(), created("other"), "a start that is refused changes nothing");
}

#[test]
fn an_address_where_nobody_listens_is_unreachable() {
    let home = home();
    // A port that was free a moment ago, and in no range that a cluster of this machine uses.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ended = engram(home.path(), &["status", "--address", &format!("127.0.0.1:{port}")]);
    assert_eq!(ended.code, 6, "{}", ended.err);
    assert!(ended.err.contains("ENG-0601"), "{}", ended.err);
}

#[test]
fn data_goes_to_stdout_in_the_format_that_was_asked_for() {
    let home = home();
    let home = home.path();
    let file = write(home, "cluster.yaml", CLUSTER);
    let effective = engram(home, &["config", "show", &file, "--effective"]);
    assert!(effective.out.contains("partitions: 256"), "{}", effective.out);
    let again = write(home, "effective.yaml", &effective.out);
    assert_eq!(engram(home, &["validate", &again]).code, 0, "what is printed is a manifest");
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
fn colour_is_used_where_it_is_wanted_and_nowhere_else() {
    let home = home();
    let home = home.path();
    let plain = engram(home, &["status"]).err;
    assert!(!plain.contains('\u{1b}'), "a pipe gets no escape sequences: {plain}");
    let forced = with(home, &["status"], &[("CLICOLOR_FORCE", "1")]).err;
    assert!(forced.contains('\u{1b}'), "{forced}");
    let flag = with(home, &["status", "--color", "always"], &[("NO_COLOR", "1")]).err;
    assert!(flag.contains('\u{1b}'), "the flag is stronger than the environment: {flag}");
    let never = with(home, &["status", "--color", "never"], &[("CLICOLOR_FORCE", "1")]).err;
    assert!(!never.contains('\u{1b}'), "{never}");
}
