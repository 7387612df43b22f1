//! Why a log cannot be used, and what to do.

use std::fmt;
use std::io;

use fathom_block::ErrorKind;
use fathom_failure::Failure;
use fathom_persistence::{Mismatch, NameTooLong, Verdict};
use fathom_wal::{Damage, Held, Superblock, Utc};

/// Why a log cannot be used.
#[derive(Debug)]
pub enum WalError {
    /// There is no superblock that can be used.
    Superblock(Verdict),
    /// The disk's name is too long for a superblock.
    Name(NameTooLong),
    /// Records are missing that were durable.
    Damaged(Damage),
    /// It is not the log that holds changes of the disk.
    NotExpected,
    /// It and the disk's store do not belong together.
    Mismatched {
        /// Which of them is too old.
        mismatch: Mismatch,
        /// What the log has.
        held: Held,
        /// When the log was opened before, in nanoseconds since 1970; 0 if that is not known.
        time_ns: u64,
    },
    /// Another program has changed the disk's store after the daemon's end.
    ChangedHome {
        /// When the store was changed, in nanoseconds since 1970.
        changed_ns: u64,
        /// When the daemon had ended, in nanoseconds since 1970.
        end_ns: u64,
        /// What the log has.
        held: Held,
    },
    /// The disk's store does not have what the log has written into it: it is in an earlier state,
    /// or another program has changed it.
    OtherContent {
        /// Where that is, in bytes.
        offset: u64,
        /// What the log has.
        held: Held,
        /// When the log was opened before, in nanoseconds since 1970; 0 if that is not known.
        time_ns: u64,
    },
    /// The disk's store cannot be read.
    Home(io::Error),
    /// The disk's store is smaller than the changes in the log. Contains the store's size in bytes.
    SmallerHome(u64, Held),
    /// It belongs to another disk. Contains the disk's name.
    OtherDisk(String),
    /// It holds changes of this disk for another store. Contains the store's name.
    OtherHome(String),
    /// Its region does not fit the volume, is too small, or is misaligned.
    Region(Failure),
    /// It holds changes of ranges that requests cannot have any more, because the disk's store or
    /// the volume has this alignment now, in bytes.
    Alignment(u32),
    /// The log was opened again elsewhere, or the volume has an older state of it, or not all of
    /// its content.
    Changed(&'static str),
    /// It cannot be recovered while its disk is served.
    InUse(&'static str),
    /// The volume failed.
    Volume(io::Error),
}

impl fmt::Display for WalError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock(verdict) => formatter.write_str(&verdict.describe::<Superblock>()),
            Self::Name(error) => error.fmt(formatter),
            Self::Damaged(damage) => damage.fmt(formatter),
            Self::NotExpected => {
                formatter.write_str("it is not the log that holds changes of the disk")
            }
            Self::Mismatched { mismatch: Mismatch::OlderStore, held, time_ns } => write!(
                formatter,
                "the log is an older copy{} with {held}: the image was used with a later state of the log",
                opened_on(*time_ns)
            ),
            Self::Mismatched { mismatch: Mismatch::OlderImage, held, time_ns } => write!(
                formatter,
                "the image is an older copy: the log{} was used with a later state of it, and has {held}",
                opened_on(*time_ns)
            ),
            Self::ChangedHome { changed_ns, end_ns, held } => write!(
                formatter,
                "the image was changed on {} by another program: the daemon had ended on {}. The log has {held}",
                Utc(*changed_ns),
                Utc(*end_ns)
            ),
            Self::OtherContent { offset, held, time_ns } => write!(
                formatter,
                "the image is not what it was: at byte {offset} it does not have what the log{} has written there. It was \
                 set back to an earlier state, or another program has changed it, and the log has {held}",
                opened_on(*time_ns)
            ),
            Self::Home(error) => write!(formatter, "the image cannot be read: {error}"),
            Self::SmallerHome(capacity, held) => write!(
                formatter,
                "the image was made smaller, to {capacity} bytes, and the log has changes behind its end: it has {held}"
            ),
            Self::OtherDisk(name) => write!(formatter, "the log belongs to the disk {name:?}"),
            Self::OtherHome(home) => {
                write!(formatter, "the log holds changes of this disk for {home:?}")
            }
            Self::Region(failure) => failure.fmt(formatter),
            Self::Alignment(alignment) => write!(
                formatter,
                "the log holds changes that are finer than the {alignment} bytes to which requests have to be \
                 aligned now"
            ),
            Self::Changed(text) | Self::InUse(text) => formatter.write_str(text),
            Self::Volume(error) => write!(formatter, "the log volume failed: {error}"),
        }
    }
}

