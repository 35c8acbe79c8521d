//! Who gets through a handshake over real connections, what everybody else is told, and what new files change.
#![allow(clippy::unwrap_used, reason = "the helpers are tests, too")]

use engram_identity::{Authority, Callers, Error, Expected, Files, Issued, Keys, Name, Reason, Role, accept, connect};
use engram_memory::ClusterId;
use futures::StreamExt as _;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_stream::wrappers::TcpListenerStream;

const HERE: ClusterId = ClusterId(1);
const ELSEWHERE: ClusterId = ClusterId(2);
const HOUR: Duration = Duration::from_secs(3_600);

/// A folder of certificates under one authority.
struct Home {
    folder: TempDir,
    authority: Authority,
}

impl Home {
    fn new() -> Self {
        let (folder, authority) = (TempDir::new().unwrap(), Authority::create(HERE, SystemTime::now()).unwrap());
        fs::write(folder.path().join("ca.pem"), authority.certificate()).unwrap();
        Self { folder, authority }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn issue(&self, cluster: ClusterId, role: Role, ordinal: u32) -> Issued {
        self.authority.issue(&Name::local("demo", cluster, role, ordinal), SystemTime::now(), HOUR).unwrap()
    }

    fn files(&self, name: &str, issued: &Issued) -> Files {
        fs::write(self.path(name), &issued.pem).unwrap();
        Files::pair(self.path("ca.pem"), self.path(name))
    }

    fn keys(&self, name: &str, issued: &Issued) -> Arc<Keys> {
        Keys::open(self.files(name, issued)).unwrap()
    }
}

/// Listens, greets whoever gets through with a byte, and says who that was.
async fn listen(keys: &Arc<Keys>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut accepted = Box::pin(accept(TcpListenerStream::new(listener), Arc::clone(keys), Callers::Certified, None));
    tokio::spawn(async move {
        while let Some(connection) = accepted.next().await {
            connection.unwrap().write_all(b"!").await.unwrap();
        }
    });
    address
}

/// The certificate of a process that began to be one when it was good, and shows it still.
fn stale(home: &Home, at: SystemTime, lifetime: Duration) -> Issued {
    home.authority.issue(&Name::local("demo", HERE, Role::Worker, 1), at, lifetime).unwrap()
}

/// Connects with nothing checked here: what the other side does is the point.
async fn knock(address: &str, roots: &Home, issued: Option<&Issued>) -> Result<u8, String> {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    let mut store = rustls::RootCertStore::empty();
    store.add(CertificateDer::from_pem_slice(roots.authority.certificate().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(trusting::Anyone(Arc::clone(&provider)));
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match issued {
        None => config.with_no_client_auth(),
        Some(issued) => {
            let chain = CertificateDer::pem_slice_iter(issued.pem.as_bytes()).map(Result::unwrap).collect();
            let key = PrivateKeyDer::from_pem_slice(issued.pem.as_bytes()).unwrap();
            config.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("engram").unwrap();
    let connected = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    let mut stream = connected.map_err(|error| error.to_string())?;
    stream.read_u8().await.map_err(|error| error.to_string())
}

mod trusting {
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::crypto::CryptoProvider;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::{DigitallySignedStruct, Error, SignatureScheme};
    use std::sync::Arc;

    /// Believes whoever listens.
    #[derive(Debug)]
    pub(crate) struct Anyone(pub(crate) Arc<CryptoProvider>);

    impl ServerCertVerifier for Anyone {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.0.signature_verification_algorithms.supported_schemes()
        }
    }
}

#[tokio::test]
async fn only_a_certificate_of_this_cluster_that_is_valid_now_gets_through() {
    let (home, other) = (Home::new(), Home::new());
    let worker = home.keys("worker-0.pem", &home.issue(HERE, Role::Worker, 0));
    let address = listen(&worker).await;
    let now = SystemTime::now();

    assert_eq!(knock(&address, &home, Some(&home.issue(HERE, Role::Worker, 1))).await, Ok(b'!'));
    assert_eq!(knock(&address, &home, Some(&home.issue(HERE, Role::Client, 0))).await, Ok(b'!'));
    let table = [
        ("no certificate", None, Reason::NoCertificate, "CertificateRequired"),
        ("expired", Some(stale(&home, now - HOUR, HOUR / 2)), Reason::Expired, "CertificateExpired"),
        ("not yet valid", Some(stale(&home, now + HOUR, HOUR)), Reason::NotYetValid, "CertificateExpired"),
        ("another authority", Some(other.issue(HERE, Role::Worker, 1)), Reason::UnknownAuthority, "DecryptError"),
        ("another cluster", Some(home.issue(ELSEWHERE, Role::Worker, 1)), Reason::OtherCluster, "AccessDenied"),
    ];
    for (what, issued, reason, alert) in table {
        let told = knock(&address, &home, issued.as_ref()).await.expect_err(what);
        assert!(told.contains(alert), "{what}: {told}");
        assert_eq!(worker.refusals().of(reason), 1, "{what}");
    }

    // Plain text, as a program that does not know of TLS sends it.
    let mut plain = TcpStream::connect(&address).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.contains(&b'!'), "not a byte of what listens here");
    assert_eq!(worker.refusals().of(Reason::PlainText), 1);
    assert_eq!(Reason::ALL.map(|reason| worker.refusals().of(reason)).iter().sum::<u64>(), 6, "and nobody else");
}

#[tokio::test]
async fn a_caller_believes_whom_it_meant_alone_and_is_told_why_it_is_refused() {
    let (home, other) = (Home::new(), Home::new());
    let worker = home.keys("worker-0.pem", &home.issue(HERE, Role::Worker, 0));
    let client = home.keys("client.pem", &home.issue(HERE, Role::Client, 0));
    let address = listen(&worker).await;
    for expected in [Expected::default(), Expected::any(Role::Worker), Expected::one(Role::Worker, 0)] {
        connect(&client, expected, &address).await.unwrap();
    }
    let refused = async |keys: &Arc<Keys>, expected| connect(keys, expected, &address).await.unwrap_err().to_string();
    let told = refused(&client, Expected::any(Role::Coordinator)).await;
    assert!(told.contains("is of worker 0") && told.contains("not of a coordinator"), "{told}");
    let told = refused(&client, Expected::one(Role::Worker, 1)).await;
    assert!(told.contains("not of worker 1"), "{told}");
    // Of the other authority it believes nobody here; one that believes it all the same is refused, and told so.
    let stranger = other.keys("client.pem", &other.issue(HERE, Role::Client, 0));
    assert!(refused(&stranger, Expected::default()).await.contains("is not believed"));
    fs::write(other.path("both.pem"), [home.authority.certificate(), other.authority.certificate()].concat()).unwrap();
    let stranger = Keys::open(Files::pair(other.path("both.pem"), other.path("client.pem"))).unwrap();
    let told = refused(&stranger, Expected::default()).await;
    assert!(told.contains("another authority signed it"), "{told}");

    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = plain.local_addr().unwrap().to_string();
    tokio::spawn(async move { plain.accept().await.unwrap().0.write_all(b"\0\0\x12\x04\0\0\0\0\0 in clear").await });
    let told = connect(&client, Expected::default(), &at).await.unwrap_err().to_string();
    assert!(told.contains("does not speak TLS"), "{told}");
}

#[tokio::test]
async fn new_files_are_taken_when_they_are_good_and_the_old_pair_stays_where_they_are_not() {
    let home = Home::new();
    let first = home.issue(HERE, Role::Worker, 0);
    let keys = home.keys("worker-0.pem", &first);
    let client = home.keys("client.pem", &home.issue(HERE, Role::Client, 0));
    let address = listen(&keys).await;
    let works = async || connect(&client, Expected::one(Role::Worker, 0), &address).await.is_ok();
    let path = home.path("worker-0.pem");
    let next = home.authority.issue(&keys.name(), SystemTime::now(), HOUR * 2).unwrap();
    let other = home.issue(HERE, Role::Worker, 0);
    let key_of = |issued: &Issued| issued.pem.split_inclusive("-----END PRIVATE KEY-----").next().unwrap().to_owned();
    let certificate_of = |issued: &Issued| issued.pem.replace(&key_of(issued), "");
    let broken = [
        ("half written", next.pem[..next.pem.len() / 2].to_owned()),
        ("empty", String::new()),
        ("key of another certificate", key_of(&other) + &certificate_of(&next)),
        ("of another worker", home.issue(HERE, Role::Worker, 7).pem),
        ("of another cluster", home.issue(ELSEWHERE, Role::Worker, 0).pem),
        ("of another authority", Home::new().issue(HERE, Role::Worker, 0).pem),
        ("expired", stale(&home, SystemTime::now() - HOUR, HOUR / 2).pem),
    ];
    for (failures, (what, pem)) in (1..).zip(broken) {
        fs::write(&path, pem).unwrap();
        keys.look();
        assert_eq!((keys.failures(), keys.until()), (failures, first.until), "{what}");
        assert!(works().await, "{what}: the old pair is in use");
    }
    fs::remove_file(&path).unwrap();
    keys.look();
    assert_eq!(keys.failures(), 8, "no file");
    fs::write(&path, &next.pem).unwrap();
    keys.look();
    assert_eq!((keys.failures(), keys.until()), (8, next.until));
    assert!(works().await);

    // A new authority beside the old one, then alone: first believed, then signing.
    let heir = Authority::create(HERE, SystemTime::now()).unwrap();
    fs::write(home.path("ca.pem"), [home.authority.certificate(), heir.certificate()].concat()).unwrap();
    [&keys, &client].iter().for_each(|keys| keys.look());
    let of_heir = heir.issue(&keys.name(), SystemTime::now(), HOUR).unwrap();
    fs::write(&path, &of_heir.pem).unwrap();
    keys.look();
    assert_eq!((keys.failures(), keys.until()), (8, of_heir.until));
    assert!(works().await, "who still has a certificate of the old one believes both");
}

#[test]
fn files_that_never_were_good_are_an_error_that_names_what_is_wrong() {
    let home = Home::new();
    let missing = Keys::open(Files::pair(home.path("ca.pem"), home.path("none.pem"))).unwrap_err();
    assert!(matches!(&missing, Error::Read { path, .. } if path.ends_with("none.pem")), "{missing}");
    let files = home.files("worker.pem", &stale(&home, SystemTime::now() - HOUR, HOUR / 2));
    assert!(Keys::open(files).unwrap_err().to_string().contains("expired"));
    let files = home.files("worker.pem", &home.issue(HERE, Role::Worker, 3));
    let stranger = Keys::open_for(files, HERE, Expected::one(Role::Worker, 0)).unwrap_err();
    assert!(stranger.to_string().contains("worker 3"), "{stranger}");
}
