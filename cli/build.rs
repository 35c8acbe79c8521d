//! Sets `ENGRAM_COMMIT`, which `engram version` prints: from the environment, or the commit of the checkout for release builds.
//!
//! Development builds do not follow the checkout: the crate would be compiled again after every commit.

use std::process::Command;

const VARIABLE: &str = "ENGRAM_COMMIT";

fn main() {
    println!("cargo:rerun-if-env-changed={VARIABLE}");
    println!("cargo:rerun-if-changed=build.rs");
    let given = std::env::var(VARIABLE).ok().filter(|commit| !commit.is_empty());
    let is_release = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let commit = given.or_else(|| if is_release { checkout() } else { None });
    println!("cargo:rustc-env={VARIABLE}={}", commit.as_deref().unwrap_or("unknown"));
}

/// Returns the commit of the checkout, and follows it; `None` outside of a repository, or without git.
fn checkout() -> Option<String> {
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
    let reference = git(&["symbolic-ref", "--quiet", "HEAD"]);
    for path in [Some("HEAD".to_owned()), reference, Some("packed-refs".to_owned())].into_iter().flatten() {
        let path = git(&["rev-parse", "--git-path", &path])?;
        if std::path::Path::new(&path).exists() {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    Some(commit)
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}
