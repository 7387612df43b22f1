//! Writes lines to standard error. Who reads them, a pipe or a terminal, may stop: that must stop
//! nothing else.
//!
//! One thread writes. Who logs a line waits until it is written, but only for a moment, and not at
//! all while the thread is stuck or for the lines of requests. The lines that wait are bounded;
//! further ones are dropped and counted.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};

use super::Time;

/// The most bytes of lines that wait.
const HELD_MAX: usize = 1 << 20;
/// How long who logs a line waits until it is written.
const WAIT_MAX: Duration = Duration::from_millis(100);

/// The number of lines of this process that were dropped.
static DROPPED: AtomicU64 = AtomicU64::new(0);

/// The number of lines that were dropped because nobody read standard error.
pub(crate) fn dropped() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// Writes lines on a thread of its own, which begins with the first line.
pub(super) struct Writer {
    lines: Mutex<Lines>,
    /// Notified when a line arrives.
    arrived: Condvar,
    /// Notified when a line has been written.
    written: Condvar,
}

#[derive(Default)]
struct Lines {
    waiting: VecDeque<String>,
    /// The bytes in `waiting`, and in the line that is being written.
    held: usize,
    /// The numbers of lines that arrived, and that were written.
    arrived: u64,
    written: u64,
    /// Whether somebody has waited in vain.
    is_stuck: bool,
    /// The lines that were dropped since the last that was written.
    dropped: u64,
    /// The place to write to, until the thread has it.
    place: Option<Box<dyn Write + Send>>,
}

impl Writer {
    /// A writer to `place`.
    pub(super) fn new(place: Box<dyn Write + Send>) -> Arc<Self> {
        let lines = Lines { place: Some(place), ..Lines::default() };
        Arc::new(Self {
            lines: Mutex::new(lines),
            arrived: Condvar::new(),
            written: Condvar::new(),
        })
    }

    /// Writes a line. With `waits`, returns when it is written, or after a moment.
    pub(super) fn write(self: &Arc<Self>, line: String, waits: bool) {
        let mut lines = self.lines.lock();
        if lines.held + line.len() > HELD_MAX {
            lines.dropped += 1;
            DROPPED.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if let Some(place) = lines.place.take() {
            let ours = Arc::clone(self);
            let work = move || ours.run(place);
            if thread::Builder::new().name("log".into()).spawn(work).is_err() {
                // The process has no threads left, and no log.
                return;
            }
        }
        lines.held += line.len();
        lines.waiting.push_back(line);
        lines.arrived += 1;
        let number = lines.arrived;
        self.arrived.notify_one();
        if !waits || lines.is_stuck {
            return;
        }
        self.written.wait_while_for(&mut lines, |lines| lines.written < number, WAIT_MAX);
        lines.is_stuck |= lines.written < number;
    }

    /// Waits until all lines are written, for at most `limit`.
    pub(super) fn flush(&self, limit: Duration) {
        let is_behind = |lines: &mut Lines| lines.written < lines.arrived;
        self.written.wait_while_for(&mut self.lines.lock(), is_behind, limit);
    }

    /// The thread.
    fn run(&self, mut place: Box<dyn Write + Send>) {
        let mut lines = self.lines.lock();
        loop {
            let Some(line) = lines.waiting.pop_front() else {
                lines.is_stuck = false;
                self.arrived.wait(&mut lines);
                continue;
            };
            let dropped = std::mem::take(&mut lines.dropped);
            drop(lines);
            // An error cannot be reported if standard error does not work.
            let _ = place.write_all(line.as_bytes());
            if dropped > 0 {
                let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let notice = format!(
                    "{} warning {dropped} lines were dropped: nobody read standard error\n",
                    Time(since_1970)
                );
                let _ = place.write_all(notice.as_bytes());
            }
            lines = self.lines.lock();
            lines.held -= line.len();
            lines.written += 1;
            self.written.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_place_that_nobody_reads_stops_nothing_and_what_is_dropped_is_counted() {
        let (mut reader, place) = UnixStream::pair().unwrap();
        let writer = Writer::new(Box::new(place));
        let line = "x".repeat(1023) + "\n";
        let before = dropped();
        let begun = Instant::now();
        for _ in 0..4096 {
            writer.write(line.clone(), true);
        }
        // Only the first line that finds the pipe full waits.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
        writer.flush(Duration::from_millis(10));
        assert!(dropped() - before > 2048, "the lines that wait are bounded");
        let (sender, texts) = std::sync::mpsc::channel();
        thread::spawn(move || {
            let mut text = vec![0; 1 << 20];
            while let Ok(length @ 1..) = reader.read(&mut text) {
                let _ = sender.send(String::from_utf8_lossy(&text[..length]).into_owned());
            }
        });
        writer.flush(Duration::from_secs(20));
        writer.write("the last\n".into(), true);
        let lines = writer.lines.lock();
        assert_eq!((lines.written, lines.held, lines.is_stuck), (lines.arrived, 0, false));
        drop(lines);
        let mut text = String::new();
        while !text.contains("the last") {
            text += &texts.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        assert!(text.contains("lines were dropped: nobody read standard error"));
    }
}
