//! The live view's loop: samples, keys, and the terminal, which is always given back.
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use fathom_control::{Client, Statistics};
use ratatui::crossterm::event::{self, Event, KeyEventKind};

use super::{
    TopOptions,
    app::{App, Page},
    screen,
};
use crate::{
    failure::{Failure, Outcome},
    output::style,
};

/// How long a signal may go unnoticed.
const ATTENTION: Duration = Duration::from_millis(200);

static SIGNALLED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_: libc::c_int) {
    SIGNALLED.store(true, Ordering::Relaxed);
}

/// Shows the view until the user leaves it.
pub fn run(options: &TopOptions, client: &Client, first: Statistics) -> Outcome {
    let handler: extern "C" fn(libc::c_int) = on_signal;
    // A hang-up keeps its usual effect: the terminal is gone, there is nothing to give back.
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the handler does nothing but store to an atomic.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    let interval = Duration::from_nanos(options.interval.0);
    let mut app = App::new(first, interval, options.sort, options.filter.clone());
    app.socket = client.socket().display().to_string();
    if let Some(grouping) = options.by {
        app.show_usage(grouping);
    }
    // Also gives the terminal back should this program panic.
    let mut terminal = ratatui::try_init()
        .map_err(|error| Failure::new(format!("cannot use the terminal: {error}")))?;
    let outcome = show(&mut terminal, &mut app, client, options);
    ratatui::restore();
    outcome.map_err(|error| Failure::new(format!("the terminal: {error}")))
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    app: &mut App,
    client: &Client,
    options: &TopOptions,
) -> std::io::Result<()> {
    let colours = style::allowed();
    let sample_usage = |app: &mut App| {
        let usage = client.usage(options.disk.as_deref(), options.vm.as_deref());
        match usage.and_then(|usage| Ok((usage, client.guests()?))) {
            Ok((usage, guests)) => app.sample_usage(usage, guests.guests),
            Err(error) => app.trouble = Some(error.to_string()),
        }
    };
    if app.page == Page::Usage {
        sample_usage(app);
    }
    let mut sampled = Instant::now();
    let mut samples = 0;
    let mut changed = true;
    while !app.done && !SIGNALLED.load(Ordering::Relaxed) {
        if changed {
            terminal.draw(|frame| screen::draw(frame, app, colours))?;
        }
        let left = app.interval.saturating_sub(sampled.elapsed());
        changed = false;
        if !wait_for_key(left.min(ATTENTION))? {
            return Ok(());
        }
        if event::poll(Duration::ZERO)? {
            changed = true;
            if let Event::Key(key) = event::read()? {
                if key.kind != KeyEventKind::Release {
                    app.key(key);
                    if app.page != Page::Usage {
                        app.usage.rest();
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
                    samples += 1;
                    app.done |= options.count.is_some_and(|count| samples >= count);
                }
                // The daemon may come back: the view stays and says what is the matter.
                Err(error) => app.trouble = Some(error.to_string()),
            }
            // Accounts take more to fetch than counters: only while somebody looks.
            if app.page == Page::Usage {
                sample_usage(app);
            }
        }
    }
    Ok(())
}

/// Sleeps until a key is pressed or `limit` has passed. Returns false when the terminal is gone,
/// which the event library would take for a key that never comes.
fn wait_for_key(limit: Duration) -> std::io::Result<bool> {
    let mut input = libc::pollfd { fd: libc::STDIN_FILENO, events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, which lives through the call.
    if unsafe { libc::poll(&raw mut input, 1, limit.as_millis() as libc::c_int) } < 0 {
        let error = std::io::Error::last_os_error();
        return if error.kind() == std::io::ErrorKind::Interrupted { Ok(true) } else { Err(error) };
    }
    Ok(input.revents & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) == 0)
}
