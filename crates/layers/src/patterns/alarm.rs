//! Encryption in progress: many files that one process, or one container, encrypts in a short time.

use std::collections::VecDeque;

use fathom_insight::Name;

use super::files::Process;

/// The most encrypted files that are counted at a time.
const RECENT_MAX: usize = 1024;
/// The most states at a time.
const ALARMS_MAX: usize = 16;
/// The most paths of a state.
const PATHS_MAX: usize = 3;

/// Who encrypts: a process, or what is known in its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Actor {
    /// The number of the process; 0 if it is unknown, or if there are several.
    pub process_id: u32,
    /// Its start, as in [`Facts::process_start`](fathom_insight::Facts::process_start).
    pub process_start: u32,
    /// Its command.
    pub process: Name,
    /// Its control group.
    pub cgroup: Name,
}

impl Actor {
    pub(super) fn new(process: Process, cgroup: Name) -> Self {
        let Process { id, start, command } = process;
        Self { process_id: id, process_start: start, process: command, cgroup }
    }

    /// Whether both are processes with the same command in the same control group: a script starts
    /// a program for each file.
    fn is_same(&self, other: &Self) -> bool {
        (self.process, self.cgroup) == (other.process, other.cgroup)
    }

    /// Adds another file's actor: if it is another process, there are several.
    fn merge(&mut self, other: &Self) {
        if (self.process_id, self.process_start) != (other.process_id, other.process_start) {
            (self.process_id, self.process_start) = (0, 0);
        }
    }
}

/// A state: files are being encrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncryptionInProgress {
    /// Who encrypts.
    pub actor: Actor,
    /// The time of the first file, in nanoseconds of the stack's clock.
    pub begun_ns: u64,
    /// The time of the last file.
    pub last_ns: u64,
    /// The number of encrypted files.
    pub files: u64,
    /// The bytes that were written into these files.
    pub bytes: u64,
    /// The paths of the first files.
    pub paths: Vec<Name>,
}

/// The states of a disk.
#[derive(Debug, Default)]
pub(super) struct Alarms {
    recent: VecDeque<(u64, Actor, Name, u64)>,
    states: Vec<EncryptionInProgress>,
}

/// When a state begins and ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Threshold {
    /// The files of a state.
    pub files: u64,
    /// The time within which they are encrypted, and after which without another file the state
    /// ends, in nanoseconds.
    pub time_ns: u64,
}

impl Alarms {
    /// Notes an encrypted file. Returns the state if it begins, or if its number of files has
    /// doubled.
    pub fn note(
        &mut self,
        actor: Actor,
        path: Name,
        bytes: u64,
        now_ns: u64,
        threshold: Threshold,
    ) -> Option<EncryptionInProgress> {
        self.end(now_ns, threshold);
        if let Some(state) = self.states.iter_mut().find(|state| state.actor.is_same(&actor)) {
            state.actor.merge(&actor);
            state.last_ns = now_ns;
            state.files += 1;
            state.bytes += bytes;
            return state.files.is_power_of_two().then(|| state.clone());
        }
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((now_ns, actor, path, bytes));
        let is_own = |(_, other, ..): &&(u64, Actor, Name, u64)| other.is_same(&actor);
        let own = self.recent.iter().filter(is_own);
        if (own.clone().count() as u64) < threshold.files || self.states.len() == ALARMS_MAX {
            return None;
        }
        let mut actor = actor;
        own.clone().for_each(|(_, other, ..)| actor.merge(other));
        let state = EncryptionInProgress {
            actor,
            begun_ns: own.clone().next().map_or(now_ns, |(time_ns, ..)| *time_ns),
            last_ns: now_ns,
            files: own.clone().count() as u64,
            bytes: own.clone().map(|(.., bytes)| bytes).sum(),
            paths: own.map(|(_, _, path, _)| *path).take(PATHS_MAX).collect(),
        };
        self.recent.retain(|(_, other, ..)| !other.is_same(&actor));
        self.states.push(state.clone());
        Some(state)
    }

    /// Ends states whose last file is too long ago.
    fn end(&mut self, now_ns: u64, threshold: Threshold) {
        let is_recent = |time_ns: u64| now_ns.saturating_sub(time_ns) <= threshold.time_ns;
        self.states.retain(|state| is_recent(state.last_ns));
        while self.recent.front().is_some_and(|(time_ns, ..)| !is_recent(*time_ns)) {
            self.recent.pop_front();
        }
    }

    /// The states at a time.
    pub fn states(&mut self, now_ns: u64, threshold: Threshold) -> &[EncryptionInProgress] {
        self.end(now_ns, threshold);
        &self.states
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLD: Threshold = Threshold { files: 3, time_ns: 1000 };

    fn actor(command: u32, cgroup: u32) -> Actor {
        let process = Name(command);
        Actor { process_id: 7, process, cgroup: Name(cgroup), ..Actor::default() }
    }

    #[test]
    fn several_files_of_one_actor_are_a_state_that_ends() {
        let mut alarms = Alarms::default();
        let mut note = |actor, now_ns| {
            alarms.note(actor, Name(now_ns as u32), 10, now_ns, THRESHOLD).map(|state| state.files)
        };
        assert_eq!(
            (note(actor(1, 1), 1), note(actor(2, 1), 2), note(actor(1, 1), 3)),
            (None, None, None)
        );
        assert_eq!(note(actor(2, 1), 4), None);
        // Another group, an unknown process, and the third file of the first one.
        assert_eq!((note(actor(0, 2), 5), note(actor(0, 1), 6)), (None, None));
        assert_eq!(note(actor(1, 1), 7), Some(3));
        assert_eq!(note(actor(1, 1), 8), Some(4));
        assert_eq!(note(actor(1, 1), 9), None);
        let states = alarms.states(1009, THRESHOLD);
        assert_eq!((states.len(), states[0].begun_ns, states[0].files), (1, 1, 5));
        assert_eq!(states[0].actor.process_id, 7);
        assert_eq!(states[0].paths, [Name(1), Name(3), Name(7)]);
        assert_eq!((states[0].bytes, alarms.states(1010, THRESHOLD).len()), (50, 0));
        // Files that are too far apart are no state.
        let mut note = |now_ns| alarms.note(actor(1, 1), Name(1), 10, now_ns, THRESHOLD);
        assert!(note(5000).is_none() && note(5600).is_none() && note(6200).is_none());
        let state = note(6201).unwrap();
        assert_eq!(state.actor.process_id, 7);
        let other = Actor { process_id: 8, ..actor(1, 1) };
        assert!(alarms.note(other, Name(1), 1, 6202, THRESHOLD).is_some());
        assert_eq!(alarms.states(6203, THRESHOLD)[0].actor.process_id, 0);
    }

    #[test]
    fn the_number_of_files_is_bounded() {
        let mut alarms = Alarms::default();
        for number in 0..100_000 {
            alarms.note(actor(1 + number % 5000, 1), Name(1), 1, 7, THRESHOLD);
        }
        assert!(alarms.recent.len() <= RECENT_MAX && alarms.states.len() <= ALARMS_MAX);
    }
}
