//! Live events for a thread of the daemon itself.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use fathom_control::ErrorBody;
use fathom_monitor::recording::moment_block;

use super::listener::Listener;
use super::{LISTENERS_MAX, ListenRequest, StreamSet, add_listener};
use crate::daemon::Daemon;

/// The events of all disks as they occur: the bytes of a recording after its header. A read waits
/// for data, and returns 0 bytes only at the end.
pub(crate) struct EventFeed {
    listener: Arc<Listener>,
    header: Bytes,
    rest: Bytes,
}

/// Wakes the reader of a feed.
#[derive(Clone)]
pub(crate) struct FeedWaker(Arc<Listener>);

/// Starts a feed with the events of all disks and of some streams from now on. Its recording can
/// have any stream. It has a moment (the instant before
/// which all events have been sent) each `pulse`, or each `idle_pulse` while there are no events.
///
/// # Errors
/// If the daemon is shutting down, or the thread cannot be started.
pub(crate) fn follow(
    daemon: &Arc<Daemon>,
    streams: StreamSet,
    pulse: Duration,
    idle_pulse: Duration,
) -> Result<EventFeed, ErrorBody> {
    let request = ListenRequest {
        streams,
        has_all_headers: true,
        pulse: Some(pulse),
        idle_pulse: Some(idle_pulse),
        ..ListenRequest::default()
    };
    // One place is reserved for the daemon's own thread.
    let (listener, _) = add_listener(daemon, request, LISTENERS_MAX + 1)?;
    listener.wait_until_begun(Duration::from_secs(1));
    let header = listener.wait_next().unwrap_or_default();
    Ok(EventFeed { listener, header, rest: Bytes::new() })
}

impl EventFeed {
    /// The header of the recording.
    pub fn header(&self) -> Bytes {
        self.header.clone()
    }

    /// Changes the streams. A source that is new has its events from about 100 ms later on.
    pub fn set_streams(&self, streams: StreamSet) {
        self.listener.set_streams(streams);
    }

    /// A handle that wakes the reader.
    pub fn waker(&self) -> FeedWaker {
        FeedWaker(Arc::clone(&self.listener))
    }
}

impl FeedWaker {
    /// Wakes the reader with a moment in the distant past, which changes nothing.
    pub fn wake(&self) {
        self.0.offer(&Bytes::from(moment_block(0)), 0);
    }
}

impl Read for EventFeed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.rest.is_empty() {
            self.rest = self.listener.wait_next().unwrap_or_default();
        }
        let length = self.rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.rest.split_to(length));
        Ok(length)
    }
}

impl Drop for EventFeed {
    fn drop(&mut self) {
        self.listener.close();
    }
}
