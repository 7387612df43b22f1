//! What of an export outlives the daemon, so that a later one knows of changes that a server may
//! have lost: the caller keeps it.

use std::io;
use std::os::fd::BorrowedFd;

/// What an earlier daemon has left of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Earlier {
    /// Nothing: all that it had acknowledged is durable.
    Nothing,
    /// Changes that no flush covers. The server has them: it has not ended since it acknowledged
    /// them.
    Unflushed,
    /// Acknowledged changes may be lost, with this `errno`. That is recorded.
    Lost(i32),
}

/// Keeps what a later daemon has to know of an export. Its functions are called on the export's
/// thread, and wait for a moment at most, if nothing else is said.
///
/// The connection over which changes were acknowledged tells whether their server still has them:
/// the kernel closes it when the server ends. So somebody who outlives the daemon holds it.
pub trait ExportRecord: Send + Sync {
    /// What an earlier daemon has left. A new connection to the server exists already, so that a
    /// server that ends from now on is noticed by it. Waits for some seconds at most.
    fn examine(&self) -> Earlier;

    /// Closes the connections that an earlier daemon has left: the server may serve only one.
    fn let_go(&self);

    /// The server has agreed on a connection. What is not flushed will be sent again over it.
    fn agreed(&self) {}

    /// A connection over which requests follow. Its server has all changes that are not flushed.
    fn connected(&self, connection: BorrowedFd<'_>);

    /// The last connection has ended, and is closed.
    fn disconnected(&self);

    /// Whether there are acknowledged changes that no flush covers. Called before the first of them
    /// is acknowledged.
    fn note_unflushed(&self, is_so: bool);

    /// Acknowledged changes may be lost. Called before anybody knows of it.
    ///
    /// # Errors
    /// If no place accepts the record.
    fn record_loss(&self, errno: i32) -> io::Result<()>;

    /// The operator knows of the loss.
    ///
    /// # Errors
    /// If the record cannot be removed: a later daemon would find it.
    fn clear_loss(&self) -> io::Result<()>;
}
