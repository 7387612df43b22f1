//! The sockets of the control interface: the control socket, and the socket for those who may only
//! look.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};

/// The most connections of all who only look, and of one user among them: so nobody keeps the
/// others from looking, and the daemon has descriptors for its disks.
const VIEWS_MAX: usize = 256;
const VIEWS_OF_USER_MAX: usize = 64;
/// The pause after an error of `accept`.
const PAUSE: Duration = Duration::from_millis(100);
/// The most bytes of the name of a command.
const COMMAND_MAX: usize = 64;

/// Who is at the other end of a connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct Peer {
    /// The number of the user.
    pub(crate) user_id: Option<u32>,
    /// The number of the process that has connected.
    pub(crate) process_id: Option<u32>,
    /// The command of the process, as it names itself. Empty if the daemon may not see it.
    pub(crate) command: String,
}

impl Peer {
    fn of(stream: &UnixStream) -> Self {
        let Ok(credentials) = stream.peer_cred() else { return Self::default() };
        let process_id = credentials.pid().and_then(|pid| u32::try_from(pid).ok());
        let command = process_id.and_then(|pid| std::fs::read(format!("/proc/{pid}/comm")).ok());
        let mut command = command.unwrap_or_default();
        command.truncate(COMMAND_MAX);
        let command = String::from_utf8_lossy(&command).trim_end().to_owned();
        Self { user_id: Some(credentials.uid()), process_id, command }
    }
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Self::of(stream.io())
    }
}

/// The connections of those who only look, by user.
type Views = Mutex<HashMap<u32, usize>>;

/// A listener with a limit on its connections.
pub(crate) struct ViewListener {
    listener: UnixListener,
    views: Arc<Views>,
}

impl ViewListener {
    pub(crate) fn new(listener: UnixListener) -> Self {
        Self { listener, views: Arc::default() }
    }

    /// The connection with its place, if there is one.
    fn admit(&self, stream: UnixStream) -> Option<ViewStream> {
        let user_id = stream.peer_cred().ok()?.uid();
        let mut views = self.views.lock();
        let all: usize = views.values().sum();
        let own = views.entry(user_id).or_default();
        if all >= VIEWS_MAX || *own >= VIEWS_OF_USER_MAX {
            if *own == 0 {
                views.remove(&user_id);
            }
            return None;
        }
        *own += 1;
        Some(ViewStream { stream, user_id, views: Arc::clone(&self.views) })
    }
}

impl Listener for ViewListener {
    type Io = ViewStream;
    type Addr = ();

    async fn accept(&mut self) -> (ViewStream, ()) {
        loop {
            match self.listener.accept().await {
                // One without a place is closed.
                Ok((stream, _)) => {
                    if let Some(view) = self.admit(stream) {
                        return (view, ());
                    }
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection of somebody who only looks. Dropping it gives its place back.
pub(crate) struct ViewStream {
    stream: UnixStream,
    user_id: u32,
    views: Arc<Views>,
}

impl Drop for ViewStream {
    fn drop(&mut self) {
        let mut views = self.views.lock();
        if let Some(own) = views.get_mut(&self.user_id) {
            *own -= 1;
            if *own == 0 {
                views.remove(&self.user_id);
            }
        }
    }
}

impl AsyncRead for ViewStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for ViewStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
