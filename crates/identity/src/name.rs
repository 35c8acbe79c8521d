//! The name in a certificate: `spiffe://<trust domain>/ns/<namespace>/cluster/<name>/<cluster id>/<role>/<ordinal>`.
//! Workers that share one certificate have no ordinal in it.

use engram_memory::ClusterId;
use std::fmt;
use std::str::FromStr;

/// Limit of the SPIFFE specification.
const MAX_BYTES: usize = 2_048;

/// Trust domain of certificates issued by an operator. It is part of a name and does not decide about trust.
const OPERATORS: &str = "engram.dev";

/// Role of a process in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Stores memories.
    Worker,
    /// Coordinates: a coordinator, the operator, or the supervisor of the workers of one machine.
    Coordinator,
    /// A user, or a program.
    Client,
}

impl Role {
    const ALL: [Self; 3] = [Self::Worker, Self::Coordinator, Self::Client];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Coordinator => "coordinator",
            Self::Client => "client",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The name of a process of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Name {
    /// Trust domain.
    pub trust_domain: String,
    /// Namespace of the cluster; `local` without Kubernetes.
    pub namespace: String,
    /// Name of the cluster.
    pub cluster_name: String,
    /// Id of the cluster. A cluster that was deleted and recreated under the same name has another one.
    pub cluster: ClusterId,
    /// Role of the process.
    pub role: Role,
    /// Ordinal within the role; absent = any worker of the cluster, since all share one certificate.
    pub ordinal: Option<u32>,
}

impl Name {
    /// Returns the name of a process of a cluster on one machine.
    pub fn local(cluster_name: &str, cluster: ClusterId, role: Role, ordinal: u32) -> Self {
        let (trust_domain, namespace) = ("engram.local".to_owned(), "local".to_owned());
        let (cluster_name, ordinal) = (cluster_name.to_owned(), Some(ordinal));
        Self { trust_domain, namespace, cluster_name, cluster, role, ordinal }
    }

    /// Returns the name of a process of a cluster on Kubernetes.
    pub fn on_kubernetes(namespace: &str, cluster_name: &str, cluster: ClusterId, role: Role, ordinal: u32) -> Self {
        let (trust_domain, namespace) = (OPERATORS.to_owned(), namespace.to_owned());
        let (cluster_name, ordinal) = (cluster_name.to_owned(), Some(ordinal));
        Self { trust_domain, namespace, cluster_name, cluster, role, ordinal }
    }

    /// Returns the name of all workers of a cluster on Kubernetes, which share one certificate.
    pub fn shared_by_workers(namespace: &str, cluster_name: &str, cluster: ClusterId) -> Self {
        Self { ordinal: None, ..Self::on_kubernetes(namespace, cluster_name, cluster, Role::Worker, 0) }
    }

    /// Returns a display name: `worker 3`, or `worker` for any.
    pub fn process(&self) -> String {
        self.ordinal.map_or_else(|| self.role.to_string(), |ordinal| format!("{} {ordinal}", self.role))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trust_domain, namespace, cluster_name, cluster, role, ordinal } = self;
        write!(f, "spiffe://{trust_domain}/ns/{namespace}/cluster/{cluster_name}/{cluster}/{role}")?;
        ordinal.map_or(Ok(()), |ordinal| write!(f, "/{ordinal}"))
    }
}

/// A name that is not one of a process of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the certificate names no process of a cluster: {found}")]
pub struct MalformedName {
    /// The name found in the certificate.
    pub found: String,
}

impl FromStr for Name {
    type Err = MalformedName;

    /// Accepts only the spelling that [`Name`] prints: two spellings of one name would be two processes to code that
    /// compares texts.
    fn from_str(text: &str) -> Result<Self, MalformedName> {
        let name = (text.len() <= MAX_BYTES).then(|| parse(text)).flatten();
        name.filter(|name| name.to_string() == text).ok_or_else(|| MalformedName { found: shortened(text) })
    }
}

fn parse(text: &str) -> Option<Name> {
    let parts: Vec<&str> = text.strip_prefix("spiffe://")?.split('/').collect();
    let (process, ordinal) = parts.split_at_checked(7)?;
    let (&[trust_domain, "ns", namespace, "cluster", cluster_name, cluster, role], [] | [_]) = (process, ordinal)
    else {
        return None;
    };
    if ![trust_domain, namespace, cluster_name].into_iter().all(is_segment) || cluster.len() != 32 {
        return None;
    }
    let role = Role::ALL.into_iter().find(|candidate| candidate.as_str() == role)?;
    let ordinal = match ordinal.first() {
        Some(ordinal) => Some(ordinal.parse().ok()?),
        // Only workers share a certificate.
        None if role == Role::Worker => None,
        None => return None,
    };
    Some(Name {
        trust_domain: trust_domain.to_owned(),
        namespace: namespace.to_owned(),
        cluster_name: cluster_name.to_owned(),
        cluster: cluster.parse().ok()?,
        role,
        ordinal,
    })
}

fn is_segment(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    !text.is_empty() && text != "." && text != ".." && text.bytes().all(allowed)
}

/// Shortens and escapes untrusted text for logs.
fn shortened(text: &str) -> String {
    text.chars().take(128).flat_map(char::escape_default).collect()
}

