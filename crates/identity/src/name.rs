//! The name in a certificate: `spiffe://<trust domain>/ns/<namespace>/cluster/<name>/<cluster id>/<role>/<ordinal>`. Workers that share one
//! certificate have no ordinal in it.

use engram_memory::ClusterId;
use std::fmt;
use std::str::FromStr;

/// As SPIFFE has it.
const MAX_BYTES: usize = 2_048;

/// Whose the names of an operator's authority are. It is part of a name and says nothing of who is believed: the authority does.
const OPERATORS: &str = "engram.dev";

/// What a process is in its cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Holds memories.
    Worker,
    /// Coordinates: a coordinator, the operator, or the process above the workers of one machine.
    Coordinator,
    /// A person, or a program of theirs.
    Client,
}

impl Role {
    const ALL: [Self; 3] = [Self::Worker, Self::Coordinator, Self::Client];

    const fn word(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Coordinator => "coordinator",
            Self::Client => "client",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A process of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Name {
    /// Whose names these are.
    pub trust_domain: String,
    /// Namespace of the cluster; `local` without a Kubernetes.
    pub namespace: String,
    /// Name of the cluster.
    pub cluster_name: String,
    /// The cluster. One that was deleted and made again under the same name is another.
    pub cluster: ClusterId,
    /// What it is.
    pub role: Role,
    /// Which of those; absent = whichever worker of the cluster shows it, since all share one certificate.
    pub ordinal: Option<u32>,
}

impl Name {
    /// A process of a cluster on one machine.
    pub fn local(cluster_name: &str, cluster: ClusterId, role: Role, ordinal: u32) -> Self {
        let (trust_domain, namespace) = ("engram.local".to_owned(), "local".to_owned());
        let (cluster_name, ordinal) = (cluster_name.to_owned(), Some(ordinal));
        Self { trust_domain, namespace, cluster_name, cluster, role, ordinal }
    }

    /// A process of a cluster on Kubernetes.
    pub fn on_kubernetes(namespace: &str, cluster_name: &str, cluster: ClusterId, role: Role, ordinal: u32) -> Self {
        let (trust_domain, namespace) = (OPERATORS.to_owned(), namespace.to_owned());
        let (cluster_name, ordinal) = (cluster_name.to_owned(), Some(ordinal));
        Self { trust_domain, namespace, cluster_name, cluster, role, ordinal }
    }

    /// All workers of a cluster on Kubernetes, which share one certificate.
    pub fn shared_by_workers(namespace: &str, cluster_name: &str, cluster: ClusterId) -> Self {
        Self { ordinal: None, ..Self::on_kubernetes(namespace, cluster_name, cluster, Role::Worker, 0) }
    }

    /// What it is in its cluster, for people: `worker 3`, or `worker` where it may be any.
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

/// Not the name of a process of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the certificate names no process of a cluster: {found}")]
pub struct Malformed {
    /// What it names.
    pub found: String,
}

impl FromStr for Name {
    type Err = Malformed;

    /// Takes the one spelling that [`Name`] prints, and no other: two spellings of one name would be two processes to whoever compares
    /// texts.
    fn from_str(text: &str) -> Result<Self, Malformed> {
        let name = (text.len() <= MAX_BYTES).then(|| parse(text)).flatten();
        name.filter(|name| name.to_string() == text).ok_or_else(|| Malformed { found: shortened(text) })
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
    let role = Role::ALL.into_iter().find(|known| known.word() == role)?;
    let ordinal = match ordinal.first() {
        Some(ordinal) => Some(ordinal.parse().ok()?),
        // Of the others each has a certificate of its own.
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

/// What a log may show of a text that anybody may have written.
fn shortened(text: &str) -> String {
    text.chars().take(128).flat_map(char::escape_default).collect()
}

/// Whom one side of a connection expects on the other, beside the same cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Expected {
    /// What it is; absent = anything.
    pub role: Option<Role>,
    /// Which of those; absent = any.
    pub ordinal: Option<u32>,
}

impl Expected {
    /// Any of a role.
    pub const fn any(role: Role) -> Self {
        Self { role: Some(role), ordinal: None }
    }

    /// One of a role.
    pub const fn one(role: Role, ordinal: u32) -> Self {
        Self { role: Some(role), ordinal: Some(ordinal) }
    }

    /// Checks who is there.
    ///
    /// # Errors
    /// It is of another cluster, or another process than was expected.
    pub fn check(&self, cluster: ClusterId, found: &Name) -> Result<(), Stranger> {
        let is_expected = found.cluster == cluster
            && self.role.is_none_or(|role| role == found.role)
            && self.ordinal.is_none_or(|ordinal| found.ordinal.is_none_or(|found| found == ordinal));
        if is_expected { Ok(()) } else { Err(Stranger { found: Box::new(found.clone()), cluster, expected: *self }) }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.role, self.ordinal) {
            (Some(role), Some(ordinal)) => write!(f, "{role} {ordinal}"),
            (Some(role), None) => write!(f, "a {role}"),
            (None, _) => f.write_str("a process"),
        }
    }
}

/// A certificate that is good, of somebody else.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the certificate is of {} of cluster {}, not of {expected} of cluster {cluster}", found.process(), found.cluster)]
pub struct Stranger {
    /// Whose it is.
    pub found: Box<Name>,
    /// Which cluster was expected.
    pub cluster: ClusterId,
    /// Who was expected in it.
    pub expected: Expected,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_name_is_read_as_it_was_written(
            words in proptest::array::uniform3("[a-z0-9][a-z0-9._-]{0,20}"),
            cluster in any::<u128>(),
            role in 0..3_usize,
            ordinal in any::<Option<u32>>(),
        ) {
            let [trust_domain, namespace, cluster_name] = words;
            let (cluster, role) = (ClusterId(cluster), Role::ALL[role]);
            let name = Name { trust_domain, namespace, cluster_name, cluster, role, ordinal };
            // A certificate is shared by workers alone.
            let read = name.to_string().parse::<Name>().ok();
            prop_assert_eq!(read, Some(name).filter(|_| role == Role::Worker || ordinal.is_some()));
        }

        #[test]
        fn no_text_has_two_meanings(text in "(spiffe://)?[a-z0-9/. -]{0,80}") {
            if let Ok(name) = text.parse::<Name>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }

    #[test]
    fn other_spellings_and_other_uris_are_refused() {
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
    fn a_cluster_made_again_under_the_same_name_is_a_stranger() {
        let worker = |cluster| Name::local("demo", ClusterId(cluster), Role::Worker, 1);
        let any = Expected::any(Role::Worker);
        assert!(any.check(ClusterId(1), &worker(1)).is_ok());
        let stranger = any.check(ClusterId(1), &worker(2)).unwrap_err();
        assert!(stranger.to_string().contains("worker 1 of cluster"), "{stranger}");
        assert!(Expected::one(Role::Worker, 2).check(ClusterId(1), &worker(1)).is_err());
        assert!(Expected::any(Role::Coordinator).check(ClusterId(1), &worker(1)).is_err());
        assert!(Expected::default().check(ClusterId(1), &worker(1)).is_ok());
    }

    #[test]
    fn a_shared_certificate_is_any_worker_of_its_cluster_and_nobody_else() {
        let shared = Name::shared_by_workers("research", "words", ClusterId(1));
        assert_eq!(
            shared.to_string(),
            "spiffe://engram.dev/ns/research/cluster/words/00000000000000000000000000000001/worker"
        );
        let takes = |expected: Expected, cluster| expected.check(ClusterId(cluster), &shared).is_ok();
        assert!(takes(Expected::one(Role::Worker, 0), 1) && takes(Expected::one(Role::Worker, 7), 1));
        assert!(!takes(Expected::any(Role::Worker), 2), "another cluster");
        for role in [Role::Coordinator, Role::Client] {
            assert!(!takes(Expected::any(role), 1) && !takes(Expected::one(role, 0), 1));
        }
    }
}
