//! What each call of the client listener takes, and who has it: accounts that show a token instead of a certificate.

use crate::options::TokenFiles;
use engram_api::kubernetes_only::Right;
use engram_api::{AccessList, Missing, Need};
use engram_identity::token::{Refused, audience};
use engram_identity::{Account, Error, Followed, IssuerFiles, Reason, Tokens};
use engram_memory::ClusterId;
use engram_proto::v1::{Problem, ProblemKind};
use std::sync::Arc;
use std::time::SystemTime;
use tonic::codegen::http::HeaderMap;
use tonic::codegen::http::header::AUTHORIZATION;

/// How the metadata of a call with a token begins.
const BEARER: &str = "Bearer ";

/// What a call takes; `None`: nothing, whoever reaches the listener may make it.
///
/// What is not in this table takes [`Right::Admin`].
fn needed(method: &str) -> Option<Need> {
    use Right::{Admin, Decay, Read, Reinforce};
    // Health must be told whatever the state, and names nothing.
    if method.starts_with("/grpc.health.") {
        return None;
    }
    // What can be asked at all is in public files.
    if method.starts_with("/grpc.reflection.") {
        return Some(Need::Any);
    }
    let one = Need::One;
    Some(match method.strip_prefix("/engram.v1.").unwrap_or_default() {
        "MemoryService/OpenSession" | "MemoryService/GetOutcome" | "MemoryService/GetPartitionMap" => Need::Any,
        "MemoryService/GetMemories"
        | "MemoryService/ScanMemories"
        | "MemoryService/GetQuality"
        | "MemoryService/Rank"
        | "MemoryService/Recall"
        | "MemoryService/GetDigest"
        | "RunService/WatchRun"
        | "RunService/ListRuns"
        | "RunService/GetReport"
        | "AdminService/GetWorkerStatus" => one(Read),
        "MemoryService/Upsert" | "MemoryService/Remove" | "MemoryService/ApplyReinforcement" => one(Reinforce),
        // A learning epoch lets everything decay, whatever else it does; runs are epochs.
        "MemoryService/ApplyDecay"
        | "MemoryService/LearnEpoch"
        | "MemoryService/BroadcastQuality"
        | "RunService/SubmitRun"
        | "RunService/CancelRun"
        | "RunService/SuspendRun"
        | "RunService/TakeTurn"
        | "RunService/ReturnTurn"
        | "RunService/CountUpdates" => one(Decay),
        _ => one(Admin),
    })
}

/// Whose tokens are taken, and what their accounts may do: as the files say now.
#[derive(Debug)]
pub(crate) struct Accounts {
    tokens: Tokens,
    audience: String,
    access: Arc<Followed<AccessList>>,
}

impl Accounts {
    /// Of a cluster. Until the files are there, and good, nobody is let in.
    pub(crate) fn open(files: &TokenFiles, cluster: ClusterId) -> Self {
        let TokenFiles { keys, issuer, access } = files.clone();
        let audience = audience(cluster);
        let parse = |contents: &[Vec<u8>]| AccessList::parse(&contents[0]).map_err(|what| Error::Unusable { what });
        Self {
            tokens: Tokens::open(&IssuerFiles { keys, issuer }, audience.clone()),
            audience,
            access: Followed::open_or("rights of accounts", vec![access], parse, AccessList::default()),
        }
    }

    /// Looks at the files again and again. Needs a runtime.
    pub(crate) fn follow(&self) {
        self.tokens.follow();
        self.access.follow();
    }

    /// How often a look found files of no use.
    pub(crate) fn failures(&self) -> u64 {
        self.tokens.failures() + self.access.failures()
    }

    /// Whose call this is, and that it may be made; `None` where nobody need be anybody.
    pub(crate) fn admit(&self, headers: &HeaderMap, method: &str, now: SystemTime) -> Result<Option<Account>, Refused> {
        let Some(needed) = needed(method) else { return Ok(None) };
        let carried = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix(BEARER));
        let account = match carried {
            Some(token) => self.tokens.verify(token.trim(), now)?.account,
            None => {
                let audience = &self.audience;
                let text = format!(
                    "this call carries neither a certificate nor a token; needed: metadata 'authorization: Bearer' with a token of a ServiceAccount for audience '{audience}'"
                );
                return Err(Refused { reason: Reason::NoToken, text });
            }
        };
        self.access.current().check(&account.namespace, &account.name, needed).map_err(|missing| {
            let reason = match missing {
                Missing::Account { .. } => Reason::TokenAccount,
                Missing::Right { .. } => Reason::TokenRight,
            };
            Refused { reason, text: format!("{account} may not call {method}: it {missing}") }
        })?;
        Ok(Some(account))
    }
}

