//! Live events of the daemon's disks.
use std::time::Duration;

use fathom_control::{AnswerStream, Client, ClientError, ErrorCode};
use fathom_insight::STREAMS;

use crate::failure::CommandResult;

/// Opens the stream of the live events of some disks, or of all disks if `disks` is empty, and of
/// some streams. Streams that the daemon does not know are no error: its recording does not have
/// them. The stream has the bytes of a recording, for `fathom_monitor::read::from_bytes` or
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
    streams: &[&str],
    pulse: Option<Duration>,
) -> CommandResult<AnswerStream> {
    // The disks may be served on this machine, and have priority.
    fathom_monitor::give_way();
    // A stream of a script's own has the rows of `IOstream`.
    let name_of = |name: &&str| {
        let names = STREAMS.iter().map(|stream| stream.name);
        names.into_iter().find(|known| known.eq_ignore_ascii_case(name)).unwrap_or(IO_STREAM)
    };
    let mut names: Vec<&str> = streams.iter().map(name_of).collect();
    names.sort_unstable();
    names.dedup();
    // A daemon that does not know the parameter has `IOstream` alone.
    let has_io = names.contains(&IO_STREAM);
    if names == [IO_STREAM] {
        names.clear();
    }
    match client.recording(disks, &names, pulse) {
        Err(ClientError::Refused(body)) if body.code == ErrorCode::Invalid && has_io => {
            Ok(client.recording(disks, &[], pulse)?)
        }
        answer => Ok(answer?),
    }
}

/// The stream that every version has.
const IO_STREAM: &str = STREAMS[0].name;
