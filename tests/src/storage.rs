//! A local S3-compatible object storage for tests.

use engram_objects::{Bucket, Credentials, Location, Options};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Object storage server with one bucket and one user, which rejects requests with an invalid signature.
pub struct Storage {
    server: Child,
    description: Value,
}

impl Storage {
    /// Starts the server with the Python of `ENGRAM_S3_SERVER`; without it the test is skipped.
    pub fn start() -> Option<Self> {
        let Some(python) = std::env::var_os("ENGRAM_S3_SERVER") else {
            crate::skipped("ENGRAM_S3_SERVER names no Python with moto (cargo xtask test installs one)");
            return None;
        };
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("s3/server.py");
        let mut command = Command::new(python);
        command.arg(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = command.spawn().expect("failed to start the storage server");
        let mut line = String::new();
        BufReader::new(server.stdout.take().expect("stdout is piped"))
            .read_line(&mut line)
            .expect("failed to read the server's description");
        Some(Self { server, description: serde_json::from_str(&line).expect("the server's description is not JSON") })
    }

    /// Returns a field of the server's description.
    pub fn text(&self, name: &str) -> String {
        self.description[name].as_str().expect("the field is a string").to_owned()
    }

    /// Writes credentials to a folder, as in a mounted Secret.
    pub fn credentials(&self, folder: &Path, secret: &str) -> String {
        std::fs::create_dir_all(folder).expect("failed to create a folder");
        std::fs::write(folder.join("accessKeyId"), self.text("accessKeyId")).expect("failed to write a file");
        std::fs::write(folder.join("secretAccessKey"), secret).expect("failed to write a file");
        folder.display().to_string()
    }

    /// Returns endpoint and credentials as environment variables.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        [
            ("AWS_ENDPOINT_URL", "endpoint"),
            ("AWS_ACCESS_KEY_ID", "accessKeyId"),
            ("AWS_SECRET_ACCESS_KEY", "secretAccessKey"),
        ]
        .map(|(variable, name)| (variable, self.text(name)))
        .into()
    }

    /// Pauses or resumes the server process.
    pub fn pause(&self, paused: bool) {
        use nix::sys::signal::{Signal, kill};
        let signal = if paused { Signal::SIGSTOP } else { Signal::SIGCONT };
        let process = nix::unistd::Pid::from_raw(i32::try_from(self.server.id()).expect("process ids fit in i32"));
        kill(process, signal).expect("failed to send a signal");
    }

    /// Opens a location in the storage.
    pub fn bucket(&self, place: &str, credentials: &str) -> Bucket {
        let options = Options {
            endpoint: Some(self.text("endpoint")),
            region: None,
            credentials: Some(Credentials::Folder(credentials.into())),
            ..Options::default()
        };
        Bucket::open(Location::parse(place).expect("the location is valid"), &options)
            .expect("failed to open the bucket")
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
