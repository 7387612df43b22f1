//! `fathom store check`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use fathom_control::{Bytes, Client, PoolChange, PoolEntry, ScrubEntry, ScrubPhase, count};
use fathom_store::{CheckReport, check};
use serde::Serialize;

use super::{about, of_daemon, open_device};
use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};
use crate::output::progress::Progress;
use crate::output::sheet::Sheet;
use crate::output::style::Style;
use crate::output::text::clean;
use crate::output::{self, Format};
use crate::process::catch_signals;

/// The interval at which the command looks how far the daemon has come.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);

/// Options of `fathom store check`.
#[derive(Debug, Args)]
#[command(after_help = "\
A pool that a disk of the daemon uses is checked by the daemon, while it is used. Ctrl-C ends that.

Examples:
  fathom store check /var/lib/fathom/pool
  fathom store check /var/lib/fathom/pool --json | jq .problems")]
pub struct PoolCheckOptions {
    /// The pool: a file or block device
    #[arg(value_name = "POOL")]
    pool: PathBuf,
    /// Only the maps, not the content of each block
    #[arg(long)]
    maps_only: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

#[derive(Serialize)]
struct Checked<'a> {
    pool: &'a Path,
    volumes: u64,
    snapshots: u64,
    map_pages: u64,
    blocks: u64,
    verified_blocks: u64,
    problem_count: u64,
    problems: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unused_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    batches_after_checkpoint: Option<u64>,
    /// Of a pool in use: pages that are written anew.
    #[serde(skip_serializing_if = "Option::is_none")]
    mended_pages: Option<u64>,
}

pub(super) fn run(options: &PoolCheckOptions) -> CommandResult {
    let client = options.control.client();
    match of_daemon(&client, &options.pool) {
        Some(entry) => check_in_use(options, &client, &entry),
        None => check_unused(options),
    }
}

fn check_unused(options: &PoolCheckOptions) -> CommandResult {
    let path = &options.pool;
    let device = open_device(path, true)?;
    let mut progress =
        Progress::new(path.display().to_string(), device.capacity()).silent(options.format.json);
    let report = check(&device, !options.maps_only, |blocks| progress.update(blocks * 4096))
        .map_err(|error| about(path, error))?;
    drop(progress);
    let CheckReport { unused_places, recovered, problem_count, ref problems, .. } = report;
    let checked = Checked {
        pool: path,
        volumes: report.volumes,
        snapshots: report.snapshots,
        map_pages: report.map_pages,
        blocks: report.blocks,
        verified_blocks: report.verified_blocks,
        problem_count,
        problems: problems.clone(),
        unused_bytes: Some(unused_places * 4096),
        batches_after_checkpoint: Some(recovered.batches),
        mended_pages: None,
    };
    show(&checked, options.format.json)
}

fn check_in_use(options: &PoolCheckOptions, client: &Client, before: &PoolEntry) -> CommandResult {
    let path = &before.path;
    let is_running = |scrub: &ScrubEntry| scrub.phase == ScrubPhase::Running;
    let is_joined = before.scrub.as_ref().is_some_and(is_running);
    let interrupted =
        catch_signals(true).map_err(|error| Failure::new(format!("no signals: {error}")))?;
    if is_joined && !options.format.json {
        note!("a verification of the pool is in progress: this is how it goes on");
    } else if !is_joined {
        client.change_pool(path, PoolChange::Check { maps_only: options.maps_only })?;
    }
    let scrub = await_end(options, client, path, (is_joined, &interrupted))?;
    let ended = match scrub.phase {
        ScrubPhase::Running | ScrubPhase::Complete | ScrubPhase::Unknown => None,
        ScrubPhase::Ended => Some(("somebody has ended the check", "repeat the command")),
        ScrubPhase::Interrupted => Some((
            "no disk uses the pool any more",
            "repeat the command, which checks the pool itself",
        )),
        ScrubPhase::Failed => {
            Some(("the pool or its device fails", "see `fathom doctor` and the log of the daemon"))
        }
    };
    let checked = Checked {
        pool: path,
        volumes: scrub.volumes,
        snapshots: scrub.snapshots,
        map_pages: scrub.map_pages,
        blocks: scrub.blocks,
        verified_blocks: scrub.verified_blocks,
        problem_count: scrub.damage_count(),
        problems: scrub
            .damages
            .iter()
            .map(|part| match &part.disk {
                Some(disk) => format!("disk {disk}, {}", part.text()),
                None => part.text(),
            })
            .collect(),
        unused_bytes: None,
        batches_after_checkpoint: None,
        mended_pages: Some(scrub.mended_pages),
    };
    let shown = show(&checked, options.format.json);
    match ended {
        Some((what, remedy)) => {
            Err(Failure::new(format!("the check is not complete: {what}")).advise(remedy))
        }
        None => shown,
    }
}

