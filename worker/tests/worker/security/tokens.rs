//! Clients with a token instead of a certificate may use the client listener within the permissions of their account, and no other
//! listener.

use super::tls::{TlsCluster, count_of};
use crate::harness::{CLUSTER, spec, until};
use crate::operations::metrics;
use engram_client::{Client, Error, Network, Options as ClientOptions, Rows, Token};
use engram_coordinator::{Coordinator, Options as CoordinatorOptions};
use engram_identity::token::audience;
use engram_identity::{ExpectedPeer, Keys, Role, Roots, WatchedFiles};
use engram_mapstore::FileStore;
use engram_memory::{ClusterId, MemoryId};
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::federated_service_client::FederatedServiceClient;
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_testing::tokens::{Signer, encode};
use engram_worker::Addresses;
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::net::TcpListener;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};

const ISSUER: &str = "https://kubernetes.default.svc";

/// A worker that accepts tokens, and the files by which it verifies them.
struct TokenCluster {
    tls_cluster: TlsCluster,
    at: Addresses,
}

impl TokenCluster {
    /// Starts worker 1 of 2, without a map.
    async fn open(signer: &Signer, access: &Value) -> Self {
        let tls_cluster = TlsCluster::new();
        let files = write_files(&tls_cluster, signer, access);
        let at = tls_cluster.start_worker(|options| options["tls"]["tokens"] = files).await;
        Self { tls_cluster, at }
    }

    /// Starts the only worker of a cluster, with its coordinator.
    async fn with_coordinator(signer: &Signer, access: &Value) -> Self {
        let tls_cluster = TlsCluster::new();
        let files = write_files(&tls_cluster, signer, access);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let coordinator = listener.local_addr().unwrap().to_string();
        let store = FileStore::open(tls_cluster.folder.path(), CLUSTER).unwrap();
        let options = CoordinatorOptions { replication_factor: 1, ..CoordinatorOptions::new(CLUSTER, "test", 2, 1) };
        let keys = Keys::open(tls_cluster.files(Role::Coordinator, 0)).unwrap();
        let built = Coordinator::build(options, Arc::new(store)).unwrap();
        tokio::spawn(built.run_with_tls(listener, keys, std::future::pending()));
        let own = tls_cluster.files(Role::Worker, 0);
        let at = tls_cluster
            .start_worker(|options| {
                options["ordinal"] = 0.into();
                options["coordinators"] = json!([coordinator]);
                options["spec"] = json!(spec(1, 2));
                options["tls"] = json!({ "files": own, "tokens": files });
            })
            .await;
        Self { tls_cluster, at }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.tls_cluster.folder.path().join(name)
    }

    fn network(&self, token: Token) -> Network {
        let parse = |contents: &[Vec<u8>]| Roots::parse(&contents[0]);
        let roots = WatchedFiles::open("roots", vec![self.path("ca.pem")], parse).unwrap();
        Network::with_token(token, roots, CLUSTER, ExpectedPeer::any(Role::Worker))
    }

    async fn channel(&self, address: SocketAddr) -> Result<Channel, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        self.network(Token::from_fn(String::new)).connect(endpoint).await
    }

    async fn client(&self, token: Token) -> Result<Client, Error> {
        let options = ClientOptions::new([self.at.client.to_string()]);
        Client::connect(ClientOptions { network: self.network(token), ..options }).await
    }

    /// Makes a call that requires any permission, with this `authorization` header.
    async fn call(&self, authorization: Option<&str>) -> Result<(), (Code, Option<Problem>)> {
        let message = v1::OpenSessionRequest {};
        let request = authorization.map_or_else(|| Request::new(message), |text| carrying(message, text));
        let mut service = MemoryServiceClient::new(self.channel(self.at.client).await.unwrap());
        let answer = service.open_session(request).await;
        answer.map(drop).map_err(|status| (status.code(), Problem::from_status(&status)))
    }

    async fn failure_count(&self, reason: &str) -> u32 {
        count_of(&metrics(self.at.http).await, reason).unwrap_or_default()
    }
}

