//! Who has a token instead of a certificate may do on the client listener what its account has the right to, and nothing elsewhere.

use crate::harness::{CLUSTER, spec, until};
use crate::operations::metrics;
use crate::tls::{Home, count_of};
use engram_client::{Client, Error, Network, Options as ClientOptions, Rows, Token};
use engram_coordinator::{Coordinator, Options as CoordinatorOptions};
use engram_identity::token::audience;
use engram_identity::{Expected, Followed, Keys, Role, Roots};
use engram_mapstore::FileStore;
use engram_memory::{ClusterId, MemoryId};
use engram_proto::v1::admin_service_client::AdminServiceClient;
use engram_proto::v1::memory_service_client::MemoryServiceClient;
use engram_proto::v1::{self, Problem, ProblemKind};
use engram_testing::tokens::{Signer, coded};
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

/// A worker that takes tokens, and the files by which it does.
struct Office {
    home: Home,
    at: Addresses,
}

impl Office {
    /// Worker 1 of 2, which nobody tells a map.
    async fn open(signer: &Signer, access: &Value) -> Self {
        let home = Home::new();
        let files = lay_out(&home, signer, access);
        let at = home.start_worker(|options| options["tls"]["tokens"] = files).await;
        Self { home, at }
    }

    /// The only worker of a cluster, with its coordinator.
    async fn whole(signer: &Signer, access: &Value) -> Self {
        let home = Home::new();
        let files = lay_out(&home, signer, access);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let coordinator = listener.local_addr().unwrap().to_string();
        let store = FileStore::open(home.folder.path(), CLUSTER).unwrap();
        let options = CoordinatorOptions { replication_factor: 1, ..CoordinatorOptions::new(CLUSTER, "test", 2, 1) };
        let keys = Keys::open(home.files(Role::Coordinator, 0)).unwrap();
        let built = Coordinator::build(options, Arc::new(store)).unwrap();
        tokio::spawn(built.run_secured(listener, keys, std::future::pending()));
        let own = home.files(Role::Worker, 0);
        let at = home
            .start_worker(|options| {
                options["ordinal"] = 0.into();
                options["coordinators"] = json!([coordinator]);
                options["spec"] = json!(spec(1, 2));
                options["tls"] = json!({ "files": own, "tokens": files });
            })
            .await;
        Self { home, at }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.folder.path().join(name)
    }

    fn network(&self, token: Token) -> Network {
        let parse = |contents: &[Vec<u8>]| Roots::parse(&contents[0]);
        let roots = Followed::open("roots", vec![self.path("ca.pem")], parse).unwrap();
        Network::carrying(token, roots, CLUSTER, Expected::any(Role::Worker))
    }

    async fn channel(&self, address: SocketAddr) -> Result<Channel, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        self.network(Token::given(String::new)).connect(endpoint).await
    }

    async fn client(&self, token: Token) -> Result<Client, Error> {
        let options = ClientOptions::new([self.at.client.to_string()]);
        Client::connect(ClientOptions { network: self.network(token), ..options }).await
    }

    /// Asks with what stands as `authorization`, if anything does, for what takes any right.
    async fn ask(&self, authorization: Option<&str>) -> Result<(), (Code, Option<Problem>)> {
        let message = v1::OpenSessionRequest {};
        let request = authorization.map_or_else(|| Request::new(message), |text| carrying(message, text));
        let mut service = MemoryServiceClient::new(self.channel(self.at.client).await.unwrap());
        let answer = service.open_session(request).await;
        answer.map(drop).map_err(|status| (status.code(), Problem::from_status(&status)))
    }

    async fn refused(&self, reason: &str) -> u32 {
        count_of(&metrics(self.at.http).await, reason).unwrap_or_default()
    }
}

