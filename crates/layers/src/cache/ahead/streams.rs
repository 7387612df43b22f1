//! The streams of a queue: reads that follow each other in a file, without I/O.
//!
//! A stream gets a *window* when some of its reads have missed the cache: so many bytes of the file
//! are read ahead of the guest. The window doubles when a whole window has been used, and halves
//! when blocks that were read ahead were not in the cache any more. Where streams often end with
//! unused blocks, later ones must have missed more often before they get a window.

use std::collections::VecDeque;

use super::joints::{File, Piece};

/// The sets of streams; a stream is in the set of its file.
const SETS: usize = 16;
/// The streams of a set.
const WAYS: usize = 4;
/// The first window, in bytes.
pub(super) const WINDOW_MIN: u64 = 128 << 10;
/// The misses after which a stream gets its first window.
const MISSES: u32 = 2;
/// The greatest caution: a stream then needs so many times two to this power.
const CAUTION_MAX: u32 = 5;
/// A read that begins at most so many bytes after the end of the last one continues its stream: the
/// guest has the bytes between.
const GAP_MAX: u64 = 64 << 10;
/// A stream with a window makes room for another after so many reads of its set without one of it.
const IDLE_MAX: u64 = 256;
/// The most pieces of a stream that have been read ahead and not used.
const PIECES_MAX: usize = 64;

/// What bounds the windows, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The greatest window of a stream.
    pub(super) window: u64,
    /// The most bytes of all streams that have been read ahead and not used.
    pub(super) unused: u64,
}

/// The part of a file that a stream wants to have read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ahead {
    /// The number of the stream.
    pub(super) stream: usize,
    /// Where it begins: the offset in the file, and the place on the disk if the file is in one
    /// piece.
    pub(super) from: (u64, u64),
    /// The offset in the file where it ends.
    pub(super) end: u64,
}

/// What is known of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    /// The file goes on here, but not at the place where its last piece ends.
    pub(super) is_joint: bool,
    /// It belongs to a stream with a window.
    pub(super) is_followed: bool,
    /// What to read ahead.
    pub(super) ahead: Option<Ahead>,
}

#[derive(Debug, Default)]
struct Stream {
    file: Option<File>,
    /// Where the next read is expected: the offset in the file, and the place on the disk.
    next: (u64, u64),
    misses: u32,
    /// The window, in bytes; 0 if nothing is read ahead.
    window: u64,
    /// Up to where the file has been read ahead.
    ahead: (u64, u64),
    /// What has been read ahead and not used, in the order of the file.
    pieces: VecDeque<Piece>,
    /// The bytes used since the window changed, and in total; and those that were not used.
    used_of_window: u64,
    used: u64,
    unused: u64,
    /// The bytes ahead that were in the cache already, since the last that were not.
    present: u64,
    /// The number of the last read.
    last: u64,
}

impl Stream {
    /// Takes what a read covers out of the pieces. Returns the bytes that were read ahead for it,
    /// or `None` if the file is elsewhere on the disk.
    fn consume(&mut self, read: Piece) -> Option<u64> {
        let mut covered = 0;
        while let Some(piece) = self.pieces.front_mut() {
            if piece.file_offset >= read.file_end() {
                break;
            }
            let from = piece.file_offset.max(read.file_offset);
            let end = piece.file_end().min(read.file_end());
            if from < end {
                let place = piece.place + (from - piece.file_offset);
                if place != read.place.wrapping_add(from - read.file_offset) {
                    return None;
                }
                covered += end - from;
            }
            let rest = piece.file_end().saturating_sub(read.file_end());
            // What the read has skipped will not be read.
            let skipped = from.min(piece.file_end()) - piece.file_offset;
            self.unused += skipped;
            if rest > 0 {
                let taken = piece.length - rest;
                *piece = Piece {
                    file_offset: piece.file_offset + taken,
                    place: piece.place + taken,
                    length: rest,
                };
                break;
            }
            self.pieces.pop_front();
        }
        Some(covered)
    }

    /// Stops reading ahead.
    fn stop(&mut self) {
        self.unused += self.pieces.drain(..).map(|piece| piece.length).sum::<u64>();
        (self.window, self.misses, self.ahead, self.present) = (0, 0, (0, 0), 0);
        self.used_of_window = 0;
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Empty until the first read of a file.
    all: Vec<Stream>,
    reads: u64,
    caution: u32,
    /// The bytes of all streams that have been read ahead and not used.
    unused: u64,
}

impl Streams {
    /// A read of a file of `size` bytes. `is_miss` says whether the cache lacks a part of it.
    pub(super) fn read(
        &mut self,
        file: File,
        read: Piece,
        size: u64,
        is_miss: bool,
        limits: Limits,
    ) -> Seen {
        let Some(at) = self.find(file, read, is_miss) else { return Seen::default() };
        let is_joint = self.is_joint(at, read);
        self.go_on(at, read, is_miss);
        let before = self.pending(at);
        self.judge(at, read, is_miss, limits);
        if read.file_end() >= size {
            self.retire(at);
        }
        self.unused = self.unused - before + self.pending(at);
        let is_followed = self.all[at].window > 0;
        let ahead = is_followed.then(|| self.ahead(at, size, limits)).flatten();
        Seen { is_joint, is_followed, ahead }
    }

    /// A write of a file. Returns whether the file goes on here, but not at the place where its
    /// last piece ends.
    pub(super) fn write(&mut self, file: File, write: Piece) -> bool {
        let Some(at) = self.find(file, write, false) else { return false };
        let is_joint = self.is_joint(at, write);
        self.go_on(at, write, false);
        is_joint
    }

