//! The lives of daemons on this host: until when one could have changed an image. While a log has
//! changes, a thread writes the time into a file beside the control socket, once a second. While no
//! log has any, an image may be changed by anybody, and the thread sleeps. The process that holds
//! keepsakes has the file, too, and notes when the daemon has ended.
//!
//! The first line of the file names the host's start, because what the file says is worth nothing
//! after the next one. Each other line is a life, the last one that of the daemon that runs or was
//! the last one: when it began, until when it was seen, and `alive` or `ended`. A log that was
//! refused must be refused by later daemons, too, so that earlier lives stay.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use fathom_layers::Wal;
use fathom_layers::wal::{HomeTimes, Life};
use fathom_persistence::Identity;
use parking_lot::{Condvar, Mutex};

use crate::features::keep;

/// How often the time is written while a log has changes.
const INTERVAL: Duration = Duration::from_secs(1);
/// The length of the line of a life, in bytes.
const LINE_LENGTH: usize = 48;
/// The most lives in the file; of more, the newest.
const LIVES_MAX: usize = 1000;
/// The longest file that is read, in bytes.
const FILE_LENGTH_MAX: u64 = 128 + (LIVES_MAX * LINE_LENGTH) as u64;
/// The type of the file system NFS, whose server has a clock of its own (`statfs.f_type`).
const NFS: i64 = 0x6969;
/// As `NFS`, for FUSE, SMB (both), 9P and Ceph.
const REMOTE: [i64; 6] = [NFS, 0x6573_5546, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x00c3_6400];

/// What is known of the daemons before this one.
#[derive(Default)]
pub(crate) struct Lives {
    before: OnceLock<Vec<Life>>,
    /// When this daemon began, in nanoseconds since 1970.
    begin_ns: OnceLock<u64>,
    /// The logs that this daemon has opened: it may have changed their images itself.
    opened: Mutex<Vec<Identity>>,
    /// What the thread waits for.
    pulse: Arc<Pulse>,
    /// The file, and the identity of the host's start.
    place: OnceLock<(PathBuf, String)>,
    /// Set once there has been a log, and so a thread that notes the life of this daemon.
    noting: OnceLock<()>,
}

/// Finds out whether a log has changes; `None` once it is closed.
type Observer = Box<dyn Fn() -> Option<bool> + Send + Sync>;

/// When the life of this daemon is noted.
#[derive(Default)]
struct Pulse {
    state: Mutex<PulseState>,
    changed: Condvar,
}

#[derive(Default)]
struct PulseState {
    logs: Vec<Observer>,
    /// Whether a log may have changes since the logs were asked.
    is_woken: bool,
    has_ended: bool,
}

impl Pulse {
    /// A log is opened.
    fn add(&self, log: Observer) {
        self.state.lock().logs.push(log);
        self.wake();
    }

    /// A log has changes now.
    fn wake(&self) {
        self.state.lock().is_woken = true;
        self.changed.notify_all();
    }

    fn end(&self) {
        self.state.lock().has_ended = true;
        self.changed.notify_all();
    }

    /// Waits for the next time to be noted. Returns false at the end.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| !state.has_ended, INTERVAL);
        state.is_woken = false;
        let mut has_changes = false;
        state.logs.retain(|log| {
            let found = log();
            has_changes |= found == Some(true);
            found.is_some()
        });
        if !has_changes {
            self.changed.wait_while(&mut state, |state| !state.is_woken && !state.has_ended);
        }
        !state.has_ended
    }
}

impl Drop for Lives {
    fn drop(&mut self) {
        self.pulse.end();
    }
}

impl Lives {
    /// Reads the lives of earlier daemons. `control` is the control socket.
    pub(crate) fn begin(&self, control: &Path) {
        let path = control.with_extension("life");
        let Some(boot) = boot_identity() else { return };
        let _ =
            self.before.set(read(&path).and_then(|text| parse(&text, &boot)).unwrap_or_default());
        let _ = self.begin_ns.set(now_ns());
        let _ = self.place.set((path, boot));
    }

    /// This daemon has opened a log. With the first one, it begins to note its own life.
    pub(crate) fn opened(&self, log: &Wal) {
        self.opened.lock().push(log.identity());
        self.pulse.add(Box::new(log.observer()));
        let pulse = Arc::clone(&self.pulse);
        log.on_changes(move || pulse.wake());
        self.noting.get_or_init(|| self.note());
    }

