//! `fathom store reclaimable`.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use fathom_control::{Bytes, Client, PoolChange, ReclaimEntry};
use serde::Serialize;

use super::{PoolArguments, about, of_daemon, open_pool};
use crate::failure::{CommandResult, Failure};
use crate::output::progress::Progress;
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::text::clean;
use crate::output::{self};
use crate::process::catch_signals;

/// The interval between looks at how the search goes on.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Options of `fathom store reclaimable`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  fathom store reclaimable /srv/pool                       each volume and snapshot alone
  fathom store reclaimable /srv/pool web@monday web@today  these two together as well
  fathom store reclaimable /srv/pool web 'web@*'           a volume with all its snapshots")]
pub struct ReclaimableOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// What is to be deleted together: VOLUME, VOLUME@SNAPSHOT, or VOLUME@* for all its snapshots
    #[arg(value_name = "NAME")]
    together: Vec<String>,
}

#[derive(Serialize)]
struct Found<'a> {
    pool: &'a Path,
    #[serde(flatten)]
    entry: &'a ReclaimEntry,
}

pub(super) fn run(options: &ReclaimableOptions) -> CommandResult {
    let at = &options.at;
    let client = at.control.client();
    let interrupted =
        catch_signals(true).map_err(|error| Failure::new(format!("no signals: {error}")))?;
    let entry = match of_daemon(&client, &at.pool) {
        Some(pool) => {
            let together = options.together.clone();
            client.change_pool(&pool.path, PoolChange::FindReclaimable { together })?;
            await_end(options, &client, &pool.path, &interrupted)?
        }
        None => search(options, &interrupted)?,
    };
    if at.format.json {
        return output::json(&Found { pool: &at.pool, entry: &entry });
    }
    output::text_line(table(&entry, Style::stdout()).trim_end())
}

/// Searches in a pool that the daemon does not have.
fn search(
    options: &ReclaimableOptions,
    interrupted: &Arc<AtomicBool>,
) -> CommandResult<ReclaimEntry> {
    let path = &options.at.pool;
    let pool = open_pool(path)?;
    let mut progress: Option<Progress> = None;
    let found = ReclaimEntry::find(&pool, &options.together, |visited, total| {
        show_progress(options, &mut progress, (visited, total));
        !interrupted.load(Ordering::Acquire)
    });
    drop(progress);
    Ok(found.map_err(|error| about(path, error))?)
}

fn show_progress(
    options: &ReclaimableOptions,
    progress: &mut Option<Progress>,
    (visited, total): (u64, u64),
) {
    let label = || options.at.pool.display().to_string();
    progress
        .get_or_insert_with(|| Progress::new(label(), total).silent(options.at.format.json))
        .update(visited.min(total));
}

/// Waits until the daemon's search has ended, or the user has enough of it.
fn await_end(
    options: &ReclaimableOptions,
    client: &Client,
    path: &Path,
    interrupted: &Arc<AtomicBool>,
) -> CommandResult<ReclaimEntry> {
    let mut progress: Option<Progress> = None;
    loop {
        let pool = client.pools()?.pools.into_iter().find(|pool| pool.path == path);
        let Some(entry) = pool.and_then(|pool| pool.reclaim) else {
            let failure = Failure::new("the search has not ended: no disk uses the pool any more");
            return Err(failure.advise("repeat the command, which reads the pool itself"));
        };
        if !entry.running {
            drop(progress);
            return match &entry.error {
                Some(error) => Err(Failure::new(format!("nothing was found: {}", clean(error)))
                    .advise("repeat the command")),
                None => Ok(entry),
            };
        }
        if interrupted.load(Ordering::Acquire) {
            drop(progress);
            client.change_pool(path, PoolChange::EndReclaimable)?;
            return Err(Failure::new("interrupted: the search has been ended"));
        }
        if entry.total_pages > 0 {
            show_progress(options, &mut progress, (entry.visited_pages, entry.total_pages));
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

fn table(entry: &ReclaimEntry, style: Style) -> String {
    let mut table = Table::new(vec![
        TableColumn::text("VOLUME").flexible(),
        TableColumn::text("SNAPSHOT").flexible(),
        TableColumn::number("DELETING FREES"),
    ]);
    for deletion in &entry.deletions {
        let volume = deletion.volume.as_deref().map_or("(deleted)".into(), clean);
        let snapshot = deletion.snapshot.as_deref().map(clean).unwrap_or_default();
        table.row(vec![volume, snapshot, Bytes(deletion.bytes).to_string()]);
    }
    if entry.deletions.is_empty() {
        return "no volumes: make one with `fathom store new`\n".into();
    }
    let mut text = table.render(output::width(), style);
    if let Some(together) = &entry.together {
        let names: Vec<String> = together.names.iter().map(|name| clean(name)).collect();
        text += &format!("together, {} free {}\n", names.join(", "), Bytes(together.bytes));
    } else {
        text += "each without the others: what several have, none of them frees alone\n";
    }
    if entry.unread_pages > 0 {
        text += &format!(
            "{} pages of maps could not be read: check the pool with `fathom store check`\n",
            entry.unread_pages
        );
    }
    text
}
