//! The lives of daemons on this host: until when the last one could have changed an image. Once there has been a log,
//! a thread writes the time into a file beside the control socket, once a second. The file names the host's start, because what it says is worth nothing after the
//! next one.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use fathom_layers::Wal;
use fathom_layers::wal::HomeTimes;

/// How often the time is written.
const INTERVAL: Duration = Duration::from_secs(1);
/// The type of the file system NFS, whose server has a clock of its own (`statfs.f_type`).
const NFS: i64 = 0x6969;
/// As `NFS`, for FUSE, SMB (both), 9P and Ceph.
const REMOTE: [i64; 6] = [NFS, 0x6573_5546, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x00c3_6400];

/// What is known of the daemon before this one.
#[derive(Default)]
pub(crate) struct Lives {
    before: OnceLock<Option<Range<u64>>>,
    /// The logs that this daemon has opened: it may have changed their images itself.
    opened: Mutex<Vec<[u8; 16]>>,
    /// Ends the thread.
    alive: Arc<()>,
    /// The file, and the identity of the host's start.
    place: OnceLock<(PathBuf, String)>,
    /// Set once there has been a log, and so a thread that notes the life of this daemon.
    noting: OnceLock<()>,
}

impl Lives {
    /// Reads the life of the last daemon. `control` is the control socket.
    pub(crate) fn begin(&self, control: &Path) {
        let path = control.with_extension("life");
        let Some(boot) = boot_identity() else { return };
        let before = std::fs::read_to_string(&path).ok().and_then(|text| parse(&text, &boot));
        let _ = self.before.set(before);
        let _ = self.place.set((path, boot));
    }

    /// This daemon has opened a log. With the first one, it begins to note its own life.
    pub(crate) fn opened(&self, log: &Wal) {
        self.opened.lock().unwrap_or_else(PoisonError::into_inner).push(log.identity());
        self.noting.get_or_init(|| self.note());
    }

    /// Starts the thread that notes the life of this daemon.
    fn note(&self) {
        let Some((path, boot)) = self.place.get().cloned() else { return };
        // No link of another user is followed.
        let _ = std::fs::remove_file(&path);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let alive = Arc::downgrade(&self.alive);
        let begin_ns = now_ns();
        let spawned = file.and_then(|file| {
            let note = move || {
                let mut last_ns = begin_ns;
                while alive.strong_count() > 0 {
                    // A clock may be set back.
                    last_ns = now_ns().max(last_ns);
                    let _ = file.write_all_at(text(&boot, begin_ns, last_ns).as_bytes(), 0);
                    std::thread::sleep(INTERVAL);
                }
            };
            std::thread::Builder::new().name("life".into()).spawn(note).map(drop)
        });
        if let Err(error) = spawned {
            tracing::warn!(path = %path.display(), %error, "the life of the daemon is not noted");
        }
    }

    /// When `image` was changed, and when the daemon before had ended; `None` if that is not known, or if this
    /// daemon has opened its `log` already.
    pub(crate) fn times(&self, image: &Path, log: Option<[u8; 16]>) -> Option<HomeTimes> {
        let opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if log.is_none_or(|log| opened.contains(&log)) {
            return None;
        }
        let life_ns = self.before.get()?.clone();
        let file = File::open(image).ok()?;
        let metadata = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
        let status = rustix::fs::fstatfs(&file).ok()?;
        let changed_ns =
            u64::try_from(metadata.mtime()).ok()? * 1_000_000_000 + metadata.mtime_nsec() as u64;
        let is_known = !REMOTE.contains(&status.f_type) && changed_ns <= now_ns();
        is_known.then_some(HomeTimes { changed_ns, life_ns, boot_ns: boot_ns()? })
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

fn boot_identity() -> Option<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    text.map(|text| text.trim().to_owned()).ok().filter(|text| !text.is_empty())
}

fn text(boot: &str, begin_ns: u64, end_ns: u64) -> String {
    format!("{boot} {begin_ns:020} {end_ns:020}\n")
}

fn parse(text: &str, boot: &str) -> Option<Range<u64>> {
    let mut parts = text.split_whitespace();
    if parts.next()? != boot {
        return None;
    }
    Some(parts.next()?.parse().ok()?..parts.next()?.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_life_is_that_of_this_start_of_the_host() {
        assert_eq!(parse(&text("a", 5, 9), "a"), Some(5..9));
        assert_eq!(parse(&text("a", 5, 9), "b"), None);
        assert_eq!(parse("a 5", "a"), None);
        assert!(boot_ns().unwrap() < now_ns() && boot_identity().is_some());
    }
}