    /// Starts the thread that notes the life of this daemon.
    fn note(&self) {
        let (Some((path, boot)), Some(begin_ns)) = (self.place.get(), self.begin_ns.get()) else {
            return;
        };
        let begin_ns = *begin_ns;
        let before = self.before.get().map_or(&[][..], Vec::as_slice);
        let known = &before[before.len().saturating_sub(LIVES_MAX - 1)..];
        let mut text = format!("{boot}\n");
        for Life { time_ns, has_ended } in known {
            text += &line(time_ns.start, time_ns.end, *has_ended);
        }
        let offset = text.len() as u64;
        text += &line(begin_ns, now_ns().max(begin_ns), false);
        let pulse = Arc::clone(&self.pulse);
        let spawned = replace(path, &text).and_then(|file| {
            keep::note_end(&file);
            let note = move || {
                let mut last_ns = begin_ns;
                loop {
                    // A clock may be set back.
                    last_ns = now_ns().max(last_ns);
                    let _ = file.write_all_at(line(begin_ns, last_ns, false).as_bytes(), offset);
                    if !pulse.wait() {
                        break;
                    }
                }
            };
            std::thread::Builder::new().name("life".into()).spawn(note).map(drop)
        });
        if let Err(error) = spawned {
            tracing::warn!(path = %path.display(), %error, "the life of the daemon is not noted");
        }
    }

    /// When `image` was changed, and when the daemons before lived; `None` if that is not known, or
    /// if this daemon has opened its `log` already.
    pub(crate) fn times(&self, image: &Path, log: Option<Identity>) -> Option<HomeTimes> {
        let opened = self.opened.lock();
        if log.is_none_or(|log| opened.contains(&log)) {
            return None;
        }
        let lives = self.before.get()?.clone();
        let file = File::open(image).ok()?;
        let metadata = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let status = rustix::fs::fstatfs(&file).ok()?;
        let changed_ns =
            u64::try_from(metadata.mtime()).ok()? * 1_000_000_000 + metadata.mtime_nsec() as u64;
        let is_known = !REMOTE.contains(&status.f_type) && changed_ns <= now_ns();
        is_known.then_some(HomeTimes { changed_ns, lives, boot_ns: boot_ns()? })
    }
}

fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_nanos() as u64
}

/// When the host was started, in nanoseconds since 1970, by its clock now.
fn boot_ns() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/stat").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("btime "))?;
    Some(line.trim().parse::<u64>().ok()? * 1_000_000_000)
}

/// The kernel's identity of this start of the host.
pub(crate) fn boot_identity() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    text.map(|text| text.trim().to_owned()).ok().filter(|text| !text.is_empty())
}

/// The content of the file; `None` if there is none that can be read.
fn read(path: &Path) -> Option<String> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let mut text = String::new();
    options.open(path).ok()?.take(FILE_LENGTH_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Puts a file with `text` in the place of the one at `path`, at once, so that no life is lost by a
/// kill.
fn replace(path: &Path, text: &str) -> io::Result<File> {
    let new = path.with_extension("life-new");
    // No link of another user is followed.
    let _ = std::fs::remove_file(&new);
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all_at(text.as_bytes(), 0)?;
    std::fs::rename(&new, path)?;
    Ok(file)
}

fn line(begin_ns: u64, end_ns: u64, has_ended: bool) -> String {
    format!("{begin_ns:020} {end_ns:020} {}\n", if has_ended { "ended" } else { "alive" })
}

fn parse(text: &str, boot: &str) -> Option<Vec<Life>> {
    let mut lines = text.lines();
    if lines.next()? != boot {
        return None;
    }
    Some(lines.map_while(parse_line).take(LIVES_MAX).collect())
}

fn parse_line(line: &str) -> Option<Life> {
    let mut parts = line.split_whitespace();
    let (begin, end): (u64, u64) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    // A tolerance is added to it.
    let is_sane = begin <= end && end < u64::MAX / 2;
    is_sane.then_some(Life { time_ns: begin..end, has_ended: parts.next()? == "ended" })
}

/// The daemon of a file's last life has ended just now.
pub(crate) fn end(file: &File) -> io::Result<()> {
    let mut bytes = [0; LINE_LENGTH];
    let offset = file.metadata()?.len().saturating_sub(LINE_LENGTH as u64);
    file.read_exact_at(&mut bytes, offset)?;
    let life = std::str::from_utf8(&bytes).ok().and_then(parse_line);
    let life = life.ok_or(io::ErrorKind::InvalidData)?;
    let end_ns = now_ns().max(life.time_ns.end);
    file.write_all_at(line(life.time_ns.start, end_ns, true).as_bytes(), offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_are_those_of_this_start_of_the_host() {
        let life = |time_ns, has_ended| Life { time_ns, has_ended };
        let text = ["a\n", &line(5, 9, true), &line(10, 12, false)].concat();
        assert_eq!(line(5, 9, true).len(), LINE_LENGTH);
        assert_eq!(parse(&text, "a"), Some(vec![life(5..9, true), life(10..12, false)]));
        assert_eq!(parse(&text, "b"), None);
        // The only line of an earlier version.
        assert_eq!(parse("a 5 9\n", "a"), None);
        assert_eq!(parse(&text[..text.len() - 8], "a").unwrap().len(), 1);
        assert!(boot_ns().unwrap() < now_ns() && boot_identity().is_some());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("control.life");
        let file = replace(&path, &text).unwrap();
        end(&file).unwrap();
        let found = parse(&read(&path).unwrap(), "a").unwrap();
        assert_eq!(found[0], life(5..9, true));
        assert!(found.len() == 2 && found[1].has_ended && found[1].time_ns.end > 12, "{found:?}");
    }
}