fn write_files(tls_cluster: &TlsCluster, signer: &Signer, access: &Value) -> Value {
    let path = |name: &str| tls_cluster.folder.path().join(name);
    std::fs::write(path("jwks.json"), signer.keys().to_string()).unwrap();
    std::fs::write(path("issuer"), format!("{ISSUER}\n")).unwrap();
    std::fs::write(path("access.json"), access.to_string()).unwrap();
    json!({ "keys": path("jwks.json"), "issuer": path("issuer"), "access": path("access.json") })
}

fn carrying<T>(message: T, authorization: &str) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", authorization.parse().unwrap());
    request
}

fn trainer(rights: &[&str]) -> Value {
    json!([{ "serviceAccount": "trainer", "namespace": "research", "rights": rights }])
}

/// Returns the claims of a valid token of an account in namespace `research`.
fn body(account: &str) -> Value {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    json!({
        "iss": ISSUER, "aud": [audience(CLUSTER)], "sub": format!("system:serviceaccount:research:{account}"),
        "iat": now, "nbf": now, "exp": now + 3_600,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_tokens_are_rejected_by_reason_and_counted() {
    let (signer, other_signer) = (Signer::new("first"), Signer::new("first"));
    let cluster = TokenCluster::open(&signer, &trainer(&["Read"])).await;
    let with = |change: &dyn Fn(&mut Value)| {
        let mut body = body("trainer");
        change(&mut body);
        signer.token(&body)
    };
    let now = body("trainer")["iat"].as_u64().unwrap();
    let good = with(&|_| {});
    cluster.call(Some(&format!("Bearer {good}"))).await.unwrap();

    let other = audience(ClusterId(CLUSTER.0 + 1));
    let unsigned = format!("{}.{}.", encode(r#"{"alg":"none","kid":"first"}"#), encode(body("trainer").to_string()));
    let second = signer.sign(&json!({ "alg": "ES256", "kid": "second" }), &body("trainer"));
    let (unauthenticated, permission_denied) = (Code::Unauthenticated, Code::PermissionDenied);
    for (token, reason, code, message) in [
        // A cluster that was recreated under its name has another id, like any other cluster.
        (with(&|it| it["aud"] = json!([other])), "token_audience", unauthenticated, audience(CLUSTER)),
        (
            with(&|it| it["aud"] = json!("https://kubernetes.default.svc")),
            "token_audience",
            unauthenticated,
            audience(CLUSTER),
        ),
        (with(&|it| it["exp"] = json!(now - 1)), "token_expired", unauthenticated, "expired".into()),
        (with(&|it| it["nbf"] = json!(now + 3_000)), "token_not_yet_valid", unauthenticated, "clocks".into()),
        (with(&|it| it["iss"] = json!("https://elsewhere")), "token_issuer", unauthenticated, ISSUER.into()),
        (second, "token_key", unauthenticated, "key".into()),
        (unsigned, "token_algorithm", unauthenticated, "none".into()),
        (other_signer.token(&body("trainer")), "token_signature", unauthenticated, "signature".into()),
        ("a token".into(), "token_malformed", unauthenticated, "three parts".into()),
        (signer.token(&body("stranger")), "token_account", permission_denied, "research/stranger".into()),
    ] {
        let before = cluster.failure_count(reason).await;
        let (actual_code, problem) = cluster.call(Some(&format!("Bearer {token}"))).await.unwrap_err();
        let problem = problem.expect("a rejection has a problem");
        assert_eq!(actual_code, code, "{problem:?}");
        assert!(problem.message.contains(&message), "{message}: {problem:?}");
        assert!(!problem.message.contains(&token), "the token must not be in the message: {problem:?}");
        let kind = if code == permission_denied { ProblemKind::Denied } else { ProblemKind::Unauthenticated };
        assert_eq!(problem.kind(), kind);
        assert_eq!(cluster.failure_count(reason).await, before + 1, "{reason}");
    }
    for none in [None, Some("Basic dXNlcjpwYXNz"), Some(good.as_str())] {
        let (code, problem) = cluster.call(none).await.unwrap_err();
        assert_eq!(code, unauthenticated);
        assert!(problem.unwrap().message.contains("authorization: Bearer"), "{none:?}");
    }
    assert_eq!(cluster.failure_count("no_token").await, 3);

    // Tokens are only for clients: other listeners require a certificate first.
    for address in [cluster.at.peer, cluster.at.admin] {
        let message = cluster.channel(address).await.unwrap_err();
        let cause = std::error::Error::source(&message).map(ToString::to_string).unwrap_or_default();
        assert!(cause.contains("certificate"), "{message:?}");
    }
    // A client with a certificate needs no token.
    let network = cluster.tls_cluster.network(Role::Client, 0);
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.at.client)).unwrap();
    let mut service = MemoryServiceClient::new(network.connect(endpoint).await.unwrap());
    service.open_session(v1::OpenSessionRequest {}).await.unwrap();

    // New keys are loaded while it runs, and replace the old ones.
    let renewed = Signer::new("second");
    std::fs::write(cluster.path("jwks.json"), renewed.keys().to_string()).unwrap();
    let token = format!("Bearer {}", renewed.token(&body("trainer")));
    until("the new key is loaded", || async { cluster.call(Some(&token)).await.is_ok() }).await;
    let (_, problem) = cluster.call(Some(&format!("Bearer {good}"))).await.unwrap_err();
    assert_eq!(problem.unwrap().kind(), ProblemKind::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permissions_of_an_account_are_enforced_and_reloaded() {
    let signer = Signer::new("first");
    let cluster = TokenCluster::with_coordinator(&signer, &trainer(&["Read", "Reinforce"])).await;
    std::fs::write(cluster.path("token"), signer.token(&body("trainer"))).unwrap();
    let client = cluster.client(Token::file(cluster.path("token")).unwrap()).await.unwrap();
    let session = client.session();
    let ids = vec![MemoryId(1), MemoryId(2)];
    session.upsert(Rows { ids, ..Rows::default() }).await.unwrap();
    assert_eq!(client.top(10, None).await.unwrap().len(), 2);

    let denied = session.decay(0.1).await.unwrap_err();
    assert_eq!(denied.kind(), ProblemKind::Denied, "{denied}");
    let message = denied.to_string();
    assert!(
        message.contains("research/trainer") && message.contains("lacks the right Decay; it has: Read, Reinforce"),
        "{message}"
    );
    assert!(cluster.failure_count("token_permission").await > 0);

    // Read-only administration is open to readers; other administration requires more.
    let mut admin = AdminServiceClient::new(cluster.channel(cluster.at.client).await.unwrap());
    let bearer = format!("Bearer {}", signer.token(&body("trainer")));
    let status = admin.get_worker_status(carrying(v1::GetWorkerStatusRequest {}, &bearer)).await.unwrap();
    assert_eq!(status.into_inner().memories, 2);
    let denied = admin.stop(carrying(v1::StopRequest {}, &bearer)).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);

    // Permissions are reloaded, and so is the token.
    std::fs::write(cluster.path("access.json"), trainer(&["Read", "Reinforce", "Decay"]).to_string()).unwrap();
    until("the new permission is loaded", || async { session.decay(0.1).await.is_ok() }).await;
    std::fs::write(cluster.path("access.json"), "[{}]").unwrap();
    until("a failed reload is counted", || async {
        let page = metrics(cluster.at.http).await;
        let line = page.lines().find(|line| line.starts_with("engram_token_reload_failures_total"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).is_some_and(|failures| failures > 0)
    })
    .await;
    client.top(10, None).await.unwrap();
    std::fs::write(cluster.path("token"), signer.token(&body("stranger"))).unwrap();
    until("the new token is sent", || async {
        client.top(10, None).await.is_err_and(|error| error.kind() == ProblemKind::Denied)
    })
    .await;

    // A client without a token fails at once, and one without TLS with a clear message.
    let failure_count = cluster.client(Token::from_fn(String::new)).await.unwrap_err();
    assert_eq!(failure_count.kind(), ProblemKind::Unauthenticated);
    let plain = ClientOptions::new([cluster.at.client.to_string()]);
    let message = Client::connect(plain).await.unwrap_err();
    assert_eq!(message.kind(), ProblemKind::Unauthenticated, "it is not retried: {message}");
    assert!(message.to_string().contains("speaks TLS"), "{message}");
}

/// Returns how the calls of a client of a federated run end with a token; the run does not exist.
async fn federated_calls(channel: &Channel, bearer: &str) -> Vec<(&'static str, Option<Code>)> {
    let mut service = FederatedServiceClient::new(channel.clone());
    let caller = Some(v1::FederatedCaller { run: "a".into(), client: "b".into(), secret: vec![1; 32].into() });
    let check_in = v1::CheckInRequest { caller: caller.clone(), ..Default::default() };
    let part = v1::GetModelPartRequest { caller: caller.clone(), bytes: 1, ..Default::default() };
    let chunk = v1::UploadChunkRequest { caller: caller.clone(), ..Default::default() };
    let commit = v1::CommitUpdateRequest { caller: caller.clone(), ..Default::default() };
    let give_up = v1::GiveUpTaskRequest { caller: caller.clone(), task: 1 };
    let masks = v1::ExchangeMasksRequest { caller, ..Default::default() };
    let published = v1::GetPublishedModelRequest { run: "a".into(), bytes: 1, ..Default::default() };
    let published = service.get_published_model(carrying(published, bearer)).await;
    vec![
        ("GetPublishedModel", published.err().map(|status| status.code())),
        ("CheckIn", service.check_in(carrying(check_in, bearer)).await.err().map(|status| status.code())),
        ("GetModelPart", service.get_model_part(carrying(part, bearer)).await.err().map(|status| status.code())),
        ("UploadChunk", service.upload_chunk(carrying(chunk, bearer)).await.err().map(|status| status.code())),
        ("CommitUpdate", service.commit_update(carrying(commit, bearer)).await.err().map(|status| status.code())),
        ("GiveUpTask", service.give_up_task(carrying(give_up, bearer)).await.err().map(|status| status.code())),
        ("ExchangeMasks", service.exchange_masks(carrying(masks, bearer)).await.err().map(|status| status.code())),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn federated_calls_require_a_valid_token_whose_right_was_not_revoked() {
    let signer = Signer::new("first");
    let cluster = TokenCluster::with_coordinator(&signer, &trainer(&["Read", "Reinforce"])).await;
    let channel = cluster.channel(cluster.at.client).await.unwrap();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut body = body("trainer");
        change(&mut body);
        format!("Bearer {}", signer.token(&body))
    };
    let now = body("trainer")["iat"].as_u64().unwrap();
    let good = with(&|_| {});
    let is_refused = |code: Option<Code>| matches!(code, Some(Code::Unauthenticated | Code::PermissionDenied));
    for (call, code) in federated_calls(&channel, &good).await {
        assert!(!is_refused(code), "{call}: {code:?}");
    }
    let expired = with(&|it| it["exp"] = json!(now - 1));
    let elsewhere = with(&|it| it["aud"] = json!([audience(ClusterId(CLUSTER.0 + 1))]));
    let forged = format!("Bearer {}", Signer::new("first").token(&body("trainer")));
    for bearer in [expired, elsewhere, forged, String::new()] {
        for (call, code) in federated_calls(&channel, &bearer).await {
            assert_eq!(code, Some(Code::Unauthenticated), "{call} with {bearer}");
        }
    }
    let revoke = v1::RevokeClientRequest { run: "a".into(), client: "b".into() };
    let revoked = FederatedServiceClient::new(channel.clone()).revoke_client(carrying(revoke, &good)).await;
    assert_eq!(revoked.unwrap_err().code(), Code::PermissionDenied, "clients may not revoke clients");
    std::fs::write(cluster.path("access.json"), trainer(&["Read"]).to_string()).unwrap();
    until("the right is revoked", || async {
        federated_calls(&channel, &good).await[1].1 == Some(Code::PermissionDenied)
    })
    .await;
    for (call, code) in federated_calls(&channel, &good).await {
        // An account that may read, reads the newest model; that of a task is for its client.
        assert_eq!(is_refused(code), call != "GetPublishedModel", "{call}: {code:?}");
    }
}

/// A snapshot exports every memory to a location of the account's choice: the permission to learn, which allows all other runs, is
/// not enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_administrators_may_submit_snapshots() {
    let signer = Signer::new("first");
    let learner = ["Read", "Reinforce", "Decay"];
    let cluster = TokenCluster::with_coordinator(&signer, &trainer(&learner)).await;
    let client = cluster.client(Token::from_fn(move || signer.token(&body("trainer")))).await.unwrap();
    // No storage listens there: the calls below fail before one is accessed.
    let snapshot = json!({
        "clusterRef": { "name": "test" }, "kind": "Snapshot",
        "snapshot": { "url": "s3://backups/words", "endpoint": "http://127.0.0.1:1" },
    });
    let submit = async |name: &str, spec: &str| client.submit_run(name, spec, None, None).await;
    // In plain form, with an escaped kind, and with a second kind before it.
    let written = snapshot.to_string();
    let escaped = written.replace("Snapshot", "\\u0053napshot");
    let twice = written.replacen('{', r#"{"kind":"Memory","#, 1);
    assert!(escaped != written && twice != written);
    for spec in [&written, &escaped, &twice] {
        let denied = submit("backup", spec).await.unwrap_err();
        assert_eq!(denied.kind(), ProblemKind::Denied, "{spec}: {denied}");
        let expected = "lacks the right Admin; it has: Read, Reinforce, Decay";
        assert!(denied.to_string().contains(expected), "{spec}: {denied}");
    }
    assert!(client.list_runs().await.unwrap().is_empty(), "no run was started");
    let memory_run = json!({
        "clusterRef": { "name": "test" }, "kind": "Memory",
        "memory": { "source": { "synthetic": { "memories": 4 } }, "epochs": 1 },
    });
    let memory_run = memory_run.to_string();
    // Supplied credentials could replace those of another run.
    let credentials = v1::ObjectCredentials { access_key_id: "mine".into(), ..v1::ObjectCredentials::default() };
    let denied = client.submit_run("backup", &memory_run, None, Some(credentials)).await.unwrap_err();
    assert_eq!(denied.kind(), ProblemKind::Denied, "{denied}");
    let stored =
        memory_run.replace(r#"{"synthetic":{"memories":4}}"#, r#"{"events":{"s3":{"url":"s3://events/a.csv"}}}"#);
    assert_ne!(stored, memory_run);
    assert_eq!(
        submit("stored", &stored).await.unwrap_err().kind(),
        ProblemKind::Denied,
        "workers would access the storage"
    );
    assert_eq!(cluster.failure_count("token_permission").await, 5, "each rejection is counted");
    assert!(submit("lesson", &memory_run).await.unwrap().created, "other runs only require permissions that it has");

    std::fs::write(cluster.path("access.json"), trainer(&["Admin"]).to_string()).unwrap();
    until("the new permission is loaded", || async { submit("backup", &written).await.is_ok() }).await;
    let runs = client.list_runs().await.unwrap();
    assert!(runs.iter().any(|run| run.name == "backup" && run.kind == "Snapshot"), "{runs:?}");
}
