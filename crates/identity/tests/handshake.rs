//! Which peers pass a handshake over real connections, what the others receive, and the effect of new files.
#![allow(clippy::unwrap_used, reason = "the helpers are tests, too")]

use engram_identity::{
    Callers, CertificateAuthority, Error, ExpectedPeer, Files, IssuedCertificate, Keys, Name, Reason, Role, accept,
    connect,
};
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

/// A folder of certificates of one CA.
struct Home {
    folder: TempDir,
    ca: CertificateAuthority,
}

impl Home {
    fn new() -> Self {
        let (folder, ca) = (TempDir::new().unwrap(), CertificateAuthority::create(HERE, SystemTime::now()).unwrap());
        fs::write(folder.path().join("ca.pem"), ca.certificate()).unwrap();
        Self { folder, ca }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn issue(&self, cluster: ClusterId, role: Role, ordinal: u32) -> IssuedCertificate {
        self.ca.issue(&Name::local("demo", cluster, role, ordinal), SystemTime::now(), HOUR).unwrap()
    }

    fn files(&self, name: &str, issued: &IssuedCertificate) -> Files {
        fs::write(self.path(name), &issued.pem).unwrap();
        Files::pair(self.path("ca.pem"), self.path(name))
    }

    fn keys(&self, name: &str, issued: &IssuedCertificate) -> Arc<Keys> {
        Keys::open(self.files(name, issued)).unwrap()
    }
}

/// Listens, sends a byte to every accepted caller, and returns the address.
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

/// Issues a certificate that may be stale when it is presented.
fn stale(home: &Home, at: SystemTime, lifetime: Duration) -> IssuedCertificate {
    home.ca.issue(&Name::local("demo", HERE, Role::Worker, 1), at, lifetime).unwrap()
}

/// Connects without verifying the server: the server's reaction is under test.
async fn knock(address: &str, roots: &Home, issued: Option<&IssuedCertificate>) -> Result<u8, String> {
    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    let mut store = rustls::RootCertStore::empty();
    store.add(CertificateDer::from_pem_slice(roots.ca.certificate().as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(unverified::AcceptAny(Arc::clone(&provider)));
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

mod unverified {
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::crypto::CryptoProvider;
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::{DigitallySignedStruct, Error, SignatureScheme};
    use std::sync::Arc;

    /// Accepts every server.
    #[derive(Debug)]
    pub(crate) struct AcceptAny(pub(crate) Arc<CryptoProvider>);

    impl ServerCertVerifier for AcceptAny {
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
async fn only_a_valid_certificate_of_this_cluster_is_accepted() {
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
        ("another CA", Some(other.issue(HERE, Role::Worker, 1)), Reason::UnknownCa, "DecryptError"),
        ("another cluster", Some(home.issue(ELSEWHERE, Role::Worker, 1)), Reason::OtherCluster, "AccessDenied"),
    ];
    for (what, issued, reason, alert) in table {
        let error = knock(&address, &home, issued.as_ref()).await.expect_err(what);
        assert!(error.contains(alert), "{what}: {error}");
        assert_eq!(worker.refusals().of(reason), 1, "{what}");
    }

    // Plaintext, from a program without TLS.
    let mut plain = TcpStream::connect(&address).await.unwrap();
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.contains(&b'!'), "no byte of the application");
    assert_eq!(worker.refusals().of(Reason::PlainText), 1);
    assert_eq!(Reason::ALL.map(|reason| worker.refusals().of(reason)).iter().sum::<u64>(), 6, "no other rejection");
}

#[tokio::test]
async fn caller_trusts_only_the_expected_peer_and_learns_why_it_is_rejected() {
    let (home, other) = (Home::new(), Home::new());
    let worker = home.keys("worker-0.pem", &home.issue(HERE, Role::Worker, 0));
    let client = home.keys("client.pem", &home.issue(HERE, Role::Client, 0));
    let address = listen(&worker).await;
    for expected in [ExpectedPeer::default(), ExpectedPeer::any(Role::Worker), ExpectedPeer::one(Role::Worker, 0)] {
        connect(&client, expected, &address).await.unwrap();
    }
    let rejection = async |keys: &Arc<Keys>, expected| connect(keys, expected, &address).await.unwrap_err().to_string();
    let error = rejection(&client, ExpectedPeer::any(Role::Coordinator)).await;
    assert!(error.contains("is of worker 0") && error.contains("not of a coordinator"), "{error}");
    let error = rejection(&client, ExpectedPeer::one(Role::Worker, 1)).await;
    assert!(error.contains("not of worker 1"), "{error}");
    // A CA that does not know this one trusts no process here; a caller that trusts both is rejected with the reason.
    let foreign = other.keys("client.pem", &other.issue(HERE, Role::Client, 0));
    assert!(rejection(&foreign, ExpectedPeer::default()).await.contains("is not trusted"));
    fs::write(other.path("both.pem"), [home.ca.certificate(), other.ca.certificate()].concat()).unwrap();
    let foreign = Keys::open(Files::pair(other.path("both.pem"), other.path("client.pem"))).unwrap();
    let error = rejection(&foreign, ExpectedPeer::default()).await;
    assert!(error.contains("it is signed by another CA"), "{error}");

    let plain = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = plain.local_addr().unwrap().to_string();
    tokio::spawn(async move { plain.accept().await.unwrap().0.write_all(b"\0\0\x12\x04\0\0\0\0\0 plaintext").await });
    let error = connect(&client, ExpectedPeer::default(), &at).await.unwrap_err().to_string();
    assert!(error.contains("does not speak TLS"), "{error}");
}

#[tokio::test]
async fn valid_files_replace_the_pair_and_invalid_ones_do_not() {
    let home = Home::new();
    let first = home.issue(HERE, Role::Worker, 0);
    let keys = home.keys("worker-0.pem", &first);
    let client = home.keys("client.pem", &home.issue(HERE, Role::Client, 0));
    let address = listen(&keys).await;
    let works = async || connect(&client, ExpectedPeer::one(Role::Worker, 0), &address).await.is_ok();
    let path = home.path("worker-0.pem");
    let next = home.ca.issue(&keys.name(), SystemTime::now(), HOUR * 2).unwrap();
    let other = home.issue(HERE, Role::Worker, 0);
    let key_of =
        |issued: &IssuedCertificate| issued.pem.split_inclusive("-----END PRIVATE KEY-----").next().unwrap().to_owned();
    let certificate_of = |issued: &IssuedCertificate| issued.pem.replace(&key_of(issued), "");
    let broken = [
        ("half written", next.pem[..next.pem.len() / 2].to_owned()),
        ("empty", String::new()),
        ("key of another certificate", key_of(&other) + &certificate_of(&next)),
        ("of another worker", home.issue(HERE, Role::Worker, 7).pem),
        ("of another cluster", home.issue(ELSEWHERE, Role::Worker, 0).pem),
        ("of another CA", Home::new().issue(HERE, Role::Worker, 0).pem),
        ("expired", stale(&home, SystemTime::now() - HOUR, HOUR / 2).pem),
    ];
    for (failures, (what, pem)) in (1..).zip(broken) {
        fs::write(&path, pem).unwrap();
        keys.reload();
        assert_eq!((keys.failures(), keys.expires_at()), (failures, first.until), "{what}");
        assert!(works().await, "{what}: the old pair is in use");
    }
    fs::remove_file(&path).unwrap();
    keys.reload();
    assert_eq!(keys.failures(), 8, "no file");
    fs::write(&path, &next.pem).unwrap();
    keys.reload();
    assert_eq!((keys.failures(), keys.expires_at()), (8, next.until));
    assert!(works().await);

    // CA rotation: a new CA is trusted first, then signs.
    let next_ca = CertificateAuthority::create(HERE, SystemTime::now()).unwrap();
    fs::write(home.path("ca.pem"), [home.ca.certificate(), next_ca.certificate()].concat()).unwrap();
    [&keys, &client].iter().for_each(|keys| keys.reload());
    let from_next = next_ca.issue(&keys.name(), SystemTime::now(), HOUR).unwrap();
    fs::write(&path, &from_next.pem).unwrap();
    keys.reload();
    assert_eq!((keys.failures(), keys.expires_at()), (8, from_next.until));
    assert!(works().await, "a holder of an old certificate trusts both");
}

#[test]
fn initially_invalid_files_are_an_error_that_names_the_cause() {
    let home = Home::new();
    let missing = Keys::open(Files::pair(home.path("ca.pem"), home.path("none.pem"))).unwrap_err();
    assert!(matches!(&missing, Error::Read { path, .. } if path.ends_with("none.pem")), "{missing}");
    let files = home.files("worker.pem", &stale(&home, SystemTime::now() - HOUR, HOUR / 2));
    assert!(Keys::open(files).unwrap_err().to_string().contains("expired"));
    let files = home.files("worker.pem", &home.issue(HERE, Role::Worker, 3));
    let error = Keys::open_for(files, HERE, ExpectedPeer::one(Role::Worker, 0)).unwrap_err();
    assert!(error.to_string().contains("worker 3"), "{error}");
}
