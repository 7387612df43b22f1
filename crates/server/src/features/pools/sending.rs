//! Snapshots as streams for clients of the control interface: a thread for each reads the pool, and
//! waits when its client does.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Bytes;
use fathom_control::{ErrorBody, ErrorCode, SnapshotStreamQuery};
use fathom_failure::Failure;
use fathom_store::{SendOptions, send};
use http_body::{Body, Frame};
use parking_lot::{Condvar, Mutex};

use super::refused;
use crate::daemon::Daemon;
use crate::daemon::stack::refusal;

/// The most snapshots that are sent at the same time.
const SENDING_MAX: usize = 4;
/// The bytes of a piece of the stream, and the most pieces that wait for the client.
const PIECE: usize = 256 << 10;
const PIECES_MAX: usize = 4;
/// How long a client may read nothing.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// The snapshots that are being sent.
#[derive(Clone, Default)]
pub(crate) struct Sending(Arc<Mutex<Vec<Weak<Pipe>>>>);

impl Sending {
    /// A pipe, unless there are too many, or the daemon stops.
    fn begin(&self) -> Option<Arc<Pipe>> {
        let mut pipes = self.0.lock();
        pipes.retain(|pipe| pipe.strong_count() > 0);
        if pipes.len() >= SENDING_MAX {
            return None;
        }
        let pipe = Arc::new(Pipe::default());
        pipes.push(Arc::downgrade(&pipe));
        Some(pipe)
    }

    /// Ends all of them.
    pub(crate) fn stop(&self) {
        let pipes = self.0.lock();
        pipes.iter().filter_map(Weak::upgrade).for_each(|pipe| pipe.close());
    }
}

/// What the thread has read, and the client has not got yet.
#[derive(Default)]
struct Pipe {
    state: Mutex<PipeState>,
    has_room: Condvar,
}

#[derive(Default)]
struct PipeState {
    pieces: VecDeque<Bytes>,
    waker: Option<Waker>,
    /// How the thread has ended.
    ended: Option<io::Result<()>>,
    /// Whether nobody takes pieces any more.
    is_closed: bool,
}

impl Pipe {
    fn close(&self) {
        self.state.lock().is_closed = true;
        self.has_room.notify_all();
    }

    /// Adds a piece, as soon as there is room.
    fn push(&self, piece: Bytes) -> io::Result<()> {
        let mut state = self.state.lock();
        let is_full = |state: &mut PipeState| !state.is_closed && state.pieces.len() >= PIECES_MAX;
        if self.has_room.wait_while_for(&mut state, is_full, SILENCE_MAX).timed_out() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        if state.is_closed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        state.pieces.push_back(piece);
        wake(&mut state);
        Ok(())
    }

    fn end(&self, how: io::Result<()>) {
        let mut state = self.state.lock();
        state.ended = Some(how);
        wake(&mut state);
    }
}

fn wake(state: &mut PipeState) {
    if let Some(waker) = state.waker.take() {
        waker.wake();
    }
}

/// The thread's end of a pipe.
struct PipeWriter {
    pipe: Arc<Pipe>,
    piece: Vec<u8>,
}

impl Write for PipeWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(PIECE - self.piece.len());
        self.piece.extend_from_slice(&bytes[..count]);
        if self.piece.len() == PIECE {
            self.flush()?;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = std::mem::take(&mut self.piece);
        if piece.is_empty() { Ok(()) } else { self.pipe.push(piece.into()) }
    }
}

/// The client's end.
pub(crate) struct SnapshotBody(Arc<Pipe>);

impl Body for SnapshotBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let mut state = self.0.state.lock();
        if let Some(piece) = state.pieces.pop_front() {
            self.0.has_room.notify_all();
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        match state.ended.take() {
            Some(Ok(())) => {
                state.ended = Some(Ok(()));
                Poll::Ready(None)
            }
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for SnapshotBody {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl Daemon {
    /// Begins to send a snapshot.
    ///
    /// # Errors
    /// If no disk uses the pool, there is no such snapshot, or too many are being sent.
    pub(super) fn send_snapshot(
        &self,
        query: SnapshotStreamQuery,
    ) -> Result<SnapshotBody, ErrorBody> {
        let pool = self.open_pool(&query.path)?;
        for name in [Some(&query.snapshot), query.from.as_ref()].into_iter().flatten() {
            pool.number_of(&query.volume, Some(name)).map_err(refused)?;
        }
        let pipe = self.part::<Sending>().begin().ok_or_else(|| {
            let what = format!("{SENDING_MAX} snapshots are being sent");
            refusal(ErrorCode::Busy, what, "repeat the command when one of them has ended")
        })?;
        let body = SnapshotBody(Arc::clone(&pipe));
        let work = move || {
            let SnapshotStreamQuery { volume, snapshot, from, .. } = &query;
            let options = SendOptions { volume, snapshot, from: from.as_deref() };
            let out = PipeWriter { pipe: Arc::clone(&pipe), piece: Vec::new() };
            let sent = send(&pool, &options, out, |_, _| {});
            drop(pool);
            let sent = sent.map(drop).map_err(|error| {
                let failure = Failure::from(error);
                tracing::warn!(volume, snapshot, "a snapshot is not sent: {failure}");
                io::Error::other(failure)
            });
            pipe.end(sent);
        };
        let started = std::thread::Builder::new().name("send".into()).spawn(work);
        started.map(|_| body).map_err(|error| {
            let what = format!("a thread cannot be started: {error}");
            refusal(ErrorCode::Failed, what, "repeat the command")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_writer_waits_for_its_client_and_ends_with_it() {
        let sending = Sending::default();
        let pipes: Vec<_> = (0..SENDING_MAX).filter_map(|_| sending.begin()).collect();
        assert!(pipes.len() == SENDING_MAX && sending.begin().is_none());
        let pipe = Arc::clone(&pipes[0]);
        let writer = std::thread::spawn(move || {
            let mut writer = PipeWriter { pipe, piece: Vec::new() };
            writer.write_all(&vec![7; 10 * PIECE])
        });
        let mut body = SnapshotBody(Arc::clone(&pipes[0]));
        let mut taken = 0;
        while taken < 3 {
            let mut context = Context::from_waker(Waker::noop());
            match Pin::new(&mut body).poll_frame(&mut context) {
                Poll::Ready(Some(Ok(frame))) => {
                    assert_eq!(frame.into_data().unwrap(), vec![7; PIECE]);
                    taken += 1;
                }
                Poll::Pending => std::thread::yield_now(),
                Poll::Ready(other) => panic!("{other:?}"),
            }
            assert!(pipes[0].state.lock().pieces.len() <= PIECES_MAX);
        }
        sending.stop();
        assert_eq!(writer.join().unwrap().unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        drop((body, pipes));
        assert!(sending.begin().is_some());
    }
}
