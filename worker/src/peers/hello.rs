//! The first message of every stream between workers, and whom it lets in.

use crate::options::Options;
use engram_coordinator::wire;
use engram_memory::{ClusterId, Incarnation, Member, Ordinal};
use engram_proto::answers::identity;
use engram_proto::{protocol, v1};

/// Where others find a worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reachable {
    pub(crate) client: String,
    pub(crate) peer: String,
    pub(crate) http: String,
}

/// Why a hello is not answered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("the stream did not begin with a hello")]
    NoHello,
    #[error("{0}")]
    Malformed(#[from] wire::Malformed),
    #[error("worker {caller} is of cluster {found}, this worker {here} of {expected}")]
    Cluster { caller: Ordinal, found: ClusterId, here: Ordinal, expected: ClusterId },
    #[error(
        "protocol versions do not meet: worker {caller} speaks {min} to {max}, this worker {here} {} to {}",
        protocol::OLDEST,
        protocol::NEWEST
    )]
    Protocol { caller: Ordinal, min: u32, max: u32, here: Ordinal },
    #[error("worker {found} answers where worker {expected} should")]
    Ordinal { found: Ordinal, expected: Ordinal },
    #[error("worker {caller} does not dial worker {here}: of two workers the one with the lower number dials")]
    Direction { caller: Ordinal, here: Ordinal },
    #[error("a newer process of worker {caller} was heard: {newest}, not {found}")]
    Superseded { caller: Ordinal, found: Incarnation, newest: Incarnation },
}

impl From<Refused> for tonic::Status {
    fn from(refused: Refused) -> Self {
        let text = refused.to_string();
        match refused {
            Refused::NoHello | Refused::Malformed(_) => Self::invalid_argument(text),
            _ => Self::failed_precondition(text),
        }
    }
}

/// Who this worker is, to others.
#[derive(Debug, Clone)]
pub(crate) struct Greeter {
    pub(crate) cluster: ClusterId,
    pub(crate) member: Member,
    /// First incarnation from which on nothing that was written on this disk has been lost.
    pub(crate) lossless_since: Incarnation,
    pub(crate) reachable: Reachable,
}

impl Greeter {
    pub(crate) const fn new(
        options: &Options,
        member: Member,
        lossless_since: Incarnation,
        reachable: Reachable,
    ) -> Self {
        Self { cluster: options.cluster, member, lossless_since, reachable }
    }

    pub(crate) fn hello(&self) -> v1::Hello {
        v1::Hello {
            cluster: identity(self.cluster.0),
            member: Some(wire::member_id_to_proto(&self.member)),
            protocol_min: protocol::OLDEST,
            protocol_max: protocol::NEWEST,
            client_address: self.reachable.client.clone(),
            peer_address: self.reachable.peer.clone(),
            http_address: self.reachable.http.clone(),
            lossless_since: self.lossless_since.0,
            process_id: std::process::id(),
            // Of interest to coordinators alone.
            seen_version: 0,
        }
    }

    /// Who says hello, if it may.
    pub(crate) fn check(&self, hello: Option<&v1::Hello>) -> Result<Member, Refused> {
        let hello = hello.ok_or(Refused::NoHello)?;
        let caller = wire::member_id_from_proto(hello.member.as_ref().ok_or(Refused::NoHello)?)?;
        let (found, here) = (wire::cluster_from_proto(&hello.cluster)?, self.member.ordinal);
        if found != self.cluster {
            return Err(Refused::Cluster { caller: caller.ordinal, found, here, expected: self.cluster });
        }
        let (min, max) = (hello.protocol_min, hello.protocol_max);
        if protocol::common(min, max).is_none() {
            return Err(Refused::Protocol { caller: caller.ordinal, min, max, here });
        }
        Ok(caller)
    }

    /// Who dials this worker, if it is one that does.
    pub(crate) fn check_caller(&self, hello: Option<&v1::Hello>) -> Result<Member, Refused> {
        let member = self.check(hello)?;
        let (caller, here) = (member.ordinal, self.member.ordinal);
        if caller < here { Ok(member) } else { Err(Refused::Direction { caller, here }) }
    }

    /// Who was dialled, if it is the worker that was meant.
    pub(crate) fn check_callee(&self, hello: Option<&v1::Hello>, expected: Ordinal) -> Result<Member, Refused> {
        let member = self.check(hello)?;
        let found = member.ordinal;
        if found == expected { Ok(member) } else { Err(Refused::Ordinal { found, expected }) }
    }
}
