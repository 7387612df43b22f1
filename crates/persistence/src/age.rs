//! Whether a store and an image belong together: the pair has an *age*, which both keep.
//!
//! | step of an opening | store: age, newest | mark |
//! |---|---|---|
//! | before | *a*, *n* | *m*, and *n* ≤ *m* ≤ *a* |
//! | 1. the superblock is durable | *a* + 1, *n* | *m* |
//! | 2. the image's mark is durable | *a* + 1, *n* | *a* + 1 |
//! | 3. the superblock is durable | *a* + 1, *a* + 1 | *a* + 1 |
//!
//! Only then does the store take a change. So after a crash at any step, *n* ≤ *m* ≤ *a* holds
//! again. A store that is a copy from before this opening has an age below the mark's, and an image
//! that is such a copy, and has brought its mark, has a mark below the newest age in the store.
//!
//! If the mark cannot be rewritten, step 3 notes the mark's old age, and so do the changes of the
//! opening: the pair can still be opened, but copies since that age are not noticed.
//!
//! When a store is given up, the mark is removed, and then the store gets a higher age, so that no
//! copy of the image with its mark fits. If the mark cannot be removed, the store notes that marks
//! up to its age are void, until the next opening. So a mark *m* is void if newest ≤ *m* ≤ void.
//!
//! Copies within one opening have the same age: no stamp tells them apart.

use crate::identity::Identity;

/// What the mark of an image says of the store that belongs to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// The identity of the store.
    pub identity: Identity,
    /// The age of the pair. In a store of copies, whose content may be dropped at any time, it is
    /// drawn at random at each opening, and fits only if it is the same.
    pub age: u64,
}

/// Why a store and an image do not belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// The image has been opened with a later state of the store.
    OlderStore,
    /// The store has been opened with a later state of the image.
    OlderImage,
}

/// The ages in the superblock of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ages {
    /// The age of the pair of store and image: each opening makes it one higher, first here, then
    /// in the image's mark.
    pub age: u64,
    /// The age of the newest change that the store has ever had.
    pub newest: u64,
    /// If it is not 0: marks up to this age are void. The image has no changes in the store.
    pub void: u64,
}

impl Ages {
    /// Whether a superblock can have these ages.
    pub fn are_sane(&self) -> bool {
        self.newest <= self.age && self.void <= self.age
    }

    /// Compares the store with the age of an image's mark.
    ///
    /// # Errors
    /// If they do not belong together.
    pub fn compare(&self, mark: u64) -> Result<(), Mismatch> {
        if mark > self.age {
            Err(Mismatch::OlderStore)
        } else if mark < self.newest {
            Err(Mismatch::OlderImage)
        } else {
            Ok(())
        }
    }

    /// Whether an image with a mark of this age has all changes, although its mark was not removed.
    pub fn is_void(&self, mark: u64) -> bool {
        self.void > 0 && (self.newest..=self.void).contains(&mark)
    }

    /// The store is opened: step 1.
    pub fn open(&mut self) {
        (self.age, self.void) = (self.age + 1, 0);
    }

    /// The image's mark durably has the age `mark`, which is an earlier one if it could not be
    /// written anew: step 3.
    pub fn pair(&mut self, mark: u64) {
        self.newest = self.newest.max(mark);
    }

