//! A listener: a bounded buffer, and the body of a response that is filled from it.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Bytes;
use fathom_monitor::recording::{DropPlace, dropped_block, end_block};
use http_body::{Body, Frame};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::{ListenRequest, StreamSet};

/// The most bytes that wait for a listener.
const BUFFER_MAX: usize = 8 << 20;

/// A listener to events. See the module.
pub(super) struct Listener {
    pub request: ListenRequest,
    /// The streams that it receives now.
    streams: AtomicU64,
    state: Mutex<State>,
    begun: Condvar,
    /// Notified when there is data for a blocking reader.
    filled: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Bytes>,
    bytes: usize,
    /// Events of blocks that did not fit the buffer and that have not been reported yet.
    lost: u64,
    events: u64,
    dropped: u64,
    waker: Option<Waker>,
    /// Whether there were events since the last moment.
    has_events: bool,
    /// The instant until which every moment is sent, and the last moment that was sent.
    active_until_ns: i64,
    moment_ns: i64,
    is_begun: bool,
    ended: bool,
    has_left: bool,
}

impl State {
    fn put(&mut self, bytes: Bytes) {
        self.bytes += bytes.len();
        self.waiting.push_back(bytes);
    }

    fn next(&mut self) -> Option<Bytes> {
        let bytes = self.waiting.pop_front()?;
        self.bytes -= bytes.len();
        Some(bytes)
    }

    /// Reports the lost events at the place where they would have been.
    fn report_lost(&mut self) {
        if self.lost > 0 {
            self.dropped += self.lost;
            let note = dropped_block(self.lost, DropPlace::Listener, "");
            self.lost = 0;
            self.put(note.into());
        }
    }
}

