//! Cuts of the links between two workers: reset connections, and packets that are swallowed, in one direction or both.
//!
//! Packets are dropped in a network namespace of the test, which ends with its last process. That takes root and nftables, resets `ss` of iproute2.

use nix::sched::{CloneFlags, unshare};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Interval between two looks for new connections.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// Pairs of source and destination port whose packets are dropped, and the rule that drops them.
const RULES: &str = "add table inet faults
add set inet faults swallowed { type inet_service . inet_service; }
add chain inet faults input { type filter hook input priority 0; }
add rule inet faults input tcp sport . tcp dport @swallowed drop
";

/// What happens to the connections between two workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// They are reset, again and again.
    Reset,
    /// What the first worker sends is swallowed; nothing is reset.
    OneWay,
    /// What either sends is swallowed.
    BothWays,
}

/// A connection, seen from one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct End {
    process: u32,
    port: u16,
    peer_port: u16,
}

/// Moves this thread, and the processes that it starts from now on, to a network namespace that has a loopback interface only.
///
/// # Errors
/// What is missing.
pub(super) fn enter_namespace() -> Result<(), String> {
    unshare(CloneFlags::CLONE_NEWNET).map_err(|error| format!("no permission for a network namespace: {error}"))?;
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    if !up.as_ref().is_ok_and(|status| status.success()) {
        return Err(format!("ip of iproute2: {up:?}"));
    }
    nft(RULES).map_err(|error| format!("nft of nftables: {error}"))
}

/// Cuts the links between two processes for a while; returns the number of connections that were cut.
pub(super) fn cut(kind: Cut, (a, b): (u32, u32), lasts: Duration) -> usize {
    let end = Instant::now() + lasts;
    let mut done: BTreeSet<End> = BTreeSet::new();
    while Instant::now() < end {
        let ends = connections(a, b).unwrap_or_default();
        // A reset connection is new when it is found again; packets of a port pair are swallowed until the end.
        let new: Vec<End> = ends.into_iter().filter(|end| kind == Cut::Reset || !done.contains(end)).collect();
        let sent: Vec<End> = new.iter().copied().filter(|end| kind == Cut::BothWays || end.process == a).collect();
        if !sent.is_empty() {
            match kind {
                Cut::Reset => reset(&sent),
                Cut::OneWay | Cut::BothWays => swallow(&sent).expect("the namespace has the table"),
            }
        }
        done.extend(new);
        std::thread::sleep(LOOK_INTERVAL);
    }
    if kind != Cut::Reset {
        nft("flush set inet faults swallowed\n").expect("the namespace has the table");
    }
    done.len() / 2
}

fn reset(ends: &[End]) {
    let filter = |end: &End| format!("( sport = :{} and dport = :{} )", end.port, end.peer_port);
    let filter = ends.iter().map(filter).collect::<Vec<_>>().join(" or ");
    // A connection that has just ended is no failure.
    let _ = Command::new("ss").args(["-KtnH", "state", "established", &filter]).output();
}

fn swallow(ends: &[End]) -> io::Result<()> {
    let pairs: Vec<String> = ends.iter().map(|end| format!("{} . {}", end.port, end.peer_port)).collect();
    nft(&format!("add element inet faults swallowed {{ {} }}\n", pairs.join(", ")))
}

fn nft(rules: &str) -> io::Result<()> {
    let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    child.stdin.take().expect("it is piped").write_all(rules.as_bytes())?;
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// Returns both ends of each connection between two processes.
fn connections(a: u32, b: u32) -> io::Result<Vec<End>> {
    let listed = Command::new("ss").args(["-tnpH", "state", "established"]).output()?;
    let mut ends = BTreeMap::new();
    for line in String::from_utf8_lossy(&listed.stdout).lines() {
        let mut words = line.split_whitespace().skip(2);
        let mut port = || words.next()?.rsplit_once(':')?.1.parse::<u16>().ok();
        let process = [a, b].into_iter().find(|pid| line.contains(&format!("pid={pid},")));
        if let (Some(port), Some(peer_port), Some(process)) = (port(), port(), process) {
            ends.insert((port, peer_port), process);
        }
    }
    let is_between = |((port, peer_port), process): &(&(u16, u16), &u32)| {
        ends.get(&(*peer_port, *port)).is_some_and(|other| other != *process)
    };
    let end = |((port, peer_port), process): (&(u16, u16), &u32)| End {
        process: *process,
        port: *port,
        peer_port: *peer_port,
    };
    Ok(ends.iter().filter(is_between).map(end).collect())
}
