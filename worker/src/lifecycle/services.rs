//! The services of a worker's listeners.

use crate::buffers::Buffers;
use crate::groups::GroupEndpoint;
use crate::peers;
use crate::runs;
use crate::service::Plane;
use crate::service::connections::listeners;
use crate::shared::Shared;
use crate::training;
use engram_proto::v1::buffer_service_server::BufferServiceServer;
use engram_proto::v1::federated_service_server::FederatedServiceServer;
use engram_proto::v1::group_service_server::GroupServiceServer;
use engram_proto::v1::peer_service_server::PeerServiceServer;
use engram_proto::v1::run_service_server::RunServiceServer;
use engram_proto::v1::training_service_server::TrainingServiceServer;
use std::sync::Arc;
use tonic::service::{Routes, RoutesBuilder};

/// Services of the client listener in addition to the memories.
pub(super) fn client_services(shared: &Arc<Shared>) -> (tonic_health::server::HealthReporter, Routes) {
    let (health, service) = tonic_health::server::health_reporter();
    let mut routes = RoutesBuilder::default();
    routes.add_service(service);
    routes.add_service(run_service(shared, Plane::Client));
    routes.add_service(buffer_service(shared, Plane::Client));
    routes.add_service(federated_service(shared, Plane::Client));
    routes.add_service(GroupServiceServer::new(GroupEndpoint { shared: Arc::clone(shared) }));
    listeners::reflection(&mut routes);
    (health, routes.routes())
}

/// Services of the peer listener in addition to the memories.
pub(crate) fn peer_services(shared: &Arc<Shared>) -> Routes {
    let mut routes = RoutesBuilder::default();
    routes.add_service(run_service(shared, Plane::Peer));
    routes.add_service(buffer_service(shared, Plane::Peer));
    routes.add_service(federated_service(shared, Plane::Peer));
    routes.add_service(
        PeerServiceServer::new(peers::PeerEndpoint { shared: Arc::clone(shared) })
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES)
            .max_encoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES),
    );
    routes.add_service(
        TrainingServiceServer::new(training::TrainingEndpoint { shared: Arc::clone(shared) })
            .max_decoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES)
            .max_encoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES),
    );
    routes.routes()
}

fn buffer_service(shared: &Arc<Shared>, plane: Plane) -> BufferServiceServer<Buffers> {
    let limit = match plane {
        Plane::Client => engram_proto::MAX_MESSAGE_BYTES,
        Plane::Peer => engram_proto::MAX_PEER_MESSAGE_BYTES,
    };
    BufferServiceServer::new(Buffers { shared: Arc::clone(shared), plane })
        .max_decoding_message_size(limit)
        .max_encoding_message_size(limit)
}

fn federated_service(shared: &Arc<Shared>, plane: Plane) -> FederatedServiceServer<runs::FederatedEndpoint> {
    let limit = match plane {
        Plane::Client => engram_proto::MAX_MESSAGE_BYTES,
        Plane::Peer => engram_proto::MAX_PEER_MESSAGE_BYTES,
    };
    FederatedServiceServer::new(runs::FederatedEndpoint { shared: Arc::clone(shared), plane })
        .max_decoding_message_size(limit)
        .max_encoding_message_size(limit)
}

fn run_service(shared: &Arc<Shared>, plane: Plane) -> RunServiceServer<runs::RunEndpoint> {
    // A report has a row per epoch, so both listeners use the size limit of peers.
    // A task comes with its input and the data of its run.
    let decoded = match plane {
        Plane::Client => engram_proto::MAX_MESSAGE_BYTES,
        Plane::Peer => engram_proto::MAX_PEER_MESSAGE_BYTES,
    };
    RunServiceServer::new(runs::RunEndpoint { shared: Arc::clone(shared), plane })
        .max_decoding_message_size(decoded)
        .max_encoding_message_size(engram_proto::MAX_PEER_MESSAGE_BYTES)
}
