//! What test pods do: answer, ask, and measure the longest interval without an answer.

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::{SigSet, Signal};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What to do.
#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// Answers every request with the host name; ends at SIGTERM
    Serve {
        /// On all addresses
        port: u16,
    },
    /// Prints the answer to a request
    Get {
        /// `http://HOST[:PORT]/PATH`
        url: String,
    },
    /// Asks over and over, over a new connection each time, and prints the longest interval without an answer
    Gap {
        /// `http://HOST[:PORT]/PATH`
        url: String,
        /// For how long
        seconds: u64,
    },
    /// Waits
    Sleep {
        /// For how long
        seconds: u64,
    },
    /// Writes a file, and prints its owner and mode
    Write {
        /// Where
        path: PathBuf,
        /// What
        text: String,
    },
    /// Trains in the elastic group of a run of kind Job
    Train {
        /// Steps of the training
        steps: u64,
    },
}

/// Does it.
///
/// # Errors
/// What the user of the tool wants to see: no answer, a file that cannot be written.
pub fn run(command: Command) -> Result<()> {
    match command {
        Command::Serve { port } => serve(port)?,
        Command::Get { url } => print!("{}", get(&url, Duration::from_secs(5))?),
        Command::Gap { url, seconds } => println!("{}", gap(&url, Duration::from_secs(seconds))),
        Command::Sleep { seconds } => std::thread::sleep(Duration::from_secs(seconds)),
        Command::Train { steps } => crate::member::run(steps)?,
        Command::Write { path, text } => {
            std::fs::write(&path, text).with_context(|| format!("failed to write {}", path.display()))?;
            let about = std::fs::metadata(&path)?;
            println!("{}:{} {:o}", about.uid(), about.gid(), about.mode() & 0o777);
        }
    }
    Ok(())
}

fn serve(port: u16) -> Result<()> {
    // The first process of a container is sent SIGTERM in vain unless it asks for it.
    let signals = SigSet::from_iter([Signal::SIGTERM]);
    signals.thread_block()?;
    let listener = TcpListener::bind(("0.0.0.0", port)).with_context(|| format!("failed to listen on port {port}"))?;
    println!("serving on port {port}");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that leaves early is its own concern.
            drop(answer(stream));
        }
    });
    signals.wait()?;
    println!("SIGTERM, leaving");
    Ok(())
}

fn answer(mut stream: TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let name = nix::unistd::gethostname()?.to_string_lossy().into_owned();
    let length = name.len();
    write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{name}")?;
    Ok(())
}

/// The body of an answer of status 200.
///
/// # Errors
/// There is none within `limit`, or it has another status.
pub fn get(url: &str, limit: Duration) -> Result<String> {
    let rest = url.strip_prefix("http://").context("only http:// is known")?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let place = if host.contains(':') { host.to_owned() } else { format!("{host}:80") };
    let address = place.to_socket_addrs().with_context(|| format!("failed to resolve {place}"))?.next();
    let mut stream = TcpStream::connect_timeout(&address.context("no address")?, limit)?;
    stream.set_read_timeout(Some(limit))?;
    stream.set_write_timeout(Some(limit))?;
    write!(stream, "GET /{path} HTTP/1.0\r\nHost: {host}\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no HTTP answer")?;
    ensure!(head.split_whitespace().nth(1) == Some("200"), "{}", head.lines().next().unwrap_or_default());
    Ok(body.to_owned())
}

/// What a client saw.
#[derive(Debug, Clone, Default)]
pub struct Gap {
    /// Requests that were answered.
    pub answers: u64,
    /// Requests that were not.
    pub errors: u64,
    /// Longest interval without an answer.
    pub longest: Duration,
    /// Why the first was not answered, and how long after the begin.
    pub first_error: Option<(Duration, String)>,
}

impl std::fmt::Display for Gap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { answers, errors, longest, first_error } = self;
        write!(f, "answers {answers} errors {errors} longest_gap_ms {}", longest.as_millis())?;
        match first_error {
            Some((after, why)) => write!(f, ", the first after {:.2} s: {why}", after.as_secs_f64()),
            None => Ok(()),
        }
    }
}

fn gap(url: &str, duration: Duration) -> Gap {
    let began = Instant::now();
    let mut last = began;
    let mut seen = Gap::default();
    while began.elapsed() < duration {
        match get(url, Duration::from_secs(1)) {
            Ok(_) => {
                seen.answers += 1;
                seen.longest = seen.longest.max(last.elapsed());
                last = Instant::now();
            }
            Err(error) => {
                seen.errors += 1;
                seen.first_error.get_or_insert_with(|| (began.elapsed(), format!("{error:#}")));
            }
        }
        // At most 200 requests a second: this measures the cluster, not the machine.
        std::thread::sleep(Duration::from_millis(5));
    }
    seen.longest = seen.longest.max(last.elapsed());
    seen
}
