//! Addresses inside of Kubernetes: pod addresses and Service names.

use std::net::IpAddr;

/// The host of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    /// A pod, by its IP address: advertised by workers.
    Pod(IpAddr),
    /// Any pod of a Service: used for coordinators.
    Service { name: String, namespace: String },
}

impl Address {
    /// Parses `host:port`. The host is an IP address (IPv6 in brackets) or `service.namespace`, optionally with `.svc` and a domain.
    ///
    /// # Errors
    /// The address has another form.
    pub(super) fn parse(address: &str) -> Result<(Self, u16), String> {
        let invalid = || format!("'{address}' is not a Kubernetes address; allowed: IP:PORT or SERVICE.NAMESPACE:PORT");
        let (host, port) = address.rsplit_once(':').ok_or_else(invalid)?;
        let port = port.parse().map_err(|_| invalid())?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        if let Ok(ip) = bare.parse() {
            return Ok((Self::Pod(ip), port));
        }
        let mut labels = host.split('.');
        match (labels.next(), labels.next(), labels.next()) {
            (Some(name), Some(namespace), None | Some("svc")) if !name.is_empty() && !namespace.is_empty() => {
                Ok((Self::Service { name: name.to_owned(), namespace: namespace.to_owned() }, port))
            }
            _ => Err(invalid()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pod_and_service_addresses_are_distinguished() {
        let ip = |text: &str| Address::Pod(text.parse().unwrap());
        assert_eq!(Address::parse("10.244.2.7:7443"), Ok((ip("10.244.2.7"), 7443)));
        assert_eq!(Address::parse("[fd00::7]:9090"), Ok((ip("fd00::7"), 9090)));
        let service = Address::Service { name: "engram-coordinator".into(), namespace: "engram-system".into() };
        for host in ["engram-system", "engram-system.svc", "engram-system.svc.cluster.local"] {
            assert_eq!(Address::parse(&format!("engram-coordinator.{host}:7440")), Ok((service.clone(), 7440)));
        }
        for wrong in ["engram-coordinator:7440", "10.244.2.7", "a.b:port", "pod.words-worker.ns.svc:7443", ""] {
            assert!(Address::parse(wrong).unwrap_err().contains(&format!("'{wrong}'")), "{wrong}");
        }
    }
}