    /// The image has all changes, and no later ones come to this store. If it `has_mark` that could
    /// not be removed, the mark is void. Otherwise all marks are too old for the store.
    pub fn part(&mut self, has_mark: bool) {
        if has_mark {
            self.void = self.age;
        } else {
            self.open();
            self.newest = self.age;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// An image: its content, and the age of its mark.
    type Image = (u8, Option<u64>);

    /// A store: its ages, and the content of its one change.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct Store {
        ages: Ages,
        change: Option<u8>,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum User {
        Nobody,
        WithStore,
        WithoutStore,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    struct World {
        image: Image,
        store: Store,
        old_image: Option<Image>,
        old_store: Option<Store>,
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
        OpenWithoutStore,
        Write,
        BringHome,
        Kill,
        /// An orderly end, and whether the mark can be removed.
        End(bool),
        CopyStore,
        RestoreStore,
        CopyImage,
        RestoreImage,
    }

    use Opening::{CannotWriteMark, Complete, DiesBeforeMark, DiesBehindMark};
    const STEPS: [Step; 14] = [
        Step::Open(Complete),
        Step::Open(DiesBeforeMark),
        Step::Open(DiesBehindMark),
        Step::Open(CannotWriteMark),
        Step::OpenWithoutStore,
        Step::Write,
        Step::BringHome,
        Step::Kill,
        Step::End(true),
        Step::End(false),
        Step::CopyStore,
        Step::RestoreStore,
        Step::CopyImage,
        Step::RestoreImage,
    ];

    impl World {
        /// Begins to use the disk, unless it is refused. What is used must be the truth.
        fn begin(&mut self, user: User) -> Option<()> {
            let content = match user {
                User::WithStore => self.store.change.unwrap_or(self.image.0),
                _ => self.image.0,
            };
            assert!(self.is_excused || content == self.truth, "{self:?}");
            (content == self.truth).then_some(())
        }

        fn open(&mut self, opening: Opening, accept: impl Fn(u64, &Ages) -> bool) -> Option<()> {
            let mark = self.image.1;
            let is_empty = self.store.change.is_none();
            let is_accepted = mark.map_or(is_empty, |mark| accept(mark, &self.store.ages));
            if !is_accepted || (mark.is_none() && opening == CannotWriteMark) {
                return None;
            }
            self.begin(User::WithStore)?;
            self.store.ages.open();
            if matches!(opening, Complete | DiesBehindMark) {
                self.image.1 = Some(self.store.ages.age);
            }
            if matches!(opening, Complete | CannotWriteMark) {
                self.store.ages.pair(self.image.1?);
                self.user = User::WithStore;
            }
            Some(())
        }

        /// The world after a step; `None` if the step is not possible.
        fn after(mut self, step: Step, accept: impl Fn(u64, &Ages) -> bool) -> Option<Self> {
            let is_free = self.user == User::Nobody;
            let has_store = self.user == User::WithStore;
            match step {
                Step::Open(opening) if is_free => self.open(opening, accept)?,
                Step::OpenWithoutStore if is_free => {
                    if !self.image.1.is_none_or(|mark| self.store.ages.is_void(mark)) {
                        return None;
                    }
                    self.begin(User::WithoutStore)?;
                    self.user = User::WithoutStore;
                }
                Step::Write if !is_free && self.contents < 3 => {
                    self.contents += 1;
                    self.truth = self.contents;
                    let target =
                        if has_store { self.store.change.insert(0) } else { &mut self.image.0 };
                    *target = self.contents;
                }
                Step::BringHome if has_store => self.image.0 = self.store.change.take()?,
                Step::Kill if !is_free => self.user = User::Nobody,
                Step::End(removes) if has_store && self.store.change.is_none() => {
                    if removes {
                        self.image.1 = None;
                    }
                    self.store.ages.part(!removes);
                    self.user = User::Nobody;
                }
                Step::CopyStore => self.old_store = Some(self.store),
                Step::CopyImage => self.old_image = Some(self.image),
                Step::RestoreStore if is_free => {
                    let old = self.old_store.filter(|old| *old != self.store)?;
                    let is_frozen = self.image.1.is_some_and(|mark| mark < self.store.ages.age);
                    self.is_excused |= old.ages.age == self.store.ages.age || is_frozen;
                    self.is_excused |= self.old_image == Some(self.image);
                    self.store = old;
                }
                Step::RestoreImage if is_free => {
                    let old = self.old_image.filter(|old| *old != self.image)?;
                    // Without a mark, it is the operator's own restoration. So it is if the store
                    // was restored, too.
                    let is_same = old.1 == self.image.1 || old.1 == Some(self.store.ages.newest);
                    self.is_excused |= is_same || old.1.is_none();
                    self.is_excused |= self.old_store == Some(self.store);
                    self.image = old;
                }
                _ => return None,
            }
            Some(self)
        }
    }

    /// Whether a store is accepted with an image whose mark has an age.
    type Rule = fn(u64, &Ages) -> bool;

    /// Searches all sequences of steps. Returns the number of worlds.
    fn search(depth: usize, accept: impl Fn(u64, &Ages) -> bool + Copy) -> usize {
        let store = Store { ages: Ages::default(), change: None };
        let world = World {
            image: (0, None),
            store,
            old_image: None,
            old_store: None,
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
        let sound = |mark: u64, ages: &Ages| ages.compare(mark).is_ok();
        assert!(search(8, sound) > 3000);
        let broken: [Rule; 3] =
            [|_, _| true, |mark, ages| mark <= ages.age, |mark, ages| mark >= ages.newest];
        for (number, rule) in broken.into_iter().enumerate() {
            let result = std::panic::catch_unwind(|| search(8, rule));
            assert!(result.is_err(), "rule {number}");
        }
    }
}
