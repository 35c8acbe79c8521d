//! What an address means inside a Kubernetes: a pod's own, or the name of a Service.

use std::net::IpAddr;

/// Whose port an address names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// A pod's, by the pod's address: what workers tell of themselves.
    Pod(IpAddr),
    /// One of the pods behind a Service: where workers find their coordinators.
    Service { name: String, namespace: String },
}

impl Place {
    /// Reads `host:port`. A host is an address, with brackets around one of IPv6, or `service.namespace`, with or without
    /// `.svc` and the domain of the cluster.
    ///
    /// # Errors
    /// The address, where it is neither.
    pub(super) fn parse(address: &str) -> Result<(Self, u16), String> {
        let unknown = || {
            format!("'{address}' is not an address inside a Kubernetes (pod address or service.namespace, and port)")
        };
        let (host, port) = address.rsplit_once(':').ok_or_else(unknown)?;
        let port = port.parse().map_err(|_| unknown())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Ok(ip) = bare.parse() {
            return Ok((Self::Pod(ip), port));
        }
        let mut labels = host.split('.');
        match (labels.next(), labels.next(), labels.next()) {
            (Some(name), Some(namespace), None | Some("svc")) if !name.is_empty() && !namespace.is_empty() => {
                Ok((Self::Service { name: name.to_owned(), namespace: namespace.to_owned() }, port))
            }
            _ => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_workers_and_coordinators_are_told_apart() {
        let ip = |text: &str| Place::Pod(text.parse().unwrap());
        assert_eq!(Place::parse("10.244.2.7:7443"), Ok((ip("10.244.2.7"), 7443)));
        assert_eq!(Place::parse("[fd00::7]:9090"), Ok((ip("fd00::7"), 9090)));
        let service = Place::Service { name: "engram-coordinator".into(), namespace: "engram-system".into() };
        for host in ["engram-system", "engram-system.svc", "engram-system.svc.cluster.local"] {
            assert_eq!(Place::parse(&format!("engram-coordinator.{host}:7440")), Ok((service.clone(), 7440)));
        }
        for wrong in ["engram-coordinator:7440", "10.244.2.7", "a.b:port", "pod.words-worker.ns.svc:7443", ""] {
            assert!(Place::parse(wrong).unwrap_err().contains(&format!("'{wrong}'")), "{wrong}");
        }
    }
}
