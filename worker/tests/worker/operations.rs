//! Operations: health, reflection, metrics, status, snapshots, an orderly stop.

use crate::harness::{Cluster, spec, until};
use engram_client::Rows;
use engram_memory::MemoryId;
use engram_proto::v1;
use engram_proto::v1::admin_service_client::AdminServiceClient;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

async fn get(address: SocketAddr, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Returns the metrics page.
pub(crate) async fn metrics(address: SocketAddr) -> String {
    get(address, "/metrics").await.1
}

/// Returns the value of a series, by its name and a part of its labels.
fn value(page: &str, name: &str, label: &str) -> f64 {
    let line = page.lines().find(|line| line.starts_with(&format!("{name}{{")) && line.contains(label));
    let line = line.unwrap_or_else(|| panic!("no series {name} with {label} in\n{page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Checks that the page has only metrics of the catalog, with its type and help, and only their labels.
fn assert_page_matches_catalog(page: &str) {
    let catalog = engram_worker::metrics::catalog();
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (family, metric_type) = line.split_once(' ').unwrap();
        // A counter's family has its suffix in the text format, and not in OpenMetrics.
        let metric =
            catalog.iter().find(|metric| metric.name.trim_end_matches("_total") == family.trim_end_matches("_total"));
        let metric = metric.unwrap_or_else(|| panic!("{family} is not in the catalog"));
        assert_eq!(metric.metric_type.to_string(), metric_type, "{family}");
        assert!(page.contains(&format!("# HELP {family} {}.", metric.help)), "{family}");
        let series = |line: &&str| line.strip_prefix(metric.name.as_str()).is_some_and(|rest| rest.starts_with('{'));
        for line in page.lines().filter(series) {
            let labels =
                line.split(['{', ',']).skip(1).filter_map(|label| label.split_once("=\"")).map(|(name, _)| name);
            let mut labels: Vec<&str> = labels.collect();
            let mut expected = metric.labels.clone();
            labels.sort_unstable();
            expected.sort_unstable();
            assert_eq!(labels, expected, "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_metrics_status_and_stop_work_for_operators() {
    let mut cluster = Cluster::start(spec(1, 4)).await;
    let client = cluster.client().await;
    client.session().upsert(Rows { ids: (0..500).map(MemoryId).collect(), ..Rows::default() }).await.unwrap();
    let addresses = cluster.addresses(0);

    for path in ["/", "/startupz", "/livez", "/readyz"] {
        assert_eq!(get(addresses.http, path).await.0, 200, "{path}");
    }
    assert_eq!(get(addresses.http, "/nothing").await.0, 404);
    let (_, page) = get(addresses.http, "/metrics").await;
    let page: String = page.lines().filter(|line| !line.is_empty()).map(|line| format!("{line}\n")).collect();
    for line in page.lines().filter(|line| !line.starts_with('#') && line.starts_with("engram_")) {
        assert!(line.contains("learner_cluster=\"test\"") && line.contains("worker=\"0\""), "{line}");
        assert!(line.rsplit(' ').next().unwrap().parse::<f64>().is_ok(), "{line}");
    }
    assert_page_matches_catalog(&page);
    assert_eq!(value(&page, "engram_memories", ""), 500.0);
    assert_eq!(value(&page, "engram_partitions", ""), 4.0);
    assert_eq!(value(&page, "engram_updates_total", ""), 500.0);
    assert_eq!(value(&page, "engram_requests_total", "method=\"Upsert\",code=\"OK\""), 1.0);
    assert!(value(&page, "engram_wal_sync_duration_seconds_count", "") >= 1.0);
    assert!(value(&page, "engram_resident_memory_bytes", "") > 1e6);
    assert!(value(&page, "engram_build_info", "version=") == 1.0);

    let channel = cluster.channel(0).await;
    let mut health = HealthClient::new(channel.clone());
    let mut serving = health.clone();
    until("the service is healthy", || {
        let request = HealthCheckRequest { service: "engram.v1.MemoryService".into() };
        let mut health = serving.clone();
        async move { health.check(request).await.is_ok_and(|it| it.into_inner().status() == ServingStatus::Serving) }
    })
    .await;
    serving.check(HealthCheckRequest::default()).await.unwrap();
    assert!(health.check(HealthCheckRequest { service: "no.such".into() }).await.is_err());

    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut reflection = ServerReflectionClient::new(channel);
    let mut responses = reflection.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let Some(MessageResponse::ListServicesResponse(list)) = responses.next().await.unwrap().unwrap().message_response
    else {
        panic!("no list of services")
    };
    assert!(list.service.iter().any(|service| service.name == "engram.v1.MemoryService"), "{list:?}");

    let admin = Channel::from_shared(format!("http://{}", addresses.admin)).unwrap().connect().await.unwrap();
    let mut admin = AdminServiceClient::new(admin);
    let status = admin.get_worker_status(v1::GetWorkerStatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.memories, status.partitions, status.cluster_name.as_str()), (500, 4, "test"));
    assert!(status.partition_status.iter().all(|partition| partition.primary && partition.term == 1));
    let folder = cluster.options(0).local_files.unwrap().folders[0].join("exported");
    let owner_key = String::new();
    let request = v1::CreateSnapshotRequest { folder: folder.display().to_string(), owner_key: owner_key.clone() };
    let snapshot = admin.create_snapshot(request).await.unwrap().into_inner();
    assert_eq!((snapshot.partitions, snapshot.memories), (4, 500));
    assert_eq!(snapshot.digest.as_ref(), client.digest().await.unwrap().digest.0.to_be_bytes());
    for folder in [cluster.options(0).state_dir.join("exported"), "/tmp/exported".into()] {
        let request = v1::CreateSnapshotRequest { folder: folder.display().to_string(), owner_key: owner_key.clone() };
        assert_eq!(admin.create_snapshot(request).await.unwrap_err().code(), Code::InvalidArgument);
    }
    let relative = v1::CreateSnapshotRequest { folder: "here".into(), owner_key };
    assert!(admin.create_snapshot(relative).await.unwrap_err().message().contains("an absolute path"));

    // The store is idle in this millisecond, so only the device is certain.
    let profile = admin.profile(v1::ProfileRequest { duration_ms: 1, max_spans: 10 }).await.unwrap().into_inner();
    assert_eq!(profile.tracks.iter().map(|track| &track.device).collect::<Vec<_>>(), [&status.device]);
    for (duration_ms, max_spans, message) in [(0, 1, "duration_ms: 0"), (50_001, 1, "50000"), (1, 0, "max_spans: 0")] {
        let error = admin.profile(v1::ProfileRequest { duration_ms, max_spans }).await.unwrap_err();
        assert!(error.code() == Code::InvalidArgument && error.message().contains(message), "{error}");
    }

    // The socket of the state directory serves the same, for its owner only.
    let socket = cluster.options(0).state_dir.join("admin.sock");
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    let channel = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap().connect().await.unwrap();
    AdminServiceClient::new(channel).stop(v1::StopRequest {}).await.unwrap();
    let http = addresses.http;
    until("the worker has stopped", || async move { TcpStream::connect(http).await.is_err() }).await;
    cluster.start_again(0).await;
    assert_eq!(cluster.client().await.digest().await.unwrap().memories, 500);
}
