//! Whether a log and an image belong together: the pair has an *age*, which both keep.
//!
//! | step of an opening | log: age, newest | mark |
//! |---|---|---|
//! | before | *a*, *n* | *m*, and *n* ≤ *m* ≤ *a* |
//! | 1. the superblock is durable | *a* + 1, *n* | *m* |
//! | 2. the image's mark is durable | *a* + 1, *n* | *a* + 1 |
//! | 3. the superblock is durable | *a* + 1, *a* + 1 | *a* + 1 |
//!
//! Only then does the log take a change. So after a crash at any step, *n* ≤ *m* ≤ *a* holds again.
//! A log that is a copy from before this opening has an age below the mark's, and an image that is
//! such a copy, and has brought its mark, has a mark below the newest age in the log.
//!
//! If the mark cannot be rewritten, step 3 notes the mark's old age, and so do the records of the
//! opening: the pair can still be opened, but copies since that age are not noticed.
//!
//! When a log is given up, the mark is removed, and then the log gets a higher age, so that no copy
//! of the image with its mark fits. If the mark cannot be removed, the log notes that marks up to
//! its age are void, until the next opening. So a mark *m* is void if newest ≤ *m* ≤ void.
//!
//! Copies within one opening have the same age: no stamp tells them apart.

use std::fmt;

use crate::superblock::Superblock;

/// Why a log and an image do not belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The image has been opened with a later state of the log.
    OlderLog,
    /// The log has been opened with a later state of the image.
    OlderImage,
}

/// Compares the age of an image's mark with those of its log.
pub(crate) fn compare(mark: u64, newest: u64, age: u64) -> Result<(), Mismatch> {
    if mark > age {
        Err(Mismatch::OlderLog)
    } else if mark < newest {
        Err(Mismatch::OlderImage)
    } else {
        Ok(())
    }
}

impl Superblock {
    /// Whether an image with a mark of this age has all changes, although its mark was not removed.
    pub fn is_void(&self, mark: u64) -> bool {
        self.void > 0 && (self.newest..=self.void).contains(&mark)
    }
}

/// The records of a log that are not known to be at home.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Their number.
    pub records: u64,
    /// Their length in the log, in bytes.
    pub bytes: u64,
    /// When the first and the last of them were written, in nanoseconds since 1970; 0 if that is
    /// not known.
    pub first_ns: u64,
    /// See `first_ns`.
    pub last_ns: u64,
}

impl fmt::Display for Held {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { records, bytes, first_ns, last_ns } = *self;
        let plural = if records == 1 { "" } else { "s" };
        write!(formatter, "{records} record{plural} of changes, {} KiB", bytes.div_ceil(1024))?;
        if last_ns > 0 {
            write!(formatter, ", from {} to {}", Utc(first_ns), Utc(last_ns))?;
        }
        Ok(())
    }
}

/// A time in nanoseconds since 1970, to be shown in seconds.
#[derive(Clone, Copy, Debug)]
pub struct Utc(pub u64);

