//! Which address of a peer answers: a name may stand for several, of which some lead nowhere.

use super::Error;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc;
use std::time::Duration;

/// Most addresses that are tried.
const MAX_ADDRESSES: usize = 8;

/// Resolves the address HOST:PORT of a rank: to the one that answers first within the limit, or without a limit to any.
///
/// # Errors
/// [`Error::Closed`] for the rank: the name is unknown, or no address answers.
pub fn resolve(rank: usize, address: &str, limit: Option<Duration>) -> Result<SocketAddr, Error> {
    let closed = |source| Error::Closed { rank, source: Some(source) };
    let addresses: Vec<SocketAddr> = address.to_socket_addrs().map_err(closed)?.collect();
    let found = match (limit, &addresses[..]) {
        (None, [any, ..]) => Ok(*any),
        (limit, _) => first_to_answer(&addresses, limit.unwrap_or_default()),
    };
    found.map_err(closed)
}

fn first_to_answer(addresses: &[SocketAddr], limit: Duration) -> io::Result<SocketAddr> {
    first(addresses, move |address| TcpStream::connect_timeout(&address, limit).map(drop))
}

/// Returns the address whose attempt succeeds first. A single one is returned without an attempt.
fn first(
    addresses: &[SocketAddr],
    attempt: impl Fn(SocketAddr) -> io::Result<()> + Clone + Send + 'static,
) -> io::Result<SocketAddr> {
    if let [only] = addresses {
        return Ok(*only);
    }
    let (answers, received) = mpsc::channel();
    for address in addresses.iter().copied().take(MAX_ADDRESSES) {
        let (answers, attempt) = (answers.clone(), attempt.clone());
        // The thread ends with its attempt. Without a receiver another address was faster.
        let probe = move || drop(answers.send(attempt(address).map(|()| address)));
        std::thread::Builder::new().name("address-probe".into()).spawn(probe)?;
    }
    drop(answers);
    let mut failure = io::Error::new(ErrorKind::NotFound, "the name has no IP address");
    while let Ok(answer) = received.recv() {
        match answer {
            Ok(address) => return Ok(address),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};

    #[test]
    fn address_that_answers_is_chosen_among_dead_ones() {
        let [silent, refused, open] = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let (end, ended) = mpsc::channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        let attempt = move |address| {
            if address == silent {
                // As over an interface that leads nowhere.
                let _ = ended.lock().unwrap().recv();
                return Err(ErrorKind::TimedOut.into());
            }
            if address == open { Ok(()) } else { Err(ErrorKind::ConnectionRefused.into()) }
        };
        for addresses in [[silent, refused, open], [open, refused, silent], [refused, silent, open]] {
            assert_eq!(first(&addresses, attempt.clone()).unwrap(), open, "{addresses:?}");
        }
        drop(end);
        assert!(first(&[silent, refused], attempt.clone()).is_err());
        assert_eq!(first(&[], attempt).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn name_with_a_dead_address_leads_to_the_one_that_listens() {
        let open = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = open.local_addr().unwrap();
        let refused = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], open.port()));
        assert_eq!(first_to_answer(&[refused, open], Duration::from_secs(60)).unwrap(), open);
        assert_eq!(resolve(3, &open.to_string(), None).unwrap(), open);
        assert_eq!(resolve(3, "no port", None).unwrap_err().rank(), Some(3));
    }
}
