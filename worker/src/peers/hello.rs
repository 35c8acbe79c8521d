//! The hello: first message of every stream between workers, and which of them are accepted.

use crate::options::Options;
use engram_memory::{ClusterId, Incarnation, Member, Ordinal};
use engram_proto::answers::identity;
use engram_proto::{protocol, v1};
use engram_wire as wire;

/// Addresses at which others reach a worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct AdvertisedAddresses {
    pub(crate) client: String,
    pub(crate) peer: String,
    pub(crate) http: String,
}

/// Why a hello is rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HelloError {
    #[error("the stream did not begin with a hello")]
    NoHello,
    #[error("{0}")]
    Malformed(#[from] wire::Malformed),
    #[error("worker {caller} belongs to cluster {actual}, worker {here} to {expected}")]
    Cluster { caller: Ordinal, actual: ClusterId, here: Ordinal, expected: ClusterId },
    #[error(
        "no common protocol version: worker {caller} supports {min} to {max}, worker {here} {} to {}",
        protocol::OLDEST,
        protocol::NEWEST
    )]
    Protocol { caller: Ordinal, min: u32, max: u32, here: Ordinal },
    #[error("worker {actual} responded instead of worker {expected}")]
    Ordinal { actual: Ordinal, expected: Ordinal },
    #[error("worker {caller} must not dial worker {here}: of two workers the one with the lower ordinal dials")]
    Direction { caller: Ordinal, here: Ordinal },
    #[error("worker {caller} has a newer process: {newest}, not {actual}")]
    Superseded { caller: Ordinal, actual: Incarnation, newest: Incarnation },
}

impl From<HelloError> for tonic::Status {
    fn from(refused: HelloError) -> Self {
        let text = refused.to_string();
        match refused {
            HelloError::NoHello | HelloError::Malformed(_) => Self::invalid_argument(text),
            _ => Self::failed_precondition(text),
        }
    }
}

/// Identity and addresses of this worker, sent in hellos.
#[derive(Debug, Clone)]
pub(crate) struct HelloContext {
    pub(crate) cluster: ClusterId,
    pub(crate) member: Member,
    /// First incarnation since which no write to this disk was lost.
    pub(crate) lossless_since: Incarnation,
    pub(crate) addresses: AdvertisedAddresses,
}

impl HelloContext {
    pub(crate) const fn new(
        options: &Options,
        member: Member,
        lossless_since: Incarnation,
        reachable: AdvertisedAddresses,
    ) -> Self {
        Self { cluster: options.cluster, member, lossless_since, addresses: reachable }
    }

    pub(crate) fn hello(&self) -> v1::Hello {
        v1::Hello {
            cluster: identity(self.cluster.0),
            member: Some(wire::member_id_to_proto(&self.member)),
            protocol_min: protocol::OLDEST,
            protocol_max: protocol::NEWEST,
            client_address: self.addresses.client.clone(),
            peer_address: self.addresses.peer.clone(),
            http_address: self.addresses.http.clone(),
            lossless_since: self.lossless_since.0,
            process_id: std::process::id(),
            // Only coordinators use it.
            newest_map_version: 0,
        }
    }

    /// Checks a hello and returns its sender.
    pub(crate) fn check(&self, hello: Option<&v1::Hello>) -> Result<Member, HelloError> {
        let hello = hello.ok_or(HelloError::NoHello)?;
        let caller = wire::member_id_from_proto(hello.member.as_ref().ok_or(HelloError::NoHello)?)?;
        let (actual, here) = (wire::cluster_from_proto(&hello.cluster)?, self.member.ordinal);
        if actual != self.cluster {
            return Err(HelloError::Cluster { caller: caller.ordinal, actual, here, expected: self.cluster });
        }
        let (min, max) = (hello.protocol_min, hello.protocol_max);
        if protocol::common(min, max).is_none() {
            return Err(HelloError::Protocol { caller: caller.ordinal, min, max, here });
        }
        Ok(caller)
    }

    /// Checks the hello of a worker that dialed this one.
    pub(crate) fn check_caller(&self, hello: Option<&v1::Hello>) -> Result<Member, HelloError> {
        let member = self.check(hello)?;
        let (caller, here) = (member.ordinal, self.member.ordinal);
        if caller < here { Ok(member) } else { Err(HelloError::Direction { caller, here }) }
    }

    /// Checks the hello of a worker that this one dialed.
    pub(crate) fn check_callee(&self, hello: Option<&v1::Hello>, expected: Ordinal) -> Result<Member, HelloError> {
        let member = self.check(hello)?;
        let actual = member.ordinal;
        if actual == expected { Ok(member) } else { Err(HelloError::Ordinal { actual, expected }) }
    }
}
