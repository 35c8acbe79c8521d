//! A bucket against a minimal storage with fault injection. Signatures are checked against a real one in
//! `tests/tests/backup.rs`.

use super::*;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::io::AsyncBufReadExt as _;
use tokio::net::{TcpListener, TcpStream};

/// Content of the storage, and the faults to inject.
#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    /// Parts of unfinished uploads, by number.
    parts: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    requests: Vec<String>,
    /// Number of requests answered with 503, and of connections closed without a response.
    busy: usize,
    hang_up: usize,
    /// Parts from this number on are rejected.
    refuse_part: Option<u32>,
    /// A response body ends after this many bytes.
    cut: Option<usize>,
}

#[derive(Clone, Default)]
struct Storage(Arc<Mutex<State>>);

impl Storage {
    async fn start() -> (Self, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let storage = Self::default();
        let serving = storage.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let storage = serving.clone();
                // A client error ends only its own connection.
                tokio::spawn(async move { drop(storage.serve(stream).await) });
            }
        });
        (storage, endpoint)
    }

    async fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut stream = tokio::io::BufStream::new(stream);
        loop {
            let (mut head, mut length) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if stream.read_line(&mut line).await? == 0 {
                    return Ok(());
                }
                if line == "\r\n" {
                    break;
                }
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().unwrap();
                }
                head.push_str(&line);
            }
            let mut body = vec![0; length];
            stream.read_exact(&mut body).await?;
            assert!(head.to_ascii_lowercase().contains("authorization: aws4-hmac-sha256"), "{head}");
            let Some((status, response)) = self.answer(head.lines().next().unwrap(), body) else { return Ok(()) };
            let cut = self.0.lock().cut.take_if(|cut| *cut < response.len());
            let head = format!(
                "HTTP/1.1 {status}\r\ncontent-length: {}\r\netag: \"e\"\r\nlast-modified: Mon, 23 Nov 2026 00:00:00 GMT\r\n\r\n",
                response.len()
            );
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&response[..cut.unwrap_or(response.len())]).await?;
            stream.flush().await?;
            if cut.is_some() {
                return Ok(());
            }
        }
    }

    fn answer(&self, line: &str, body: Vec<u8>) -> Option<(&'static str, Vec<u8>)> {
        let mut state = self.0.lock();
        state.requests.push(line.to_owned());
        if state.hang_up > 0 {
            state.hang_up -= 1;
            return None;
        }
        if state.busy > 0 {
            state.busy -= 1;
            return Some(("503 Slow Down", Vec::new()));
        }
        let mut words = line.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let value = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        let ok = |text: &str| Some(("200 OK", text.as_bytes().to_vec()));
        match (method, value("uploadId")) {
            ("POST", None) => {
                state.parts.insert(path.to_owned(), BTreeMap::new());
                ok("<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
            }
            ("PUT", Some(_)) => {
                let number = value("partNumber").unwrap().parse().unwrap();
                if state.refuse_part.is_some_and(|first| number >= first) {
                    return Some(("403 Forbidden", b"<Error><Code>AccessDenied</Code></Error>".to_vec()));
                }
                match state.parts.get_mut(path) {
                    Some(parts) => drop(parts.insert(number, body)),
                    // The part was in flight when the upload was aborted.
                    None => return Some(("404 Not Found", b"<Error><Code>NoSuchUpload</Code></Error>".to_vec())),
                }
                ok("")
            }
            ("POST", Some(_)) => {
                let parts = state.parts.remove(path).unwrap();
                state.objects.insert(path.to_owned(), parts.into_values().flatten().collect());
                ok("<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")
            }
            ("DELETE", Some(_)) => {
                state.parts.remove(path);
                Some(("204 No Content", Vec::new()))
            }
            ("PUT", None) => {
                state.objects.insert(path.to_owned(), body);
                ok("")
            }
            _ => state.objects.get(path).map_or(Some(("404 Not Found", Vec::new())), |it| Some(("200 OK", it.clone()))),
        }
    }
}

