//! `fathom disk move`: a disk moves to another image or volume while it is used.

use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{
    Bytes, Client, ClientError, DiskStatus, ErrorCode, MovePhase, MoveRequest, MoveStatus,
};

use super::{MoveDiskOptions, absolute};
use crate::failure::{CommandResult, Failure};
use crate::output::progress::Progress;
use crate::output::{self, rate};

/// The interval at which a waiting command looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// How long a waiting command does without an answer about the move.
const ABSENCE_MAX: Duration = Duration::from_secs(60);

pub(super) fn run(options: &MoveDiskOptions) -> CommandResult {
    let client = options.control.client();
    if options.cancel {
        return show(&client.cancel_move(&options.name)?, options);
    }
    let begun = if options.to.is_some() || options.store.is_some() {
        let request = MoveRequest {
            image: options.to.as_deref().map(absolute),
            key: options.key.clone(),
            store: options.store.as_deref().map(absolute),
            volume: options.volume.clone(),
            direct: options.direct.then_some(true).or(options.buffered.then_some(false)),
            speed: options.speed,
            urgent: options.urgent,
            overwrite: options.overwrite,
        };
        let begun = match client.move_disk(&options.name, &request) {
            // It may have begun all the same.
            Err(ClientError::Broken { .. } | ClientError::Silent { .. }) if options.wait => None,
            begun => Some(begun?),
        };
        match begun {
            Some(begun) if !options.wait => return show(&begun, options),
            begun => begun,
        }
    } else {
        let known = known(&client, &options.name)?;
        if !options.wait {
            return show(&known, options);
        }
        Some(known)
    };
    let status = await_end(&client, options, begun)?;
    if status.phase != MovePhase::Moved {
        let message = format!("{} was not moved: {}", status.disk, status.message);
        return Err(Failure::new(message).advise(status.remedy));
    }
    show(&status, options)
}

/// The move of a disk.
fn known(client: &Client, name: &str) -> CommandResult<MoveStatus> {
    client.disk(name)?.moving.ok_or_else(|| {
        Failure::new(format!("{name} has not moved since the daemon started"))
            .advise(format!("move it with `fathom disk move {name} --to PATH`"))
    })
}

/// Waits until the move has ended, of which `known` is known. A daemon that starts again takes it
/// up: while none answers, the command waits for a limited time.
fn await_end(
    client: &Client,
    options: &MoveDiskOptions,
    mut known: Option<MoveStatus>,
) -> CommandResult<MoveStatus> {
    let mut progress: Option<Progress> = None;
    let mut missed: Option<Instant> = None;
    loop {
        if let Some(status) = &known {
            if status.phase.has_ended() {
                return Ok(status.clone());
            }
            let label = || format!("{} to {}", status.disk, status.to);
            progress
                .get_or_insert_with(|| {
                    Progress::new(label(), status.total_bytes).silent(options.format.json)
                })
                .update(status.total_bytes.saturating_sub(status.left_bytes));
        }
        thread::sleep(LOOK_INTERVAL);
        let failure = match client.disk(&options.name) {
            Ok(disk) => {
                let before = || moved_before(&disk, known.as_ref()?);
                if let Some(now) = disk.moving.clone().or_else(before) {
                    (known, missed) = (Some(now), None);
                    continue;
                }
                Failure::new(format!("the daemon does not move {}", disk.name))
                    .advise(format!("see `fathom disk info {}`, then move it again", disk.name))
            }
            Err(error) if is_away(&error) => Failure::from(error),
            Err(error) => return Err(error.into()),
        };
        if missed.get_or_insert_with(Instant::now).elapsed() > ABSENCE_MAX {
            return Err(failure);
        }
    }
}

/// Whether an error may be that of a daemon that ends or starts again: it does not answer, or does
/// not serve the disk yet.
fn is_away(error: &ClientError) -> bool {
    match error {
        ClientError::Unreachable { .. }
        | ClientError::Broken { .. }
        | ClientError::Silent { .. } => true,
        ClientError::Refused(body) => {
            matches!(body.code, ErrorCode::NotFound | ErrorCode::ShuttingDown)
        }
        ClientError::Unreadable(_) => false,
    }
}

/// The status of a move that had ended before the daemon started again: the disk is at the target.
fn moved_before(disk: &DiskStatus, known: &MoveStatus) -> Option<MoveStatus> {
    let moved = || MoveStatus { phase: MovePhase::Moved, left_bytes: 0, ..known.clone() };
    (disk.backend.place() == Some(known.to.clone())).then(moved)
}

fn show(status: &MoveStatus, options: &MoveDiskOptions) -> CommandResult {
    if options.format.json {
        return output::json(status);
    }
    output::text_line(&format!("{}: {}", status.disk, text(status)))
}

/// A move in a line or two.
pub(super) fn text(status: &MoveStatus) -> String {
    let seconds = status.took_ns as f64 / 1e9;
    let mut text = match status.phase {
        MovePhase::Copying | MovePhase::ChangingOver => {
            let (left, total) = (Bytes(status.left_bytes), Bytes(status.total_bytes));
            let speed = rate(status.copied_bytes as f64 / seconds.max(0.001));
            let words = status.phase.words();
            format!("{words} to {}, {left} of {total} are left, {speed}", status.to)
        }
        MovePhase::Moved => {
            let (copied, pause) = (Bytes(status.copied_bytes), status.pause_ns as f64 / 1e6);
            format!(
                "moved to {}: {copied} in {seconds:.1} s, and no requests for {pause:.0} ms",
                status.to
            )
        }
        MovePhase::Failed | MovePhase::Cancelled => {
            format!("the move to {} was ended ({})", status.to, status.phase.words())
        }
    };
    if status.brake_ns > 0 {
        let brake_ms = status.brake_ns as f64 / 1e6;
        text += &format!(", each write waits {brake_ms:.0} ms so that the copy keeps up");
    }
    if !status.message.is_empty() {
        text += &format!("\n{}", status.message);
        if !status.remedy.is_empty() {
            text += &format!("; {}", status.remedy);
        }
    }
    text
}
