//! The files that lately had content that is not encrypted: the sources of files that are.

use super::files::{File, FileId, Files};

/// The most files that are remembered.
const PLAIN_MAX: usize = 4096;
/// The age up to which a file of about the same size may be the source, in nanoseconds.
const SIZE_AGE_MAX_NS: u64 = 600_000_000_000;
/// The age up to which what a process has read may be the source of what it writes, in nanoseconds.
const PROCESS_AGE_MAX_NS: u64 = 60_000_000_000;
/// The age at which a file is noted again, in nanoseconds.
const FRESH_NS: u64 = 10_000_000_000;
/// The bytes by which an encrypted file may be longer than its source, besides 1/256: a header, a
/// signature, the codes of blocks.
const HEADER_MAX: u64 = 4096;

/// A file with plain content.
#[derive(Clone, Copy, Debug, Default)]
struct Plain {
    file: FileId,
    folder: u32,
    stem: u32,
    time_ns: u64,
}

/// The files, in a ring.
pub(super) struct Plains {
    ring: Box<[Plain]>,
    next: usize,
}

impl Plains {
    pub fn new() -> Self {
        Self { ring: vec![Plain::default(); PLAIN_MAX].into(), next: 0 }
    }

    /// The memory, in bytes.
    pub fn memory(&self) -> u64 {
        size_of_val(&*self.ring) as u64
    }

    /// Notes that a file has content that is not encrypted.
    pub fn note(&mut self, id: FileId, file: &mut File, now_ns: u64) {
        if file.is_plain && now_ns.saturating_sub(file.plain_ns) < FRESH_NS {
            return;
        }
        (file.is_plain, file.plain_ns) = (true, now_ns);
        let plain = Plain { file: id, folder: file.folder, stem: file.stem, time_ns: now_ns };
        self.ring[self.next] = plain;
        self.next = (self.next + 1) % PLAIN_MAX;
    }

    /// The file of which `target` seems to be the encrypted form: one with the same name in the
    /// same folder, up to the first dot; one with about the same size in the same folder; or one
    /// that the process that writes the target has read.
    pub fn source_of(
        &self,
        id: FileId,
        target: &File,
        files: &Files,
        now_ns: u64,
    ) -> Option<FileId> {
        let is_source = |plain: &&Plain| {
            let age_ns = now_ns.saturating_sub(plain.time_ns);
            let is_near = plain.folder == target.folder;
            if plain.time_ns == 0 || plain.file == id {
                return false;
            }
            if is_near && plain.stem == target.stem {
                return true;
            }
            // Files of round sizes have equal sizes by chance.
            if age_ns > SIZE_AGE_MAX_NS || target.size % 4096 == 0 {
                return false;
            }
            files.get(plain.file).is_some_and(|source| {
                let longest = source.size.saturating_add(source.size / 256 + HEADER_MAX);
                let is_alike = (source.size..=longest).contains(&target.size);
                let is_own = target.writer.is_same(source.reader) && age_ns <= PROCESS_AGE_MAX_NS;
                is_alike && (is_near || is_own)
            })
        };
        let newest_first = (1..=PLAIN_MAX).map(|back| (self.next + PLAIN_MAX - back) % PLAIN_MAX);
        let mut plains = newest_first.map(|at| &self.ring[at]);
        plains.find(is_source).map(|plain| plain.file)
    }
}

#[cfg(test)]
mod tests {
    use fathom_insight::Facts;

    use super::super::files::{Process, parts_of};
    use super::*;

    struct Scene {
        files: Files,
        plains: Plains,
        now_ns: u64,
    }

    impl Scene {
        fn new() -> Self {
            Self { files: Files::new(), plains: Plains::new(), now_ns: 1_000_000_000_000 }
        }

        fn file(&mut self, inode: u64, path: &str, size: u64) -> FileId {
            let id = self.files.find(&Facts { inode, ..Facts::default() }).0;
            let file = self.files.get_mut(id).unwrap();
            (file.folder, file.stem) = parts_of(path);
            file.size = size;
            id
        }

        fn note(&mut self, id: FileId) {
            let file = self.files.get_mut(id).unwrap();
            self.plains.note(id, file, self.now_ns);
        }

        fn source(&self, id: FileId) -> Option<FileId> {
            self.plains.source_of(id, self.files.get(id).unwrap(), &self.files, self.now_ns)
        }
    }

    #[test]
    fn sources_are_found_by_name_size_and_process() {
        let mut scene = Scene::new();
        let text = scene.file(1, "/a/b.txt", 100_000);
        scene.note(text);
        let locked = scene.file(2, "/a/b.txt.locked", 5);
        assert_eq!(scene.source(locked), Some(text));
        let renamed = scene.file(3, "/a/0f3c", 100_500);
        assert_eq!(scene.source(renamed), Some(text));
        let elsewhere = scene.file(4, "/c/0f3c", 100_500);
        assert_eq!(scene.source(elsewhere), None);
        let process = Process { id: 9, start: 1, ..Process::default() };
        scene.files.get_mut(text).unwrap().reader = process;
        scene.files.get_mut(elsewhere).unwrap().writer = process;
        assert_eq!(scene.source(elsewhere), Some(text));
        scene.now_ns += PROCESS_AGE_MAX_NS + 1;
        assert_eq!(scene.source(elsewhere), None);
        let other = scene.file(5, "/a/other", 90_000);
        assert_eq!(scene.source(other), None);
        scene.now_ns += SIZE_AGE_MAX_NS;
        assert_eq!((scene.source(renamed), scene.source(locked)), (None, Some(text)));
        // A file is not its own source.
        assert_eq!(scene.source(text), None);
    }
}
