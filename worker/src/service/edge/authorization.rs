//! Authorization of the client listener: the permission that each call requires, and the accounts that have it. Accounts present a
//! token instead of a certificate.

use crate::options::TokenFiles;
use engram_api::kubernetes_only::Right;
use engram_api::{AccessDenied, AccessList, RequiredRight};
use engram_identity::token::{TokenRejection, audience};
use engram_identity::{Account, Error, IssuerFiles, Reason, Tokens, WatchedFiles};
use engram_memory::ClusterId;
use engram_proto::v1::{Problem, ProblemKind};
use std::sync::Arc;
use std::time::SystemTime;
use tonic::codegen::http::HeaderMap;
use tonic::codegen::http::header::AUTHORIZATION;

/// Prefix of the `authorization` metadata of a call with a token.
const BEARER: &str = "Bearer ";

/// Returns the permission that a call requires; `None` if the call is open to every client.
///
/// A call that is not in this table requires [`Right::Admin`].
fn required_permission(method: &str) -> Option<RequiredRight> {
    use Right::{Admin, Decay, Read, Reinforce};
    // Health checks must work without credentials, and expose nothing.
    if method.starts_with("/grpc.health.") {
        return None;
    }
    // The services are described by public files.
    if method.starts_with("/grpc.reflection.") {
        return Some(RequiredRight::Any);
    }
    let one = RequiredRight::One;
    Some(match method.strip_prefix("/engram.v1.").unwrap_or_default() {
        "MemoryService/OpenSession" | "MemoryService/GetPartitionMap" => RequiredRight::Any,
        // It closes a request that never arrived, which is a record of the log.
        "MemoryService/GetOutcome" => RequiredRight::Write,
        "MemoryService/GetMemories"
        | "MemoryService/ScanMemories"
        | "MemoryService/GetQuality"
        | "MemoryService/Rank"
        | "MemoryService/Recall"
        | "MemoryService/GetDigest"
        | "BufferService/DescribeBuffer"
        | "BufferService/ListBuffers"
        | "BufferService/GetItems"
        | "BufferService/ListItems"
        | "RunService/WatchRun"
        | "RunService/ListRuns"
        | "RunService/GetReport"
        | "RunService/Predict"
        | "GroupService/GetGroup"
        // Clients of a Federated run have no such right: one that was revoked reads no model.
        | "FederatedService/GetPublishedModel"
        | "AdminService/GetWorkerStatus" => one(Read),
        "MemoryService/Upsert" | "MemoryService/Remove" | "MemoryService/ApplyReinforcement"
        // Samples count uses, and consumers lease items: both are records of the log.
        | "BufferService/CreateBuffer" | "BufferService/WriteItems" | "BufferService/SampleItems" | "BufferService/ConsumeItems"
        | "FederatedService/CheckIn"
        | "FederatedService/GetModelPart"
        | "FederatedService/UploadChunk"
        | "FederatedService/CommitUpdate"
        | "FederatedService/GiveUpTask"
        | "FederatedService/ExchangeMasks"
        // Changes of a membership are records of the log.
        | "GroupService/JoinGroup" => one(Reinforce),
        // A learning epoch decays all memories, and runs consist of epochs.
        "MemoryService/ApplyDecay"
        | "MemoryService/LearnEpoch"
        | "RunService/SubmitRun"
        | "RunService/CancelRun"
        | "RunService/RemoveRun"
        | "RunService/SuspendRun"
        | "FederatedService/RevokeClient" => one(Decay),
        _ => one(Admin),
    })
}

/// Verifies tokens and checks the permissions of their accounts, by the current content of the files.
#[derive(Debug)]
pub(crate) struct AccountAuthorizer {
    tokens: Tokens,
    audience: String,
    access: Arc<WatchedFiles<AccessList>>,
}

impl AccountAuthorizer {
    /// Opens the files of a cluster. Until they exist and are valid, every token is rejected.
    pub(crate) fn open(files: &TokenFiles, cluster: ClusterId) -> Self {
        let TokenFiles { keys, issuer, access } = files.clone();
        let audience = audience(cluster);
        let parse = |contents: &[Vec<u8>]| AccessList::parse(&contents[0]).map_err(|what| Error::Unusable { what });
        Self {
            tokens: Tokens::open(&IssuerFiles { keys, issuer }, audience.clone()),
            audience,
            access: WatchedFiles::open_or("access list", vec![access], parse, AccessList::default()),
        }
    }

    /// Watches the files for changes. Needs a runtime.
    pub(crate) fn watch_files(&self) {
        self.tokens.watch();
        self.access.watch();
    }

    /// Returns the number of failed reloads.
    pub(crate) fn reload_failures(&self) -> u64 {
        self.tokens.failures() + self.access.failures()
    }