    /// The stream that a request continues. Otherwise it begins one.
    fn find(&mut self, file: File, piece: Piece, is_miss: bool) -> Option<usize> {
        self.reads += 1;
        if self.all.is_empty() {
            self.all.resize_with(SETS * WAYS, Stream::default);
        }
        let set = (file.hash() as usize % SETS) * WAYS;
        let continues = |stream: &Stream| {
            let gap = piece.file_offset.wrapping_sub(stream.next.0);
            stream.file == Some(file) && (gap == 0 || gap <= GAP_MAX && stream.window > 0)
        };
        let found = (set..set + WAYS).find(|at| continues(&self.all[*at]));
        if found.is_none() {
            self.begin(set, file, piece, is_miss);
        }
        found
    }

    fn begin(&mut self, set: usize, file: File, piece: Piece, is_miss: bool) {
        let idle = |stream: &Stream| self.reads - stream.last;
        let can_leave = |at: &usize| {
            let stream = &self.all[*at];
            stream.window == 0 || idle(stream) > IDLE_MAX
        };
        let leaving = (set..set + WAYS).filter(can_leave);
        let Some(at) = leaving.max_by_key(|at| idle(&self.all[*at])) else { return };
        let pending = self.pending(at);
        self.retire(at);
        self.unused -= pending;
        let stream = &mut self.all[at];
        *stream = Stream {
            file: Some(file),
            next: (piece.file_end(), piece.place.wrapping_add(piece.length)),
            misses: u32::from(is_miss),
            last: self.reads,
            pieces: std::mem::take(&mut stream.pieces),
            ..Stream::default()
        };
    }

    fn is_joint(&self, at: usize, piece: Piece) -> bool {
        let (offset, place) = self.all[at].next;
        piece.file_offset == offset && piece.place != place
    }

    fn go_on(&mut self, at: usize, piece: Piece, is_miss: bool) {
        let stream = &mut self.all[at];
        stream.last = self.reads;
        stream.next = (piece.file_end(), piece.place.wrapping_add(piece.length));
        stream.misses = stream.misses.saturating_add(u32::from(is_miss));
    }

    /// The bytes of a stream that have been read ahead and not used.
    fn pending(&self, at: usize) -> u64 {
        self.all[at].pieces.iter().map(|piece| piece.length).sum()
    }

    /// Adapts the window.
    fn judge(&mut self, at: usize, read: Piece, is_miss: bool, limits: Limits) {
        let stream = &mut self.all[at];
        if stream.window == 0 {
            // A guest that reads as much at once needs no help.
            let needs = stream.misses >= MISSES << self.caution && read.length < limits.window;
            if needs && is_miss {
                stream.window = WINDOW_MIN.max(read.length).min(limits.window);
            }
            return;
        }
        let Some(covered) = stream.consume(read) else { return self.retire(at) };
        if covered > 0 && is_miss {
            // The cache does not keep them for as long as they are needed.
            stream.unused += covered;
            stream.window = (stream.window / 2).max(WINDOW_MIN);
            stream.used_of_window = 0;
        } else {
            stream.used += covered;
            stream.used_of_window += covered;
        }
        stream.window = stream.window.min(limits.window);
        if stream.used_of_window >= stream.window {
            stream.used_of_window = 0;
            stream.window = (stream.window * 2).min(limits.window);
            self.caution = self.caution.saturating_sub(1);
        }
    }

    /// A stream ends. What it has left unused counts for those that follow.
    fn retire(&mut self, at: usize) {
        let stream = &mut self.all[at];
        stream.stop();
        let (used, unused) = (std::mem::take(&mut stream.used), std::mem::take(&mut stream.unused));
        if unused > used {
            self.caution = (self.caution + 1).min(CAUTION_MAX);
        } else if used > 8 * unused {
            self.caution = self.caution.saturating_sub(1);
        }
    }

    /// What a stream wants to have read ahead now.
    fn ahead(&mut self, at: usize, size: u64, limits: Limits) -> Option<Ahead> {
        let stream = &mut self.all[at];
        if stream.ahead.0 < stream.next.0 {
            stream.ahead = stream.next;
        }
        let end = stream.next.0.saturating_add(stream.window).min(size);
        let is_far = stream.ahead.0 - stream.next.0 > stream.window / 2;
        let rest = limits.unused.saturating_sub(self.unused);
        let end = end.min(stream.ahead.0.saturating_add(rest));
        let is_wanted = !is_far && end > stream.ahead.0 && stream.pieces.len() < PIECES_MAX;
        is_wanted.then_some(Ahead { stream: at, from: stream.ahead, end })
    }

    /// The next piece of a stream is being read ahead, or was in the cache if `is_read` is false.
    pub(super) fn sent(&mut self, at: usize, piece: Piece, is_read: bool) {
        let Some(stream) = self.all.get_mut(at) else { return };
        stream.ahead = (piece.file_end(), piece.place.wrapping_add(piece.length));
        if is_read {
            stream.present = 0;
            stream.pieces.push_back(piece);
            self.unused += piece.length;
            return;
        }
        stream.present += piece.length;
        if stream.present >= 2 * stream.window && stream.pieces.is_empty() {
            stream.stop();
        }
    }

    /// Reading ahead has failed at `place` of the disk.
    pub(super) fn failed(&mut self, place: u64) {
        for at in 0..self.all.len() {
            let has = |piece: &Piece| (piece.place..piece.place + piece.length).contains(&place);
            if self.all[at].pieces.iter().any(has) {
                self.unused -= self.pending(at);
                self.retire(at);
            }
        }
    }
}

#[cfg(test)]
#[path = "streams_tests.rs"]
mod tests;
