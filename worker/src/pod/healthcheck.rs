//! Asks a page whether whoever has it is well: for images without a shell, by the program that is there anyway.

use anyhow::{Context as _, Result, bail, ensure};
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

/// How long one answer may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// Between questions.
const ASK: Duration = Duration::from_millis(500);
/// What is read of an answer.
const BYTES: u64 = 4 << 10;

/// Asks for `page` (`HOST:PORT/PATH`) until the answer is 200, for as long as `wait` allows, and once at least.
///
/// # Errors
/// The last answer was another, or there was none.
pub fn healthcheck(page: &str, wait: Duration) -> Result<()> {
    let until = Instant::now() + wait;
    loop {
        let asked = ask(page).with_context(|| format!("http://{page}"));
        if asked.is_ok() || Instant::now() >= until {
            return asked;
        }
        std::thread::sleep(ASK);
    }
}

fn ask(page: &str) -> Result<()> {
    let (host, path) = page.split_once('/').context("allowed: HOST:PORT/PATH")?;
    let address = host.to_socket_addrs()?.next().context("the name stands for no address")?;
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    stream.write_all(format!("GET /{path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    stream.take(BYTES).read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let Some((head, body)) = answer.split_once("\r\n\r\n") else { bail!("the answer is not HTTP") };
    let code = head.split_whitespace().nth(1).unwrap_or_default();
    ensure!(code == "200", "{code}: {}", body.trim());
    Ok(())
}
