//! Live events of the daemon's disks.
use std::time::Duration;

use fathom_control::{AnswerStream, Client};

use crate::failure::Outcome;

/// The events of disks as they come, or those of all disks: the bytes of a recording, for
/// `fathom_monitor::read::from_bytes` or `fathom_monitor::recording::Recording::open`.
///
/// With `pulse` the recording says so often up to which instant everything was told
/// (`Item::Moment`), so that what waits for an instant need not wait for the next event.
///
/// # Errors
/// When there is no daemon, or no such disk.
pub fn open_event_stream(
    client: &Client,
    disks: &[String],
    pulse: Option<Duration>,
) -> Outcome<AnswerStream> {
    // The disks may be on this machine, and go first.
    fathom_monitor::give_way();
    Ok(client.recording(disks, pulse)?)
}