impl fmt::Display for Utc {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0 / 1_000_000_000;
        let (days, second) = (seconds / 86_400, seconds % 86_400);
        // The days from a 1 March on, in cycles of 400 years.
        let days = days + 719_468;
        let (cycle, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = 400 * cycle + year + u64::from(month <= 2);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(formatter, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn times_are_shown_as_dates() {
        let shown = |seconds: u64| Utc(seconds * 1_000_000_000).to_string();
        assert_eq!(shown(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(shown(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(shown(951_868_800), "2000-03-01 00:00:00 UTC");
        assert_eq!(shown(1_795_807_445), "2026-11-27 19:24:05 UTC");
    }

    /// An image: its content, and the age of its mark.
    type Image = (u8, Option<u64>);

    /// A log: its age, the newest age, the void age, and the content of its one record.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct Log {
        age: u64,
        newest: u64,
        void: u64,
        record: Option<u8>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum User {
        Nobody,
        WithLog,
        WithoutLog,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct World {
        image: Image,
        log: Log,
        old_image: Option<Image>,
        old_log: Option<Log>,
        /// What the disk has to have.
        truth: u8,
        user: User,
        /// The number of contents so far.
        contents: u8,
        /// Whether something happened that no stamp can see.
        is_excused: bool,
    }

    /// How an opening ends.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Opening {
        Complete,
        DiesBeforeMark,
        DiesBehindMark,
        CannotWriteMark,
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Open(Opening),
        OpenWithoutLog,
        Write,
        BringHome,
        Kill,
        /// An orderly end, and whether the mark can be removed.
        End(bool),
        CopyLog,
        RestoreLog,
        CopyImage,
        RestoreImage,
    }

    use Opening::{CannotWriteMark, Complete, DiesBeforeMark, DiesBehindMark};
    const STEPS: [Step; 14] = [
        Step::Open(Complete),
        Step::Open(DiesBeforeMark),
        Step::Open(DiesBehindMark),
        Step::Open(CannotWriteMark),
        Step::OpenWithoutLog,
        Step::Write,
        Step::BringHome,
        Step::Kill,
        Step::End(true),
        Step::End(false),
        Step::CopyLog,
        Step::RestoreLog,
        Step::CopyImage,
        Step::RestoreImage,
    ];

    impl World {
        /// Begins to use the disk, unless it is refused. What is used must be the truth.
        fn begin(&mut self, user: User) -> Option<()> {
            let content = match user {
                User::WithLog => self.log.record.unwrap_or(self.image.0),
                _ => self.image.0,
            };
            assert!(self.is_excused || content == self.truth, "{self:?}");
            (content == self.truth).then_some(())
        }

        fn open(&mut self, opening: Opening, accept: impl Fn(u64, &Log) -> bool) -> Option<()> {
            let (mark, log) = (self.image.1, self.log);
            let is_accepted = mark.map_or(log.record.is_none(), |mark| accept(mark, &log));
            if !is_accepted || (mark.is_none() && opening == CannotWriteMark) {
                return None;
            }
            self.begin(User::WithLog)?;
            (self.log.age, self.log.void) = (log.age + 1, 0);
            if matches!(opening, Complete | DiesBehindMark) {
                self.image.1 = Some(self.log.age);
            }
            if matches!(opening, Complete | CannotWriteMark) {
                self.log.newest = self.log.newest.max(self.image.1?);
                self.user = User::WithLog;
            }
            Some(())
        }

        /// The world after a step; `None` if the step is not possible.
        fn after(mut self, step: Step, accept: impl Fn(u64, &Log) -> bool) -> Option<Self> {
            let is_free = self.user == User::Nobody;
            let has_log = self.user == User::WithLog;
            match step {
                Step::Open(opening) if is_free => self.open(opening, accept)?,
                Step::OpenWithoutLog if is_free => {
                    let Log { newest, void, .. } = self.log;
                    let is_void = |mark| void > 0 && (newest..=void).contains(&mark);
                    if !self.image.1.is_none_or(is_void) {
                        return None;
                    }
                    self.begin(User::WithoutLog)?;
                    self.user = User::WithoutLog;
                }
                Step::Write if !is_free && self.contents < 3 => {
                    self.contents += 1;
                    self.truth = self.contents;
                    let target =
                        if has_log { self.log.record.insert(0) } else { &mut self.image.0 };
                    *target = self.contents;
                }
                Step::BringHome if has_log => self.image.0 = self.log.record.take()?,
                Step::Kill if !is_free => self.user = User::Nobody,
                Step::End(removes) if has_log && self.log.record.is_none() => {
                    if removes {
                        self.image.1 = None;
                        let age = self.log.age + 1;
                        (self.log.age, self.log.newest, self.log.void) = (age, age, 0);
                    } else {
                        self.log.void = self.log.age;
                    }
                    self.user = User::Nobody;
                }
                Step::CopyLog => self.old_log = Some(self.log),
                Step::CopyImage => self.old_image = Some(self.image),
                Step::RestoreLog if is_free => {
                    let old = self.old_log.filter(|old| *old != self.log)?;
                    let is_frozen = self.image.1.is_some_and(|mark| mark < self.log.age);
                    self.is_excused |= old.age == self.log.age || is_frozen;
                    self.is_excused |= self.old_image == Some(self.image);
                    self.log = old;
                }
                Step::RestoreImage if is_free => {
                    let old = self.old_image.filter(|old| *old != self.image)?;
                    // Without a mark, it is the operator's own restoration. So it is if the log was
                    // restored, too.
                    let is_same = old.1 == self.image.1 || old.1 == Some(self.log.newest);
                    self.is_excused |= is_same || old.1.is_none();
                    self.is_excused |= self.old_log == Some(self.log);
                    self.image = old;
                }
                _ => return None,
            }
            Some(self)
        }
    }

    /// Whether a log is accepted with an image whose mark has an age.
    type Rule = fn(u64, &Log) -> bool;

    /// Searches all sequences of steps. Returns the number of worlds.
    fn search(depth: usize, accept: impl Fn(u64, &Log) -> bool + Copy) -> usize {
        let log = Log { age: 0, newest: 0, void: 0, record: None };
        let world = World {
            image: (0, None),
            log,
            old_image: None,
            old_log: None,
            truth: 0,
            user: User::Nobody,
            contents: 0,
            is_excused: false,
        };
        let mut seen = HashSet::from([world]);
        let mut worlds = vec![world];
        for _ in 0..depth {
            let next = worlds.iter().flat_map(|world| {
                STEPS.into_iter().filter_map(move |step| world.after(step, accept))
            });
            worlds = next.collect::<Vec<_>>();
            worlds.retain(|world| seen.insert(*world));
        }
        seen.len()
    }

    /// Whatever happens, an opening that is accepted has the disk's newest content, but for what no
    /// stamp can see. Without the rule, or with a part of it, that fails.
    #[test]
    fn no_older_copy_is_accepted() {
        let sound = |mark: u64, log: &Log| compare(mark, log.newest, log.age).is_ok();
        assert!(search(8, sound) > 3000);
        let broken: [Rule; 3] =
            [|_, _| true, |mark, log| mark <= log.age, |mark, log| mark >= log.newest];
        for (number, rule) in broken.into_iter().enumerate() {
            let result = std::panic::catch_unwind(|| search(8, rule));
            assert!(result.is_err(), "rule {number}");
        }
    }
}
