//! A worker without partitions answers for buffers as any other does.

use super::{fields, items};
use engram_client::BufferSpec;
use engram_proto::v1::buffer_service_client::BufferServiceClient;
use engram_proto::v1::{ConsumeItemsRequest, ListBuffersRequest};
use engram_tests::{Cluster, cluster_manifest};
use tonic::transport::Endpoint;

/// The worker that is drained.
const DRAINED: u64 = 2;

#[test]
fn drained_worker_knows_buffers_that_were_created_since() {
    let cluster = Cluster::up(&cluster_manifest("drained", 3, "  replicationFactor: 2\n  partitions: 8\n"));
    cluster.wait_until_replicated(2);
    cluster.engram(&["drain", &DRAINED.to_string(), "--wait"]).exits_with(0);
    let endpoints = cluster.endpoints().expect("the cluster runs");
    let worker = endpoints["workers"].as_array().and_then(|all| all.iter().find(|it| it["ordinal"] == DRAINED));
    let address = worker.and_then(|it| it["client"].as_str()).expect("the worker has an address").to_owned();
    cluster.client(async |client| {
        let buffer = client.create_buffer(&BufferSpec::new("train", fields(), 1_000)).await.unwrap();
        buffer.append(items(0..20, |_| 1.0)).await.unwrap();
        let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        let mut drained = BufferServiceClient::new(channel);
        let listed = drained.list_buffers(ListBuffersRequest {}).await.unwrap().into_inner();
        let names: Vec<_> = listed.buffers.iter().map(|it| it.spec.as_ref().unwrap().name.as_str()).collect();
        assert_eq!(names, ["train"]);
        let consume = |buffer: &str| ConsumeItemsRequest {
            buffer: buffer.into(),
            consumer: "reader".into(),
            count: 20,
            lease_ms: 5_000,
            ..ConsumeItemsRequest::default()
        };
        let mut read = drained.consume_items(consume("train")).await.unwrap().into_inner();
        assert!(read.message().await.unwrap().is_some_and(|batch| !batch.handles.is_empty()));
        let missing = drained.consume_items(consume("other")).await.map(drop).unwrap_err();
        assert!(missing.message().contains("buffer \"other\" does not exist"), "{missing}");
    });
    cluster.stop();
}
