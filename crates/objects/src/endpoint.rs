//! Endpoints of object storage: their syntax, and which of them a client of a cluster may name.

use crate::Error;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An endpoint URL, checked completely: what it accepts can be signed and sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    pub(crate) plaintext: bool,
    /// Lower case; IPv6 addresses without brackets.
    pub(crate) host: String,
    port: u16,
    /// Empty, or with a leading and without a trailing slash.
    path: String,
}

impl Endpoint {
    /// Parses `http://HOST[:PORT][/PATH]`; `field` names its origin in errors.
    pub(crate) fn parse(field: &str, text: &str) -> Result<Self, Error> {
        let invalid = || Error::Settings {
            what: format!(
                "{field} is {text:?}; allowed: http://HOST[:PORT] or https://HOST[:PORT], with a port of 1 to 65535 and without \
                 credentials"
            ),
        };
        let (plaintext, rest) = match text.split_once("://") {
            Some(("http", rest)) => (true, rest),
            Some(("https", rest)) => (false, rest),
            _ => return Err(invalid()),
        };
        let (host_port, path) = rest.find('/').map_or((rest, ""), |slash| rest.split_at(slash));
        let (host, port) = match host_port.strip_prefix('[') {
            Some(address) => {
                let (address, port) = address.split_once(']').ok_or_else(invalid)?;
                address.parse::<Ipv6Addr>().map_err(|_| invalid())?;
                (address, port.strip_prefix(':').or(port.is_empty().then_some("")).ok_or_else(invalid)?)
            }
            None => match host_port.split_once(':') {
                Some((_, "")) => return Err(invalid()),
                Some(pair) if is_host(pair.0) => pair,
                None if is_host(host_port) => (host_port, ""),
                _ => return Err(invalid()),
            },
        };
        let default = if plaintext { 80 } else { 443 };
        let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
        let port =
            if port.is_empty() { Some(default) } else { port.parse().ok().filter(|port| *port > 0 && is_number) };
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
        let port = port.filter(|_| path.bytes().all(is_plain)).ok_or_else(invalid)?;
        let path = path.trim_end_matches('/').to_owned();
        Ok(Self { plaintext, host: host.to_ascii_lowercase(), port, path })
    }

    /// Returns why a client of a cluster may not name this endpoint; `None` if it may.
    pub(crate) fn local_address(&self) -> Option<&'static str> {
        if self.host == "localhost" || self.host.ends_with(".localhost") {
            return Some("a loopback address");
        }
        self.host.parse().ok().and_then(local_kind)
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { plaintext, host, port, path } = self;
        let scheme = if *plaintext { "http" } else { "https" };
        let default = if *plaintext { 80 } else { 443 };
        if host.contains(':') { write!(f, "{scheme}://[{host}]") } else { write!(f, "{scheme}://{host}") }?;
        if *port == default { Ok(()) } else { write!(f, ":{port}") }?;
        f.write_str(path)
    }
}

/// Whether a text is a DNS name or an IPv4 address. A host of digits and dots only must be an address: URL parsers reject the rest.
fn is_host(text: &str) -> bool {
    let label = |label: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
        (1..=63).contains(&label.len()) && label.bytes().all(is_plain) && !label.starts_with('-')
    };
    let labels = text.strip_suffix('.').unwrap_or(text);
    let last = labels.rsplit('.').next().unwrap_or_default();
    let is_numeric = last.bytes().all(|byte| byte.is_ascii_digit()) || last.starts_with("0x") || last.starts_with("0X");
    let is_name = text.len() <= 253 && !text.contains("xn--") && labels.split('.').all(label);
    if is_numeric { text.parse::<Ipv4Addr>().is_ok() } else { is_name }
}

/// Returns the kind of an address that only this machine or its cloud answers; `None` for all others.
pub(crate) fn local_kind(address: IpAddr) -> Option<&'static str> {
    /// Metadata services outside the link-local range: Alibaba Cloud and Oracle Cloud; AWS over IPv6.
    const METADATA: [Ipv4Addr; 2] = [Ipv4Addr::new(100, 100, 100, 200), Ipv4Addr::new(192, 0, 0, 192)];
    const METADATA_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254);
    let address = match address {
        // Translated and mapped addresses reach the embedded IPv4 address.
        IpAddr::V6(v6) => {
            let nat64 = (v6.segments()[..6] == [0x64, 0xff9b, 0, 0, 0, 0]).then(|| {
                let octets = v6.octets();
                Ipv4Addr::new(octets[12], octets[13], octets[14], octets[15])
            });
            v6.to_ipv4_mapped().or(nat64).map_or(address, IpAddr::V4)
        }
        IpAddr::V4(_) => address,
    };
    match address {
        // The system routes 0.0.0.0 and :: to this machine.
        _ if address.is_loopback() || address.is_unspecified() => Some("a loopback address"),
        IpAddr::V4(v4) if v4.octets()[0] == 0 => Some("a loopback address"),
        IpAddr::V4(v4) if v4.is_link_local() => Some("a link-local address"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("a link-local address"),
        IpAddr::V4(v4) if METADATA.contains(&v4) => Some("a metadata service"),
        IpAddr::V6(METADATA_V6) => Some("a metadata service"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_has_a_scheme_a_host_and_a_valid_port() {
        for (text, shown) in [
            ("http://minio:9000", "http://minio:9000"),
            ("https://S3.example.com/", "https://s3.example.com"),
            ("http://10.0.0.1:80", "http://10.0.0.1"),
            ("http://[fd00::1]:9000/base/", "http://[fd00::1]:9000/base"),
        ] {
            assert_eq!(Endpoint::parse("endpoint", text).unwrap().to_string(), shown);
        }
        for text in [
            "",
            "minio:9000",
            "http://",
            "http://:9000",
            "http://127.0.0.1:99999",
            "http://minio:0",
            "http://minio:",
            "http://minio:+80",
            "http://key:secret@minio",
            "http://a b",
            "http://minio\n",
            "http://minio?x",
            "http://999.1.1.1",
            "http://0x7f000001",
            "http://[::1",
            "http://[::1]9",
            "http://[x]",
            "http://-a",
            "http://a..b",
            "http://minio/%",
            "ftp://minio",
        ] {
            let error = Endpoint::parse("AWS_ENDPOINT_URL", text).unwrap_err().to_string();
            assert!(error.starts_with("AWS_ENDPOINT_URL is ") && error.contains("1 to 65535"), "{text:?}: {error}");
        }
    }

    #[test]
    fn local_addresses_are_recognized_in_every_notation() {
        for host in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "169.254.169.254",
            "100.100.100.200",
            "localhost",
            "a.localhost",
            "[::1]",
            "[::]",
            "[fe80::1]",
            "[fd00:ec2::254]",
            "[::ffff:127.0.0.1]",
            "[64:ff9b::a9fe:a9fe]",
        ] {
            assert!(Endpoint::parse("", &format!("http://{host}:80")).unwrap().local_address().is_some(), "{host}");
        }
        for host in ["10.0.0.1", "minio.storage", "[fd00::1]", "192.168.1.1"] {
            assert_eq!(Endpoint::parse("", &format!("http://{host}")).unwrap().local_address(), None, "{host}");
        }
    }
}
