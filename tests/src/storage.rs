//! A storage that speaks the protocol of S3, beside the tests.

use engram_objects::{Bucket, Credentials, Options, Place};
use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A storage with one bucket, which refuses whatever its one user has not signed.
pub struct Storage {
    server: Child,
    said: Value,
}

impl Storage {
    /// Starts it by the Python of `ENGRAM_S3_SERVER`; where nobody names one it says so: the test is skipped.
    pub fn start() -> Option<Self> {
        let Some(python) = std::env::var_os("ENGRAM_S3_SERVER") else {
            println!("skipped: ENGRAM_S3_SERVER names no Python with moto (cargo xtask test makes one)");
            return None;
        };
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("s3/server.py");
        let mut command = Command::new(python);
        command.arg(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = command.spawn().expect("the storage starts");
        let mut line = String::new();
        BufReader::new(server.stdout.take().expect("it is piped")).read_line(&mut line).expect("it says where it is");
        Some(Self { server, said: serde_json::from_str(&line).expect("it says so in JSON") })
    }

    /// What it said of itself under a name.
    pub fn text(&self, name: &str) -> String {
        self.said[name].as_str().expect("it is text").to_owned()
    }

    /// A folder with the credentials of its user, as a mounted Secret has them.
    pub fn credentials(&self, folder: &Path, secret: &str) -> String {
        std::fs::create_dir_all(folder).expect("a folder can be made");
        std::fs::write(folder.join("accessKeyId"), self.text("accessKeyId")).expect("it can be written");
        std::fs::write(folder.join("secretAccessKey"), secret).expect("it can be written");
        folder.display().to_string()
    }

    /// Who its user is, and where it listens, as variables.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        [
            ("AWS_ENDPOINT_URL", "endpoint"),
            ("AWS_ACCESS_KEY_ID", "accessKeyId"),
            ("AWS_SECRET_ACCESS_KEY", "secretAccessKey"),
        ]
        .map(|(variable, name)| (variable, self.text(name)))
        .into()
    }

    /// Stops its process where it stands, or lets it go on.
    pub fn pause(&self, paused: bool) {
        use nix::sys::signal::{Signal, kill};
        let signal = if paused { Signal::SIGSTOP } else { Signal::SIGCONT };
        let process = nix::unistd::Pid::from_raw(i32::try_from(self.server.id()).expect("a process id is small"));
        kill(process, signal).expect("it is a child of this process");
    }

    /// A place in it.
    pub fn bucket(&self, place: &str, credentials: &str) -> Bucket {
        let options = Options {
            endpoint: Some(self.text("endpoint")),
            region: None,
            credentials: Some(Credentials::Folder(credentials.into())),
        };
        Bucket::open(Place::parse(place).expect("it is an address"), &options).expect("it can be opened")
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
