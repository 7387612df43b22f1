//! Live events of the daemon's disks.
use std::time::Duration;

use fathom_control::{AnswerStream, Client};

use crate::failure::Outcome;

/// Opens the stream of the live events of some disks, or of all disks if `disks` is empty. The
/// stream has the bytes of a recording, for `fathom_monitor::read::from_bytes` or
/// `fathom_monitor::recording::Recording::open`.
///
/// With `pulse` the recording contains an `Item::Moment` at this interval: the instant up to which
/// all events have been sent. A reader that waits for an instant then need not wait for the next
/// event.
///
/// # Errors
/// If the daemon cannot be reached, or a disk does not exist.
pub fn open_event_stream(
    client: &Client,
    disks: &[String],
    pulse: Option<Duration>,
) -> Outcome<AnswerStream> {
    // The disks may be served on this machine, and have priority.
    fathom_monitor::give_way();
    Ok(client.recording(disks, pulse)?)
}
