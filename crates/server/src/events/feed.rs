//! Live events for a thread of the daemon itself.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use fathom_control::ErrorBody;
use fathom_monitor::recording::moment_block;

use super::listener::Listener;
use super::{LISTENERS_MAX, ListenRequest, enrol};
use crate::daemon::Daemon;

/// The events of all disks as they come: the bytes of a recording behind its header. A read waits
/// until there is something; it gives nothing at the end only.
pub(crate) struct EventFeed {
    listener: Arc<Listener>,
    header: Bytes,
    rest: Bytes,
}

/// Has the reader of a feed look up.
#[derive(Clone)]
pub(crate) struct Nudge(Arc<Listener>);

/// The events of all disks from now on. A moment is told each `pulse`, or each `idle_pulse` while
/// nothing happens.
///
/// # Errors
/// When the daemon ends, or has no thread for it.
pub(crate) fn follow(
    daemon: &Arc<Daemon>,
    pulse: Duration,
    idle_pulse: Duration,
) -> Result<EventFeed, ErrorBody> {
    let request = ListenRequest {
        pulse: Some(pulse),
        idle_pulse: Some(idle_pulse),
        ..ListenRequest::default()
    };
    // The daemon's own thread always has a seat.
    let (listener, _) = enrol(daemon, request, LISTENERS_MAX + 1)?;
    listener.wait_until_begun(Duration::from_secs(1));
    let header = listener.wait_next().unwrap_or_default();
    Ok(EventFeed { listener, header, rest: Bytes::new() })
}

impl EventFeed {
    /// The header of the recording.
    pub fn header(&self) -> Bytes {
        self.header.clone()
    }

    /// For those who want the reader's attention.
    pub fn nudge(&self) -> Nudge {
        Nudge(Arc::clone(&self.listener))
    }
}

impl Nudge {
    /// Gives the reader a moment that is long over: it changes nothing, but it comes.
    pub fn give(&self) {
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
        self.listener.leave();
    }
}