impl Listener {
    /// A listener with the header as its first data.
    pub fn new(request: ListenRequest, header: Vec<u8>) -> Self {
        let mut state = State::default();
        state.put(header.into());
        Self {
            streams: AtomicU64::new(request.streams.0),
            request,
            state: Mutex::new(state),
            begun: Condvar::new(),
            filled: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The streams whose events the listener receives.
    pub fn streams(&self) -> StreamSet {
        StreamSet(self.streams.load(Ordering::Relaxed))
    }

    /// Changes the streams. The collector notices it within 100 ms.
    pub fn set_streams(&self, streams: StreamSet) {
        self.streams.store(streams.0, Ordering::Relaxed);
    }

    /// Whether the listener receives the events of a stream and a disk. Events of no disk (an empty
    /// name) are received by all listeners to their stream.
    pub fn receives(&self, stream: usize, disk: &str) -> bool {
        let disks = &self.request.disks;
        self.streams().contains(stream)
            && (disk.is_empty() || disks.is_empty() || disks.contains(disk))
    }

    /// Whether the listener has closed its stream.
    pub fn has_left(&self) -> bool {
        self.state().has_left
    }

    /// Marks the beginning of the listener's collection.
    pub fn begin(&self) {
        let mut state = self.state();
        if !state.is_begun {
            state.is_begun = true;
            self.begun.notify_all();
        }
    }

    /// Waits for the beginning of the collection.
    pub fn wait_until_begun(&self, limit: Duration) {
        self.begun.wait_while_for(&mut self.state(), |state| !state.is_begun, limit);
    }

    /// Adds a block with a number of events, if the buffer has space for it.
    pub fn offer(&self, block: &Bytes, events: u64) {
        let mut state = self.state();
        if state.has_left || state.ended {
            return;
        }
        if state.bytes + block.len() > BUFFER_MAX {
            state.lost += events;
            return;
        }
        state.report_lost();
        state.events += events;
        state.has_events |= events > 0;
        state.put(block.clone());
        self.wake(&mut state);
    }

    /// Adds a moment. While there are no events, only one moment in each idle pulse is added.
    pub fn offer_moment(&self, block: &Bytes, moment_ns: i64) {
        if let Some(idle) = self.request.idle_pulse {
            let idle_ns = idle.as_nanos() as i64;
            let mut state = self.state();
            if std::mem::take(&mut state.has_events) {
                state.active_until_ns = moment_ns.saturating_add(idle_ns);
            }
            let quiet = moment_ns > state.active_until_ns;
            if quiet && moment_ns < state.moment_ns.saturating_add(idle_ns) {
                return;
            }
            state.moment_ns = moment_ns;
        }
        self.offer(block, 0);
    }

    /// Waits for the next data; `None` at the end.
    pub fn wait_next(&self) -> Option<Bytes> {
        let mut state = self.state();
        self.filled.wait_while(&mut state, |state| state.waiting.is_empty() && !state.ended);
        state.next()
    }

    /// Closes the stream: there is no reader any more.
    pub fn close(&self) {
        let mut state = self.state();
        state.has_left = true;
        state.waiting = VecDeque::new();
        state.bytes = 0;
    }

    fn wake(&self, state: &mut State) {
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
        self.filled.notify_all();
    }

    /// Reports events that did not fit the ring of a disk.
    pub fn note_dropped(&self, count: u64, disk: &str) {
        let mut state = self.state();
        if state.has_left || state.ended {
            return;
        }
        if state.bytes > BUFFER_MAX {
            state.lost += count;
            return;
        }
        state.report_lost();
        state.dropped += count;
        state.put(dropped_block(count, DropPlace::Ring, disk).into());
        self.wake(&mut state);
    }

    /// The next waiting data: first the header, then block by block.
    pub fn take(&self) -> Option<Bytes> {
        self.state().next()
    }

    /// Ends the stream after the data that waits.
    pub fn end(&self) {
        let mut state = self.state();
        if !state.ended {
            state.report_lost();
            let end = end_block(state.events, state.dropped);
            state.put(end.into());
            state.ended = true;
            state.is_begun = true;
            self.begun.notify_all();
            self.wake(&mut state);
        }
    }
}

/// The body of the response to a listener.
pub(crate) struct EventBody {
    listener: Arc<Listener>,
}

impl EventBody {
    pub(super) fn new(listener: Arc<Listener>) -> Self {
        Self { listener }
    }
}

impl Body for EventBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut state = self.listener.state();
        if let Some(bytes) = state.next() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        if state.ended {
            return Poll::Ready(None);
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for EventBody {
    fn drop(&mut self) {
        self.listener.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_listener_loses_blocks_and_gets_a_report() {
        let request = ListenRequest::default();
        let listener = Listener::new(request, vec![0; 10]);
        let block = Bytes::from(vec![0; 1 << 20]);
        for _ in 0..20 {
            listener.offer(&block, 100);
        }
        {
            let mut state = listener.state();
            assert!(state.bytes <= BUFFER_MAX);
            assert_eq!((state.events, state.lost, state.waiting.len()), (700, 1300, 8));
            state.waiting.clear();
            state.bytes = 0;
        }
        listener.offer(&block, 100);
        listener.end();
        listener.offer(&block, 100);
        let state = listener.state();
        assert_eq!((state.events, state.dropped, state.lost), (800, 1300, 0));
        assert_eq!(state.waiting.len(), 3, "the note, the block, and the end");
    }

    #[test]
    fn few_moments_are_sent_without_events() {
        let second = Duration::from_secs(1);
        let request = ListenRequest { idle_pulse: Some(second), ..ListenRequest::default() };
        let listener = Listener::new(request, vec![0; 10]);
        let block = Bytes::from_static(b"moment");
        let step_ns = 50_000_000;
        let waiting = |listener: &Listener| {
            let mut state = listener.state();
            state.bytes = 0;
            std::mem::take(&mut state.waiting).len()
        };
        let pulses = |from: i64, to: i64| {
            (from..to).for_each(|number| listener.offer_moment(&block, number * step_ns));
        };
        pulses(100, 200);
        assert_eq!(waiting(&listener), 1 + 5, "the header, and one each second");
        listener.offer(&Bytes::from_static(b"rows"), 3);
        pulses(200, 300);
        // All moments in the second after the rows, then one each second.
        let count = waiting(&listener);
        assert!((1 + 20..=1 + 20 + 6).contains(&count), "{count}");
    }

    #[test]
    fn a_blocking_reader_gets_all_data_and_the_end() {
        let listener = Arc::new(Listener::new(ListenRequest::default(), vec![7; 10]));
        let reads = Arc::clone(&listener);
        let reader = std::thread::spawn(move || {
            let mut count = 0;
            while reads.wait_next().is_some() {
                count += 1;
            }
            count
        });
        listener.offer(&Bytes::from_static(b"rows"), 1);
        listener.end();
        assert_eq!(reader.join().unwrap(), 3, "the header, the rows, the end");
    }
}