fn lay_out(home: &Home, signer: &Signer, access: &Value) -> Value {
    let path = |name: &str| home.folder.path().join(name);
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

/// What a good token says, of an account of namespace `research`.
fn body(account: &str) -> Value {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    json!({
        "iss": ISSUER, "aud": [audience(CLUSTER)], "sub": format!("system:serviceaccount:research:{account}"),
        "iat": now, "nbf": now, "exp": now + 3_600,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_token_that_is_not_good_is_refused_for_its_fault_and_counted() {
    let (signer, stranger) = (Signer::new("first"), Signer::new("first"));
    let office = Office::open(&signer, &trainer(&["Read"])).await;
    let with = |change: &dyn Fn(&mut Value)| {
        let mut body = body("trainer");
        change(&mut body);
        signer.token(&body)
    };
    let now = body("trainer")["iat"].as_u64().unwrap();
    let good = with(&|_| {});
    office.ask(Some(&format!("Bearer {good}"))).await.unwrap();

    let other = audience(ClusterId(CLUSTER.0 + 1));
    let unsigned = format!("{}.{}.", coded(r#"{"alg":"none","kid":"first"}"#), coded(body("trainer").to_string()));
    let second = signer.sign(&json!({ "alg": "ES256", "kid": "second" }), &body("trainer"));
    let (unknown, known) = (Code::Unauthenticated, Code::PermissionDenied);
    for (token, reason, code, told) in [
        // A cluster that was deleted and made again under its name has another id, as any other has.
        (with(&|it| it["aud"] = json!([other])), "token_audience", unknown, audience(CLUSTER)),
        (with(&|it| it["aud"] = json!("https://kubernetes.default.svc")), "token_audience", unknown, audience(CLUSTER)),
        (with(&|it| it["exp"] = json!(now - 1)), "token_expired", unknown, "expired".into()),
        (with(&|it| it["nbf"] = json!(now + 3_000)), "token_not_yet_valid", unknown, "clocks".into()),
        (with(&|it| it["iss"] = json!("https://elsewhere")), "token_issuer", unknown, ISSUER.into()),
        (second, "token_key", unknown, "key".into()),
        (unsigned, "token_algorithm", unknown, "none".into()),
        (stranger.token(&body("trainer")), "token_signature", unknown, "signature".into()),
        ("a token".into(), "token_malformed", unknown, "three parts".into()),
        (signer.token(&body("stranger")), "token_account", known, "research/stranger".into()),
    ] {
        let before = office.refused(reason).await;
        let (found, problem) = office.ask(Some(&format!("Bearer {token}"))).await.unwrap_err();
        let problem = problem.expect("a worker says why");
        assert_eq!(found, code, "{problem:?}");
        assert!(problem.message.contains(&told), "{told}: {problem:?}");
        assert!(!problem.message.contains(&token), "no token is told: {problem:?}");
        let kind = if code == known { ProblemKind::Denied } else { ProblemKind::Unauthenticated };
        assert_eq!(problem.kind(), kind);
        assert_eq!(office.refused(reason).await, before + 1, "{reason}");
    }
    for none in [None, Some("Basic dXNlcjpwYXNz"), Some(good.as_str())] {
        let (code, problem) = office.ask(none).await.unwrap_err();
        assert_eq!(code, unknown);
        assert!(problem.unwrap().message.contains("authorization: Bearer"), "{none:?}");
    }
    assert_eq!(office.refused("no_token").await, 3);

    // Tokens are for clients: other listeners want a certificate before they hear of anything.
    for address in [office.at.peer, office.at.admin] {
        let told = office.channel(address).await.unwrap_err();
        let cause = std::error::Error::source(&told).map(ToString::to_string).unwrap_or_default();
        assert!(cause.contains("certificate"), "{told:?}");
    }
    // Who has a certificate needs no token.
    let network = office.home.network(Role::Client, 0);
    let endpoint = Endpoint::from_shared(format!("http://{}", office.at.client)).unwrap();
    let mut service = MemoryServiceClient::new(network.connect(endpoint).await.unwrap());
    service.open_session(v1::OpenSessionRequest {}).await.unwrap();

    // New keys are taken while it runs, and then the old ones no more.
    let renewed = Signer::new("second");
    std::fs::write(office.path("jwks.json"), renewed.keys().to_string()).unwrap();
    let token = format!("Bearer {}", renewed.token(&body("trainer")));
    until("the new key is known", || async { office.ask(Some(&token)).await.is_ok() }).await;
    let (_, problem) = office.ask(Some(&format!("Bearer {good}"))).await.unwrap_err();
    assert_eq!(problem.unwrap().kind(), ProblemKind::Unauthenticated);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_account_may_do_what_its_rights_say_and_more_as_soon_as_they_say_more() {
    let signer = Signer::new("first");
    let office = Office::whole(&signer, &trainer(&["Read", "Reinforce"])).await;
    std::fs::write(office.path("token"), signer.token(&body("trainer"))).unwrap();
    let client = office.client(Token::file(office.path("token")).unwrap()).await.unwrap();
    let session = client.session();
    let ids = vec![MemoryId(1), MemoryId(2)];
    session.upsert(Rows { ids, ..Rows::default() }).await.unwrap();
    assert_eq!(client.top(10, None).await.unwrap().len(), 2);

    let denied = session.decay(0.1).await.unwrap_err();
    assert_eq!(denied.kind(), ProblemKind::Denied, "{denied}");
    let said = denied.to_string();
    assert!(
        said.contains("research/trainer") && said.contains("lacks the right Decay; it has: Read, Reinforce"),
        "{said}"
    );
    assert!(office.refused("token_right").await > 0);

    // What administration may tell whoever reads, it tells here; orders take more.
    let mut admin = AdminServiceClient::new(office.channel(office.at.client).await.unwrap());
    let bearer = format!("Bearer {}", signer.token(&body("trainer")));
    let status = admin.get_worker_status(carrying(v1::WorkerStatusRequest {}, &bearer)).await.unwrap();
    assert_eq!(status.into_inner().memories, 2);
    let denied = admin.stop(carrying(v1::StopRequest {}, &bearer)).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied);

    // Rights are read again, and so is the token.
    std::fs::write(office.path("access.json"), trainer(&["Read", "Reinforce", "Decay"]).to_string()).unwrap();
    until("the new right is known", || async { session.decay(0.1).await.is_ok() }).await;
    std::fs::write(office.path("access.json"), "[{}]").unwrap();
    until("what is of no use is counted", || async {
        let page = metrics(office.at.http).await;
        let line = page.lines().find(|line| line.starts_with("engram_token_reload_failures_total"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok()).is_some_and(|failures| failures > 0)
    })
    .await;
    client.top(10, None).await.unwrap();
    std::fs::write(office.path("token"), signer.token(&body("stranger"))).unwrap();
    until("the new token is carried", || async {
        client.top(10, None).await.is_err_and(|error| error.kind() == ProblemKind::Denied)
    })
    .await;

    // A client without a token is told at once, and one that knows nothing of TLS in words.
    let refused = office.client(Token::given(String::new)).await.unwrap_err();
    assert_eq!(refused.kind(), ProblemKind::Unauthenticated);
    let plain = ClientOptions::new([office.at.client.to_string()]);
    let told = Client::connect(plain).await.unwrap_err();
    assert_eq!(told.kind(), ProblemKind::Unauthenticated, "it is not tried again: {told}");
    assert!(told.to_string().contains("speaks TLS"), "{told}");
}

/// A snapshot takes along every memory, wherever the account wants it: the right to learn, which opens all other runs, is not enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_is_for_administrators_whatever_else_an_account_may_submit() {
    let signer = Signer::new("first");
    let learner = ["Read", "Reinforce", "Decay"];
    let office = Office::whole(&signer, &trainer(&learner)).await;
    let client = office.client(Token::given(move || signer.token(&body("trainer")))).await.unwrap();
    // Nobody listens there: what is told below is told before anybody asks.
    let snapshot = json!({
        "clusterRef": { "name": "test" }, "kind": "Snapshot",
        "snapshot": { "url": "s3://backups/words", "endpoint": "http://127.0.0.1:1" },
    });
    let submit = async |name: &str, spec: &str| client.submit_run(name, spec, None, None).await;
    // As it is written at least, with the word in another spelling of JSON, and with another word before it.
    let written = snapshot.to_string();
    let escaped = written.replace("Snapshot", "\\u0053napshot");
    let twice = written.replacen('{', r#"{"kind":"Memory","#, 1);
    assert!(escaped != written && twice != written);
    for spec in [&written, &escaped, &twice] {
        let denied = submit("backup", spec).await.unwrap_err();
        assert_eq!(denied.kind(), ProblemKind::Denied, "{spec}: {denied}");
        let needed = "lacks the right Admin; it has: Read, Reinforce, Decay";
        assert!(denied.to_string().contains(needed), "{spec}: {denied}");
    }
    assert!(client.list_runs().await.unwrap().is_empty(), "nothing was begun");
    let learns = json!({
        "clusterRef": { "name": "test" }, "kind": "Memory",
        "memory": { "source": { "synthetic": { "memories": 4 } }, "epochs": 1 },
    });
    let learns = learns.to_string();
    // Of whoever hands over credentials nobody knows for whose run.
    let credentials = v1::ObjectCredentials { access_key_id: "mine".into(), ..v1::ObjectCredentials::default() };
    let denied = client.submit_run("backup", &learns, None, Some(credentials)).await.unwrap_err();
    assert_eq!(denied.kind(), ProblemKind::Denied, "{denied}");
    let stored = learns.replace(r#"{"synthetic":{"memories":4}}"#, r#"{"events":{"s3":{"url":"s3://events/a.csv"}}}"#);
    assert_ne!(stored, learns);
    assert_eq!(submit("stored", &stored).await.unwrap_err().kind(), ProblemKind::Denied, "workers would ask for it");
    assert_eq!(office.refused("token_right").await, 5, "each refusal is counted");
    assert!(submit("lesson", &learns).await.unwrap().created, "other runs take the right that it has");

    std::fs::write(office.path("access.json"), trainer(&["Admin"]).to_string()).unwrap();
    until("the new right is known", || async { submit("backup", &written).await.is_ok() }).await;
    let runs = client.list_runs().await.unwrap();
    assert!(runs.iter().any(|run| run.name == "backup" && run.kind == "Snapshot"), "{runs:?}");
}