/// A bucket with fast retries.
fn bucket(endpoint: String, folder: &Path) -> Bucket {
    std::fs::write(folder.join("accessKeyId"), "key").unwrap();
    std::fs::write(folder.join("secretAccessKey"), "secret").unwrap();
    let options = Options {
        endpoint: Some(endpoint),
        region: None,
        credentials: Some(crate::Credentials::Folder(folder.to_owned())),
        endpoint_owner: EndpointOwner::Process,
    };
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(1), max_backoff: Duration::from_millis(2), base: 2.0 };
    let retries = RetryConfig { backoff, max_retries: 3, retry_timeout: Duration::from_secs(60) };
    Bucket::with_retries(Location::parse("s3://backups/words").unwrap(), &options, retries).unwrap()
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| ((at * 31) >> 8) as u8).collect()
}

#[tokio::test]
async fn requests_to_a_busy_storage_are_retried_a_bounded_number_of_times() {
    let folder = tempfile::tempdir().unwrap();
    let (storage, endpoint) = Storage::start().await;
    let bucket = bucket(endpoint, folder.path()).join("nightly");
    storage.0.lock().busy = 3;
    bucket.put("manifest.json", b"it".to_vec()).await.unwrap();
    storage.0.lock().hang_up = 2;
    assert_eq!(bucket.get("manifest.json", 2).await.unwrap().unwrap(), b"it");
    assert_eq!(storage.0.lock().requests.len(), 4 + 3);
    assert_eq!(bucket.get("another", 2).await.unwrap(), None);
    assert!(matches!(bucket.get("manifest.json", 1).await, Err(Error::TooLong { limit: 1, .. })));
    storage.0.lock().busy = 4;
    let refused = bucket.put("manifest.json", Vec::new()).await.unwrap_err();
    assert!(refused.to_string().contains("s3://backups/words/nightly/manifest.json"), "{refused}");
    assert_eq!(storage.0.lock().objects["/backups/words/nightly/manifest.json"], b"it");
}

#[tokio::test]
async fn a_large_file_is_uploaded_in_parts_and_a_failed_upload_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (storage, endpoint) = Storage::start().await;
    let bucket = bucket(endpoint, folder.path());
    let path = folder.path().join("file");
    for bytes in [0, 1, PART_BYTES - 1, PART_BYTES, 2 * PART_BYTES + 5] {
        std::fs::write(&path, content(bytes)).unwrap();
        assert_eq!(bucket.put_file("file", &path).await.unwrap(), bytes as u64);
        assert!(storage.0.lock().objects["/backups/words/file"] == content(bytes), "{bytes} bytes");
        let back = folder.path().join("back");
        assert_eq!(bucket.get_file("file", &back, bytes as u64).await.unwrap(), bytes as u64);
        assert!(std::fs::read(&back).unwrap() == content(bytes), "{bytes} bytes downloaded");
    }
    storage.0.lock().refuse_part = Some(2);
    let refused = bucket.put_file("other", &path).await.unwrap_err();
    assert!(matches!(refused, Error::Storage { operation: "write", .. }), "{refused}");
    let state = storage.0.lock();
    assert!(!state.objects.contains_key("/backups/words/other"));
    assert!(state.parts.is_empty(), "the upload was aborted");
}

#[tokio::test]
async fn a_truncated_response_is_resumed_or_reported_and_never_taken_as_complete() {
    let folder = tempfile::tempdir().unwrap();
    let (storage, endpoint) = Storage::start().await;
    let bucket = bucket(endpoint, folder.path());
    bucket.put("file", content(10_000)).await.unwrap();
    storage.0.lock().cut = Some(700);
    match bucket.get("file", 10_000).await {
        Ok(whole) => assert!(whole.unwrap() == content(10_000)),
        Err(error) => assert!(matches!(error, Error::Storage { operation: "read", .. }), "{error}"),
    }
}