impl WalError {
    /// The failure of the log of the disk `disk`.
    pub fn failure(self, disk: &str) -> Failure {
        Failure::new(self.to_string()).advise(self.remedy(disk)).because(self)
    }

    /// What the user can do next, who has the log of the disk `disk`; may be empty.
    fn remedy(&self, disk: &str) -> String {
        let keep = format!("`fathom log keep {disk}`");
        let discard = format!("`fathom log discard {disk}`");
        match self {
            Self::Superblock(Verdict::Foreign) => {
                "choose another place, or empty this one first (`wipefs`, `blkdiscard`) if that data \
                 may be lost"
                    .into()
            }
            Self::Superblock(Verdict::Newer(_)) => "start the later version again".into(),
            Self::Superblock(Verdict::Damaged) => {
                format!("restore the log volume, or, if its changes may be lost, run {discard}")
            }
            Self::Superblock(Verdict::Blank) => "restore it".into(),
            Self::Name(_) => "choose a shorter one".into(),
            Self::Damaged(_) => format!(
                "restore the log volume. Or make a copy of it; then {keep} keeps the changes in front of the \
                 damage, and {discard} none"
            ),
            Self::NotExpected => "restore that log".into(),
            Self::Mismatched { mismatch, .. } => {
                let which = match mismatch {
                    Mismatch::OlderStore => "its",
                    Mismatch::OlderImage => "these",
                };
                format!(
                    "restore that state. Or use this one: {keep} keeps {which} changes, {discard} drops them"
                )
            }
            Self::ChangedHome { .. } => format!(
                "if the image was restored, and these changes may be lost, run {discard}. If they belong to it, \
                 {keep} keeps them"
            ),
            Self::OtherContent { .. } => format!(
                "restore its last state. Or use this one: {keep} keeps these changes, {discard} drops them"
            ),
            Self::Home(_) | Self::Volume(_) => "repair it".into(),
            Self::SmallerHome(..) => format!(
                "make it as large as it was. Or {keep} keeps what fits, and {discard} nothing"
            ),
            Self::OtherDisk(_) => format!(
                "choose another place. If that disk was renamed, {keep} keeps its changes: the log is that of \
                 this disk then"
            ),
            Self::OtherHome(_) => format!(
                "serve that store again, so that they are written back. If it was renamed or copied to its new \
                 place, {keep} keeps them; if they may be lost, run {discard}"
            ),
            Self::Region(failure) => failure.remedy.clone(),
            Self::Alignment(_) => format!(
                "serve the disk once as before, for example without `direct`, and shut the daemon down, so that \
                 they are written back, or, if they may be lost, run {discard}"
            ),
            Self::Changed(_) | Self::InUse(_) => String::new(),
        }
    }
}

/// When a log was opened, for messages.
fn opened_on(time_ns: u64) -> String {
    if time_ns == 0 { String::new() } else { format!(" (opened on {})", Utc(time_ns)) }
}

impl std::error::Error for WalError {}

impl From<io::Error> for WalError {
    fn from(error: io::Error) -> Self {
        Self::Volume(error)
    }
}

impl From<Verdict> for WalError {
    fn from(verdict: Verdict) -> Self {
        Self::Superblock(verdict)
    }
}

impl From<NameTooLong> for WalError {
    fn from(error: NameTooLong) -> Self {
        Self::Name(error)
    }
}

impl From<ErrorKind> for WalError {
    fn from(kind: ErrorKind) -> Self {
        Self::Volume(io::Error::other(kind))
    }
}