/// What the caller is told: who is not known is to show something else, who is known and may not is to ask for the right.
pub(crate) fn problem(refused: Refused) -> Problem {
    let kind = match refused.reason {
        Reason::TokenAccount | Reason::TokenRight | Reason::Role | Reason::Sender => ProblemKind::Denied,
        _ => ProblemKind::Unauthenticated,
    };
    Problem::of(kind, refused.text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_api::Word as _;
    use engram_api::kubernetes_only::Access;
    use engram_proto::DESCRIPTORS;
    use prost::Message as _;

    /// All calls of the services that a client can reach.
    fn calls() -> Vec<String> {
        let files = prost_types::FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let served = ["MemoryService", "RunService", "AdminService"];
        let services = files.file.iter().filter(|file| file.package() == "engram.v1").flat_map(|file| &file.service);
        let services = services.filter(|service| served.contains(&service.name()));
        let calls = services.flat_map(|service| service.method.iter().map(move |method| (service, method)));
        calls.map(|(service, method)| format!("/engram.v1.{}/{}", service.name(), method.name())).collect()
    }

    /// A row per right: what it opens beside what any right opens.
    const OPENS: [(Right, &[&str]); 3] = [
        (
            Right::Read,
            &[
                "AdminService/GetWorkerStatus",
                "MemoryService/GetDigest",
                "MemoryService/GetMemories",
                "MemoryService/GetQuality",
                "MemoryService/Rank",
                "MemoryService/Recall",
                "MemoryService/ScanMemories",
                "RunService/GetReport",
                "RunService/ListRuns",
                "RunService/WatchRun",
            ],
        ),
        (Right::Reinforce, &["MemoryService/ApplyReinforcement", "MemoryService/Remove", "MemoryService/Upsert"]),
        (
            Right::Decay,
            &[
                "MemoryService/ApplyDecay",
                "MemoryService/BroadcastQuality",
                "MemoryService/LearnEpoch",
                "RunService/CancelRun",
                "RunService/CountUpdates",
                "RunService/ReturnTurn",
                "RunService/SubmitRun",
                "RunService/SuspendRun",
                "RunService/TakeTurn",
            ],
        ),
    ];

    #[test]
    fn each_right_opens_its_calls_and_no_others() {
        let any = ["MemoryService/GetOutcome", "MemoryService/GetPartitionMap", "MemoryService/OpenSession"];
        let mut cells = 0;
        for right in Right::ALL {
            let entry = Access { service_account: "a".into(), namespace: Some("n".into()), rights: vec![*right] };
            let list = AccessList::new([entry], "n");
            for call in calls() {
                let name = call.strip_prefix("/engram.v1.").unwrap();
                let own = OPENS.iter().any(|(of, opens)| of == right && opens.contains(&name));
                let expected = *right == Right::Admin || any.contains(&name) || own;
                let need = needed(&call).expect("no call of ours is for everybody");
                assert_eq!(list.check("n", "a", need).is_ok(), expected, "{right} and {name}");
                assert!(list.check("n", "b", need).is_err(), "nobody is let in to {name}");
                cells += 1;
            }
        }
        assert!(cells >= 4 * 29, "{cells} cells: the services are there");
    }

    #[test]
    fn what_is_not_known_is_for_administrators_and_health_for_everybody() {
        for unknown in ["/engram.v1.PeerService/Exchange", "/engram.v2.MemoryService/Rank", "/", ""] {
            assert_eq!(needed(unknown), Some(Need::One(Right::Admin)), "{unknown}");
        }
        assert_eq!(needed("/grpc.health.v1.Health/Check"), None);
        assert_eq!(needed("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"), Some(Need::Any));
    }
}