/// Opens a bucket in an environment of some variables.
fn open(options: &Options, variables: &[(&str, &str)]) -> Result<Bucket, Error> {
    let keys = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")];
    let all = keys.iter().filter(|(name, _)| !variables.iter().any(|it| it.0 == *name)).chain(variables);
    let environment = Environment::new(all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let retries = RetryConfig { max_retries: 0, ..RETRIES };
    Bucket::in_environment(Location::parse("s3://backups/words").unwrap(), options, retries, &environment)
}

#[tokio::test]
async fn no_setting_panics_when_a_request_is_signed() {
    let texts =
        ["", " ", "x", "x\n", "\u{e9}", "http://127.0.0.1:99999", "http://", "http://[::1", "http://127.0.0.1:1", "%"];
    let variables = [
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
    ];
    let closed = Options { endpoint: Some("http://127.0.0.1:1".into()), ..Options::default() };
    for text in texts {
        for variable in variables {
            let bucket = open(&closed, &[(variable, text)]);
            let Ok(bucket) = bucket else { continue };
            assert!(bucket.get("file", 1).await.is_err(), "{variable}={text:?}");
        }
        let keys = |id: &str, secret: &str, token: &str| {
            let token = Some(token.to_owned());
            Some(crate::Credentials::Keys(Keys { id: id.into(), secret: secret.into(), token }))
        };
        let in_options = [
            Options { endpoint: Some(text.into()), ..Options::default() },
            Options { region: Some(text.into()), ..closed.clone() },
            Options { credentials: keys(text, "x", "x"), ..closed.clone() },
            Options { credentials: keys("x", text, "x"), ..closed.clone() },
            Options { credentials: keys("x", "x", text), ..closed.clone() },
        ];
        for options in in_options {
            if let Ok(bucket) = open(&options, &[]) {
                assert!(bucket.get("file", 1).await.is_err(), "{text:?}");
            }
        }
    }
    let refused = open(&closed, &[("AWS_ACCESS_KEY_ID", "s3cret\n")]).unwrap_err().to_string();
    assert!(refused.starts_with("AWS_ACCESS_KEY_ID ") && !refused.contains("s3cret"), "{refused}");
    assert!(open(&closed, &[("AWS_ENDPOINT_URL", "")]).is_ok(), "an empty variable counts as unset");
}

#[tokio::test]
async fn a_client_cannot_send_the_credentials_of_the_environment_elsewhere_or_reach_local_addresses() {
    let (storage, endpoint) = Storage::start().await;
    let allowed = |allowed: &[&str]| EndpointOwner::Client { allowed: allowed.iter().map(|it| (*it).into()).collect() };
    let keys = Keys { id: "own".into(), secret: "own".into(), token: None };
    let options = |endpoint: &str, endpoint_owner| Options {
        endpoint: Some(endpoint.to_owned()),
        endpoint_owner,
        ..Options::default()
    };
    let with_keys = |options: Options| Options { credentials: Some(crate::Credentials::Keys(keys.clone())), ..options };
    let refusal = |options: &Options| open(options, &[]).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(refusal(&options("http://storage.example", allowed(&[]))).contains("secretRef"));
    for local in ["http://127.0.0.1:9", "http://169.254.169.254", "http://localhost:9"] {
        let refused = refusal(&with_keys(options(local, allowed(&[]))));
        assert!(refused.contains("spec.storageEndpoints"), "{refused}");
    }
    // The environment's own endpoint, and an allowed one with credentials of its own.
    let own = options(&endpoint, allowed(&[]));
    let bucket = open(&own, &[("AWS_ENDPOINT_URL", &endpoint)]).unwrap();
    assert_eq!(bucket.get("file", 1).await.unwrap(), None);
    let listed = options(&endpoint, allowed(&[&endpoint]));
    assert!(refusal(&listed).contains("secretRef"));
    assert_eq!(open(&with_keys(listed), &[]).unwrap().get("file", 1).await.unwrap(), None);
    // A name that resolves to a local address is refused at the connection.
    let mut connector = crate::http::resolver(true);
    let refused = tower::Service::call(&mut connector, "localhost".parse().unwrap()).await.err().unwrap();
    assert!(refused.to_string().contains("loopback"), "{refused}");
    assert_eq!(storage.0.lock().requests.len(), 2);
}