/// Waits until the check has ended, or the user has enough of it.
fn await_end(
    options: &PoolCheckOptions,
    client: &Client,
    path: &Path,
    (is_joined, interrupted): (bool, &Arc<AtomicBool>),
) -> CommandResult<ScrubEntry> {
    let mut progress: Option<Progress> = None;
    loop {
        let scrub = client.pools()?.pools.into_iter().find(|pool| pool.path == path);
        let Some(scrub) = scrub.and_then(|pool| pool.scrub) else {
            let failure = Failure::new("the check has not ended: no disk uses the pool any more");
            return Err(failure.advise("repeat the command, which checks the pool itself"));
        };
        if scrub.phase != ScrubPhase::Running {
            return Ok(scrub);
        }
        if interrupted.load(Ordering::Acquire) {
            drop(progress);
            if is_joined {
                return Err(Failure::new("interrupted: the verification of the pool goes on"));
            }
            client.change_pool(path, PoolChange::EndCheck)?;
            let failure = Failure::new("interrupted: the check has been ended");
            return Err(failure.advise("repeat the command to begin anew"));
        }
        let (done, total) = scrub.progress();
        let label = || path.display().to_string();
        progress
            .get_or_insert_with(|| Progress::new(label(), total).silent(options.format.json))
            .update(done);
        thread::sleep(LOOK_INTERVAL);
    }
}

fn show(checked: &Checked<'_>, is_json: bool) -> CommandResult {
    if is_json {
        output::json(checked)?;
    } else {
        output::text_line(&sheet(checked).render(output::width(), Style::stdout()))?;
        for problem in &checked.problems {
            output::text_line(&format!("problem: {}", clean(problem)))?;
        }
    }
    if checked.problem_count == 0 {
        return Ok(());
    }
    let failure = Failure::new(format!("the pool has {}", count(checked.problem_count, "problem")));
    Err(failure.advise("restore what is named from a backup, or from an older snapshot"))
}

fn sheet(checked: &Checked<'_>) -> Sheet {
    let mut sheet = Sheet::default();
    sheet.fact("volumes", checked.volumes.to_string());
    sheet.fact("snapshots", checked.snapshots.to_string());
    sheet.fact("pages of maps", checked.map_pages.to_string());
    sheet.fact("blocks", format!("{} ({})", checked.blocks, Bytes(checked.blocks * 4096)));
    sheet.fact("verified", checked.verified_blocks.to_string());
    sheet.fact_if_any(
        "since the last checkpoint",
        match checked.batches_after_checkpoint.unwrap_or(0) {
            0 => String::new(),
            batches => count(batches, "batch"),
        },
    );
    if let Some(unused) = checked.unused_bytes.filter(|bytes| *bytes > 0) {
        sheet.fact("unused", format!("{}, until the next walk", Bytes(unused)));
    }
    if let Some(mended) = checked.mended_pages.filter(|pages| *pages > 0) {
        sheet.fact("written anew", count(mended, "damaged page"));
    }
    sheet
}
