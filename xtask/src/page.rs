//! `cargo xtask page`: checks that a report works offline in a real browser.
//!
//! A headless Chromium opens the file while all host names are unresolvable. The page passes if it has drawn something, has written nothing to its
//! console, and has requested nothing from the network.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::{process, tools, workspace};

/// Time limit of the browser; it needs about a second.
const LIMIT: Duration = Duration::from_secs(120);

/// Virtual time of the page until it counts as loaded.
const SETTLE_MS: u32 = 10_000;

/// Checks `report` and optionally writes a screenshot.
///
/// # Errors
/// When the page fails the check, or there is no browser.
pub(crate) fn run(report: &Path, screenshot: Option<&Path>) -> Result<()> {
    let report = report.canonicalize().with_context(|| format!("failed to find {}", report.display()))?;
    let url = format!("file://{}", report.display());
    let scratch = workspace::target().join("page-check");
    fs::create_dir_all(&scratch).with_context(|| format!("failed to create {}", scratch.display()))?;
    let network_log = scratch.join("network.json");

    let mut check = browser(&scratch)?;
    check.arg(format!("--log-net-log={}", network_log.display())).args(["--dump-dom", &url]);
    let opened = process::capture_within(&mut check, LIMIT)?;
    let stderr = String::from_utf8_lossy(&opened.stderr);
    ensure!(opened.status.success(), "Chromium failed ({}):\n{stderr}", opened.status);

    let mut faults = console_messages(&stderr);
    let log = fs::read_to_string(&network_log).context("failed to read Chromium's network log")?;
    faults.extend(requests_of_the_page(&log)?.into_iter().map(|address| format!("loads from outside: {address}")));
    if !String::from_utf8_lossy(&opened.stdout).contains("<svg") {
        faults.push("draws nothing: no <svg> in the page".to_owned());
    }
    if let Some(picture) = screenshot {
        let picture = std::path::absolute(picture).context("failed to resolve the path of the screenshot")?;
        let mut draw = browser(&scratch)?;
        draw.arg(format!("--screenshot={}", picture.display())).args(["--window-size=1280,4000", &url]);
        let drawn = process::capture_within(&mut draw, LIMIT)?;
        ensure!(drawn.status.success() && picture.is_file(), "Chromium wrote no screenshot ({})", drawn.status);
    }
    if !faults.is_empty() {
        bail!("{} fails in a browser:\n  {}", report.display(), faults.join("\n  "));
    }
    eprintln!("{}: no script error, nothing loaded from outside", report.display());
    Ok(())
}

fn browser(scratch: &Path) -> Result<Command> {
    let mut command = Command::new(tools::chromium()?);
    command.args(["--headless=new", "--disable-gpu", "--no-first-run", "--disable-extensions", "--hide-scrollbars"]);
    // As root, in containers, Chromium has no sandbox; the opened file is trusted.
    command.args(["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-sync"]);
    command.args(["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"]);
    command.arg(format!("--virtual-time-budget={SETTLE_MS}"));
    command.arg(format!("--user-data-dir={}", scratch.join("profile").display()));
    Ok(command)
}

/// Returns console messages of the page, uncaught errors included.
fn console_messages(stderr: &str) -> Vec<String> {
    let expected = stderr.lines().filter_map(|line| line.split_once("CONSOLE").map(|(_, expected)| expected));
    expected.map(|expected| format!("console: {}", expected.trim_start_matches(|sign: char| sign != '"'))).collect()
}

/// Returns the network addresses that the page requested. Requests of the browser itself have no origin.
fn requests_of_the_page(network_log: &str) -> Result<Vec<String>> {
    let log: NetworkLog = serde_json::from_str(network_log).context("failed to parse Chromium's network log")?;
    let mut urls: Vec<String> = log
        .events
        .into_iter()
        .filter_map(|event| event.params)
        .filter(|parameters| parameters.initiator.as_deref().is_some_and(|origin| origin != "not an origin"))
        .filter_map(|parameters| parameters.url)
        .collect();
    urls.sort();
    urls.dedup();
    Ok(urls)
}

#[derive(Deserialize)]
struct NetworkLog {
    events: Vec<NetworkEvent>,
}

#[derive(Deserialize)]
struct NetworkEvent {
    params: Option<NetworkParameters>,
}

#[derive(Deserialize)]
struct NetworkParameters {
    url: Option<String>,
    initiator: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_requests_of_the_page_are_distinguished_from_the_browsers() {
        let stderr = "[1:2:0/0:ERROR:dbus/bus.cc:405] Failed to connect\n\
            [1:1:0/0:INFO:CONSOLE:7] \"Uncaught ReferenceError: x is not defined\", source: file:///r.html (7)";
        let expected = "console: \"Uncaught ReferenceError: x is not defined\", source: file:///r.html (7)";
        assert_eq!(console_messages(stderr), [expected]);

        let log = r#"{"events": [
            {"type": 1},
            {"params": {"url": "https://update.example/", "initiator": "not an origin"}},
            {"params": {"url": "https://cdn.example/d3.js", "initiator": "null"}},
            {"params": {"url": "https://cdn.example/d3.js"}},
            {"params": {"other": 1}}
        ]}"#;
        assert_eq!(requests_of_the_page(log).unwrap(), ["https://cdn.example/d3.js"]);
    }
}
