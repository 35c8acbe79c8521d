//! The API server over plain HTTP: a kubectl in node 1 answers on a socket in the cluster's folder and signs in for us.
//!
//! One request a connection, in HTTP/1.0: an answer ends where the connection does, a watch is read line by line. So the test
//! programs need neither TLS nor a place in the cluster's network.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(30);
/// How long a watch may be silent; the server ends it before that.
const SILENCE: Duration = Duration::from_secs(300);

/// What a body is.
pub(crate) const JSON: &str = "application/json";
/// A patch that replaces fields.
pub const MERGE: &str = "application/merge-patch+json";
/// A patch that knows which lists are maps.
pub const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// The API server of a cluster.
#[derive(Clone, Debug)]
pub struct Api {
    socket: PathBuf,
}

/// An answer other than success.
#[derive(Debug, Clone)]
pub struct Refused {
    /// HTTP status.
    pub status: u16,
    /// What the server said about it.
    pub message: String,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.status, self.message)
    }
}

impl std::error::Error for Refused {}

impl Api {
    /// The API server behind this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into() }
    }

    /// Reads an object or a list.
    ///
    /// # Errors
    /// [`Refused`], or the server does not answer.
    pub fn get(&self, path: &str) -> Result<Value> {
        self.request("GET", path, JSON, None)
    }

    /// Reads an object that need not exist.
    ///
    /// # Errors
    /// Any answer but success and 404, or none.
    pub fn find(&self, path: &str) -> Result<Option<Value>> {
        absent(self.get(path))
    }

    /// Creates an object below `path`.
    ///
    /// # Errors
    /// [`Refused`], or the server does not answer.
    pub fn create(&self, path: &str, object: &Value) -> Result<Value> {
        self.request("POST", path, JSON, Some(object))
    }

    /// Changes an object; `kind` is [`MERGE`] or [`STRATEGIC`].
    ///
    /// # Errors
    /// [`Refused`], or the server does not answer.
    pub fn patch(&self, path: &str, kind: &str, change: &Value) -> Result<Value> {
        self.request("PATCH", path, kind, Some(change))
    }

    /// Deletes an object, under the options given. One that is absent is fine.
    ///
    /// # Errors
    /// Any answer but success and 404, or none.
    pub fn delete(&self, path: &str, options: Option<&Value>) -> Result<()> {
        absent(self.request("DELETE", path, JSON, options)).map(drop)
    }

    fn request(&self, method: &str, path: &str, kind: &str, body: Option<&Value>) -> Result<Value> {
        let said = || format!("{method} {path}");
        let mut reader = self.send(method, path, kind, body, ANSWER).with_context(said)?;
        let mut text = Vec::new();
        reader.read_to_end(&mut text).with_context(said)?;
        serde_json::from_slice(&text).with_context(said)
    }

    /// Hands each event of a watch to `each`, until the server ends it.
    ///
    /// # Errors
    /// [`Refused`], the connection breaks, or `each` fails.
    pub fn watch(&self, path: &str, mut each: impl FnMut(Value) -> Result<()>) -> Result<()> {
        for line in self.send("GET", path, JSON, None, SILENCE)?.lines() {
            each(serde_json::from_str(&line?)?)?;
        }
        Ok(())
    }

    /// Sends a request and returns the body's reader once the head says success.
    fn send(
        &self,
        method: &str,
        path: &str,
        kind: &str,
        body: Option<&Value>,
        limit: Duration,
    ) -> Result<BufReader<UnixStream>> {
        let mut stream = UnixStream::connect(&self.socket)
            .with_context(|| format!("failed to connect to {}", self.socket.display()))?;
        stream.set_read_timeout(Some(limit))?;
        stream.set_write_timeout(Some(ANSWER))?;
        let body = body.map(serde_json::to_vec).transpose()?.unwrap_or_default();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nHost: localhost\r\nAccept: {JSON}\r\nContent-Type: {kind}\r\nContent-Length: \
             {length}\r\n\r\n"
        );
        stream.write_all(&[head.as_bytes(), &body].concat())?;
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let status = line.split_whitespace().nth(1).and_then(|it| it.parse::<u16>().ok());
        let Some(status) = status else { bail!("no HTTP answer: {line:?}") };
        while line != "\r\n" {
            line.clear();
            ensure!(reader.read_line(&mut line)? > 0, "an answer ended within its head");
        }
        if (200..300).contains(&status) {
            return Ok(reader);
        }
        let mut text = String::new();
        reader.read_to_string(&mut text)?;
        let object: Option<Value> = serde_json::from_str(&text).ok();
        let message = object.and_then(|it| it["message"].as_str().map(str::to_owned)).unwrap_or(text);
        Err(Refused { status, message }.into())
    }
}

/// Turns "not found" into nothing.
fn absent(answer: Result<Value>) -> Result<Option<Value>> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.downcast_ref::<Refused>().is_some_and(|it| it.status == 404) => Ok(None),
        Err(error) => Err(error),
    }
}
