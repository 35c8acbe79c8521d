//! Which address of a peer answers: a name may stand for several, of which some lead nowhere.

use super::{Error, Wait};
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Most addresses that are tried.
const MAX_ADDRESSES: usize = 8;
/// How long a thread sleeps before it checks for cancellation.
const SLICE: Duration = Duration::from_millis(5);

/// Resolves the addresses HOST:PORT of the ranks below `rank`, which it connects to: each to the one that answers first. Those of the other ranks are not
/// used, and stay unspecified.
///
/// # Errors
/// [`Error::Closed`] for a rank whose name is unknown, or of whose addresses none answers; those of `wait`.
pub fn resolve(rank: usize, addresses: &[String], wait: &mut Wait<'_>) -> Result<Vec<SocketAddr>, Error> {
    let address = |(peer, address): (usize, &String)| {
        if peer < rank { resolve_one(peer, address, wait) } else { Ok((Ipv4Addr::UNSPECIFIED, 0).into()) }
    };
    addresses.iter().enumerate().map(address).collect()
}

fn resolve_one(rank: usize, address: &str, wait: &mut Wait<'_>) -> Result<SocketAddr, Error> {
    if let Ok(known) = address.parse() {
        return Ok(known);
    }
    let closed = |source| Error::Closed { rank, source: Some(source) };
    let (name, limit) = (address.to_owned(), wait.limit());
    let resolve = move || first_to_answer(&name.to_socket_addrs()?.collect::<Vec<_>>(), limit);
    let (answer, received) = mpsc::sync_channel(1);
    // A name service may take longer than a generation lasts: the thread ends with it. Without a receiver the generation is over.
    let work = move || drop(answer.send(resolve()));
    std::thread::Builder::new().name("resolver".into()).spawn(work).map_err(closed)?;
    loop {
        match received.recv_timeout(SLICE) {
            Ok(found) => return found.map_err(closed),
            Err(RecvTimeoutError::Timeout) => wait.idle(rank)?,
            Err(RecvTimeoutError::Disconnected) => return Err(closed(ErrorKind::NotFound.into())),
        };
    }
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
    use std::sync::atomic::AtomicBool;
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
        let resolve = |rank: usize, addresses: &[String]| {
            let (never, mut keep_waiting) = (AtomicBool::new(false), |_| true);
            resolve(rank, addresses, &mut Wait::new(Duration::from_secs(60), &never, &mut keep_waiting))
        };
        let name = format!("localhost:{}", open.port());
        // No address, and one that no name service knows: they are not used.
        let addresses = [open.to_string(), name, "own".to_owned(), "higher.invalid:1".to_owned()];
        let resolved = resolve(2, &addresses).unwrap();
        assert_eq!((resolved[0], resolved[1].port(), resolved.len()), (open, open.port(), 4));
        assert_eq!(resolve(4, &addresses).unwrap_err().rank(), Some(2));
    }
}
