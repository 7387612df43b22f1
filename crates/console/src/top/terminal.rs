//! The loop of the live view: samples, keys, and the terminal, which is always restored.
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use fathom_control::{Client, DirtyRequest, Statistics};
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use super::{
    TopOptions,
    app::{App, ViewPage},
    screen::{self, DIRTY_FILES},
};
use crate::{
    failure::{CommandResult, Failure},
    output::style,
    process::catch_signals,
};

/// The most time until a signal is noticed.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Shows the live view until the user quits.
pub fn run(options: &TopOptions, client: &Client, first: Statistics) -> CommandResult {
    // SIGHUP keeps its default action: the terminal no longer exists, so there is nothing to
    // restore.
    let signalled = catch_signals(false)
        .map_err(|error| Failure::new(format!("cannot watch for signals: {error}")))?;
    let interval = Duration::from_nanos(options.interval.0);
    let mut app = App::new(first, interval, options.sort, options.filter.clone());
    app.socket = client.socket().display().to_string();
    if let Some(grouping) = options.by {
        app.show_usage(grouping);
    }
    // `try_init` also restores the terminal if this program panics.
    let mut terminal = ratatui::try_init()
        .map_err(|error| Failure::new(format!("cannot use the terminal: {error}")))?;
    let outcome = show(&mut terminal, &mut app, client, options, &signalled);
    ratatui::restore();
    outcome.map_err(|error| Failure::new(format!("the terminal: {error}")))
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    app: &mut App,
    client: &Client,
    options: &TopOptions,
    signalled: &AtomicBool,
) -> std::io::Result<()> {
    let colours = style::allowed();
    let sample_usage = |app: &mut App| {
        let usage = client.usage(options.disk.as_deref(), options.vm.as_deref());
        match usage.and_then(|usage| Ok((usage, client.guests()?))) {
            Ok((usage, guests)) => app.sample_usage(usage, guests.guests),
            Err(error) => app.error = Some(error.to_string()),
        }
    };
    // Dirty pages are counted only while they are shown. A daemon without guests has no report.
    let sample_dirty = |app: &mut App| {
        let request = |files| DirtyRequest { files, ..DirtyRequest::default() };
        let disk = match &app.page {
            ViewPage::Usage => return,
            ViewPage::Disks => String::new(),
            ViewPage::Disk(name) => name.clone(),
        };
        let of_disk = Some(disk.as_str()).filter(|disk| !disk.is_empty());
        let counted = of_disk.map(|disk| client.dirty(Some(disk), request(Some(DIRTY_FILES))));
        let guests = counted.into_iter().flatten().flat_map(|report| report.guests);
        let files = guests.filter_map(|guest| guest.files).flat_map(|files| files.files).collect();
        if let Ok(report) = client.dirty(None, request(None)) {
            app.sample_dirty(&report, (disk, files));
        }
        // An older daemon does not know it.
        if let Ok(report) = client.guest_pagers() {
            app.sample_away(&report);
        }
    };
    if app.page == ViewPage::Usage {
        sample_usage(app);
    }
    let mut sampled = Instant::now();
    let mut samples = 0;
    let mut changed = true;
    while !app.quit && !signalled.load(Ordering::Relaxed) {
        if changed {
            terminal.draw(|frame| screen::draw(frame, app, colours))?;
        }
        let left = app.interval.saturating_sub(sampled.elapsed());
        changed = false;
        if !wait_for_key(left.min(CHECK_INTERVAL))? {
            return Ok(());
        }
        if event::poll(Duration::ZERO)? {
            changed = true;
            if let Event::Key(key) = event::read()? {
                if key.kind != KeyEventKind::Release {
                    app.key(key);
                    if app.page != ViewPage::Usage {
                        app.usage.reset();
                    } else if !app.usage.has_begun() {
                        sample_usage(app);
                    }
                }
            }
        }
        if sampled.elapsed() >= app.interval {
            sampled = Instant::now();
            changed = true;
            match client.statistics().map(|statistics| options.narrow(statistics)) {
                Ok(statistics) => {
                    app.sample(statistics);
                    sample_dirty(app);
                    samples += 1;
                    app.quit |= options.count.is_some_and(|count| samples >= count);
                }
                // The daemon may be restarted: the view stays and shows the error.
                Err(error) => app.error = Some(error.to_string()),
            }
            // Accounts are more expensive to fetch than counters, so they are fetched only while
            // shown.
            if app.page == ViewPage::Usage {
                sample_usage(app);
            }
        }
    }
    Ok(())
}

/// Sleeps until a key is pressed or `limit` has passed. Returns false if the terminal no longer
/// exists. The event library would wait for a key forever.
fn wait_for_key(limit: Duration) -> std::io::Result<bool> {
    let input = std::io::stdin();
    let mut polls = [PollFd::new(&input, PollFlags::IN)];
    let limit = Timespec::try_from(limit).unwrap_or_default();
    match poll(&mut polls, Some(&limit)) {
        Ok(_) => {
            let closed = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
            Ok(!polls[0].revents().intersects(closed))
        }
        Err(Errno::INTR) => Ok(true),
        Err(error) => Err(error.into()),
    }
}
