//! Connections that the caller secures: authentication and encryption are not a matter of this crate.

use std::any::Any;
use std::fmt::Debug;
use std::io::{self, Read, Write};
use std::net::TcpStream;

/// A secured connection. It reads and writes as its socket does: where that would block, so does this.
pub trait Secured: Read + Write + Debug + Send {
    /// The socket, to wait for it.
    fn socket(&self) -> &TcpStream;

    /// The implementation, for [`Secure::is_rank`].
    fn as_any(&self) -> &dyn Any;
}

/// Secures the connections of a generation, several at once.
pub trait Secure: Sync {
    /// Secures a blocking socket that this process connected; the process of `rank` must answer.
    ///
    /// # Errors
    /// Another process answered, or the socket failed.
    fn connect(&self, rank: usize, socket: TcpStream) -> io::Result<Box<dyn Secured>>;

    /// Secures a blocking socket that this process accepted.
    ///
    /// # Errors
    /// The caller is not authenticated, or the socket failed.
    fn accept(&self, socket: TcpStream) -> io::Result<Box<dyn Secured>>;

    /// Whether the other end of an accepted connection is the process of `rank`.
    fn is_rank(&self, connection: &dyn Secured, rank: usize) -> bool;
}