    /// Authenticates and authorizes a call. Returns its account; `None` if the call requires none.
    pub(crate) fn admit(
        &self,
        headers: &HeaderMap,
        method: &str,
        now: SystemTime,
    ) -> Result<Option<Account>, TokenRejection> {
        let Some(required) = required_permission(method) else { return Ok(None) };
        let carried = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix(BEARER));
        let account = match carried {
            Some(token) => self.tokens.verify(token.trim(), now)?.account,
            None => {
                let audience = &self.audience;
                let text = format!(
                    "this call carries neither a certificate nor a token; needed: metadata 'authorization: Bearer' with a token of a ServiceAccount for audience '{audience}'"
                );
                return Err(TokenRejection { reason: Reason::NoToken, text });
            }
        };
        self.access.current().check(&account.namespace, &account.name, required).map_err(|missing| {
            let reason = match missing {
                AccessDenied::Account { .. } => Reason::TokenAccount,
                AccessDenied::Right { .. } => Reason::TokenRight,
            };
            TokenRejection { reason, text: format!("{account} may not call {method}: it {missing}") }
        })?;
        Ok(Some(account))
    }
}

/// Converts a refusal: an unknown client should present other credentials, a known one lacks a permission.
pub(crate) fn problem(refusal: TokenRejection) -> Problem {
    let kind = match refusal.reason {
        Reason::TokenAccount | Reason::TokenRight | Reason::Role | Reason::Sender => ProblemKind::Denied,
        _ => ProblemKind::Unauthenticated,
    };
    Problem::of(kind, refusal.text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use engram_api::ManifestEnum as _;
    use engram_api::kubernetes_only::Access;
    use engram_proto::DESCRIPTORS;
    use prost::Message as _;

    /// Returns all calls of the services on the client listener.
    fn calls() -> Vec<String> {
        let files = prost_types::FileDescriptorSet::decode(DESCRIPTORS).unwrap();
        let served = ["MemoryService", "RunService", "AdminService", "GroupService", "FederatedService"];
        let services = files.file.iter().filter(|file| file.package() == "engram.v1").flat_map(|file| &file.service);
        let services = services.filter(|service| served.contains(&service.name()));
        let calls = services.flat_map(|service| service.method.iter().map(move |method| (service, method)));
        calls.map(|(service, method)| format!("/engram.v1.{}/{}", service.name(), method.name())).collect()
    }

    /// The calls that each permission allows, in addition to those that any permission allows.
    const ALLOWED: [(Right, &[&str]); 3] = [
        (
            Right::Read,
            &[
                "AdminService/GetWorkerStatus",
                "FederatedService/GetPublishedModel",
                "GroupService/GetGroup",
                "MemoryService/GetDigest",
                "MemoryService/GetMemories",
                "MemoryService/GetQuality",
                "MemoryService/Rank",
                "MemoryService/Recall",
                "MemoryService/ScanMemories",
                "RunService/GetReport",
                "RunService/Predict",
                "RunService/ListRuns",
                "RunService/WatchRun",
            ],
        ),
        (
            Right::Reinforce,
            &[
                "FederatedService/CheckIn",
                "FederatedService/CommitUpdate",
                "FederatedService/ExchangeMasks",
                "FederatedService/GetModelPart",
                "FederatedService/GiveUpTask",
                "FederatedService/UploadChunk",
                "GroupService/JoinGroup",
                "MemoryService/ApplyReinforcement",
                "MemoryService/Remove",
                "MemoryService/Upsert",
            ],
        ),
        (
            Right::Decay,
            &[
                "FederatedService/RevokeClient",
                "MemoryService/ApplyDecay",
                "MemoryService/LearnEpoch",
                "RunService/CancelRun",
                "RunService/RemoveRun",
                "RunService/SubmitRun",
                "RunService/SuspendRun",
            ],
        ),
    ];

    #[test]
    fn each_permission_allows_its_calls_and_no_others() {
        let any = ["MemoryService/GetPartitionMap", "MemoryService/OpenSession"];
        let mut cells = 0;
        for right in Right::ALL {
            let entry = Access { service_account: "a".into(), namespace: Some("n".into()), rights: vec![*right] };
            let list = AccessList::new([entry], "n");
            for call in calls() {
                let name = call.strip_prefix("/engram.v1.").unwrap();
                let own = ALLOWED.iter().any(|(of, allowed)| of == right && allowed.contains(&name))
                    || name == "MemoryService/GetOutcome" && *right != Right::Read;
                let expected = *right == Right::Admin || any.contains(&name) || own;
                let need = required_permission(&call).expect("every call of Engram requires a permission");
                assert_eq!(list.check("n", "a", need).is_ok(), expected, "{right} and {name}");
                assert!(list.check("n", "b", need).is_err(), "an account that is not listed may not call {name}");
                cells += 1;
            }
        }
        assert!(cells >= 4 * 29, "{cells} cells; the services are missing");
    }

    #[test]
    fn unknown_calls_require_admin_and_health_checks_nothing() {
        for unknown in ["/engram.v1.PeerService/Exchange", "/engram.v2.MemoryService/Rank", "/", ""] {
            assert_eq!(required_permission(unknown), Some(RequiredRight::One(Right::Admin)), "{unknown}");
        }
        assert_eq!(required_permission("/grpc.health.v1.Health/Check"), None);
        assert_eq!(
            required_permission("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
            Some(RequiredRight::Any)
        );
    }
}