/// The peer that one side of a connection expects, in the same cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExpectedPeer {
    /// Role; absent = any.
    pub role: Option<Role>,
    /// Ordinal; absent = any.
    pub ordinal: Option<u32>,
}

impl ExpectedPeer {
    /// Expects any process of a role.
    pub const fn any(role: Role) -> Self {
        Self { role: Some(role), ordinal: None }
    }

    /// Expects one process of a role.
    pub const fn one(role: Role, ordinal: u32) -> Self {
        Self { role: Some(role), ordinal: Some(ordinal) }
    }

    /// Checks the name of a peer.
    ///
    /// # Errors
    /// It is of another cluster, or not the expected process.
    pub fn check(&self, cluster: ClusterId, found: &Name) -> Result<(), UnexpectedPeer> {
        let is_expected = found.cluster == cluster
            && self.role.is_none_or(|role| role == found.role)
            && self.ordinal.is_none_or(|ordinal| found.ordinal.is_none_or(|found| found == ordinal));
        if is_expected {
            Ok(())
        } else {
            Err(UnexpectedPeer { found: Box::new(found.clone()), cluster, expected: *self })
        }
    }
}

impl fmt::Display for ExpectedPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.role, self.ordinal) {
            (Some(role), Some(ordinal)) => write!(f, "{role} {ordinal}"),
            (Some(role), None) => write!(f, "a {role}"),
            (None, _) => f.write_str("a process"),
        }
    }
}

/// A valid certificate of an unexpected peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the certificate is of {} of cluster {}, not of {expected} of cluster {cluster}", found.process(), found.cluster)]
pub struct UnexpectedPeer {
    /// Name of the peer.
    pub found: Box<Name>,
    /// Expected cluster.
    pub cluster: ClusterId,
    /// Expected peer.
    pub expected: ExpectedPeer,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn name_round_trips_through_text(
            parts in proptest::array::uniform3("[a-z0-9][a-z0-9._-]{0,20}"),
            cluster in any::<u128>(),
            role in 0..3_usize,
            ordinal in any::<Option<u32>>(),
        ) {
            let [trust_domain, namespace, cluster_name] = parts;
            let (cluster, role) = (ClusterId(cluster), Role::ALL[role]);
            let name = Name { trust_domain, namespace, cluster_name, cluster, role, ordinal };
            // Only workers share a certificate.
            let read = name.to_string().parse::<Name>().ok();
            prop_assert_eq!(read, Some(name).filter(|_| role == Role::Worker || ordinal.is_some()));
        }

        #[test]
        fn accepted_text_is_canonical(text in "(spiffe://)?[a-z0-9/. -]{0,80}") {
            if let Ok(name) = text.parse::<Name>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }

    #[test]
    fn other_spellings_and_uris_are_rejected() {
        let good = Name::local("demo", ClusterId(0xab), Role::Worker, 1).to_string();
        assert!(good.parse::<Name>().is_ok());
        for bad in [
            "",
            "spiffe://",
            "https://engram.local/ns/local",
            &good.replace("/worker/1", "/worker/01"),
            &good.replace("/worker/1", "/worker/+1"),
            &good.replace("/worker/1", "/worker/1/"),
            &good.replace("/worker/1", "/admin/1"),
            &good.replace("worker", "WORKER"),
            &good.replace("demo", ".."),
            &good.replace("demo", "a/b"),
            &good.replace("ab/", "AB/"),
            &good.replace("spiffe", "SPIFFE"),
            &good.replace("engram.local", ""),
        ] {
            assert!(bad.parse::<Name>().is_err(), "{bad}");
        }
    }

    #[test]
    fn recreated_cluster_with_the_same_name_is_another_cluster() {
        let worker = |cluster| Name::local("demo", ClusterId(cluster), Role::Worker, 1);
        let any = ExpectedPeer::any(Role::Worker);
        assert!(any.check(ClusterId(1), &worker(1)).is_ok());
        let error = any.check(ClusterId(1), &worker(2)).unwrap_err();
        assert!(error.to_string().contains("worker 1 of cluster"), "{error}");
        assert!(ExpectedPeer::one(Role::Worker, 2).check(ClusterId(1), &worker(1)).is_err());
        assert!(ExpectedPeer::any(Role::Coordinator).check(ClusterId(1), &worker(1)).is_err());
        assert!(ExpectedPeer::default().check(ClusterId(1), &worker(1)).is_ok());
    }

    #[test]
    fn shared_certificate_is_any_worker_of_its_cluster_only() {
        let shared = Name::shared_by_workers("research", "words", ClusterId(1));
        assert_eq!(
            shared.to_string(),
            "spiffe://engram.dev/ns/research/cluster/words/00000000000000000000000000000001/worker"
        );
        let accepts = |expected: ExpectedPeer, cluster| expected.check(ClusterId(cluster), &shared).is_ok();
        assert!(accepts(ExpectedPeer::one(Role::Worker, 0), 1) && accepts(ExpectedPeer::one(Role::Worker, 7), 1));
        assert!(!accepts(ExpectedPeer::any(Role::Worker), 2), "another cluster");
        for role in [Role::Coordinator, Role::Client] {
            assert!(!accepts(ExpectedPeer::any(role), 1) && !accepts(ExpectedPeer::one(role, 0), 1));
        }
    }
}
