//! Health check over HTTP, for images without a shell.

use anyhow::{Context as _, Result, bail, ensure};
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::time::{Duration, Instant};

/// Deadline of one request.
const DEADLINE: Duration = Duration::from_secs(5);
/// Interval between requests: the process asked is another one, which announces nothing to this command.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Maximum number of bytes read of a response.
const MAX_RESPONSE_BYTES: u64 = 4 << 10;

/// Requests `page` (`HOST:PORT/PATH`) until the response is 200, for at most `wait`, and at least once.
///
/// # Errors
/// The last response had another status, or there was none.
pub fn healthcheck(page: &str, wait: Duration) -> Result<()> {
    let until = Instant::now() + wait;
    loop {
        let result = request(page).with_context(|| format!("http://{page}"));
        if result.is_ok() || Instant::now() >= until {
            return result;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn request(page: &str) -> Result<()> {
    let (host, path) = page.split_once('/').context("allowed: HOST:PORT/PATH")?;
    let address = host.to_socket_addrs()?.next().context("the name resolves to no address")?;
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    stream.write_all(format!("GET /{path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut response = Vec::new();
    stream.take(MAX_RESPONSE_BYTES).read_to_end(&mut response)?;
    let response = String::from_utf8_lossy(&response);
    let Some((head, body)) = response.split_once("\r\n\r\n") else { bail!("the response is not HTTP") };
    let code = head.split_whitespace().nth(1).unwrap_or_default();
    ensure!(code == "200", "{code}: {}", body.trim());
    Ok(())
}
