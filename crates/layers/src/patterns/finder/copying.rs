//! Finds copies in what is written, and reports them.

use fathom_insight::Name;
use fathom_insight::pattern::{Evidence, Pattern, PatternKind};

use super::super::alarm::Actor;
use super::super::content::PAGE;
use super::super::copies::{Found, Run, SECTOR};
use super::super::files::FileId;
use super::{Content, CopyRecord, Finder, RECORDS, REPORT_BYTES, REPORT_NS, Subject, of_subject};

impl Finder {
    /// Looks for the content in other files.
    pub(super) fn find_copies(&mut self, id: FileId, content: Content<'_>) {
        let Content { data, offset, now_ns, .. } = content;
        let mut at = 0;
        loop {
            // While a copy goes on, only the place of its next page is examined.
            let run = self.files.get(id).map(|file| file.run).unwrap_or_default();
            let expected = run.next_in(offset.saturating_add(at as u64)).map(|next| at + next);
            if let Some(place) = expected.filter(|place| *place < data.len()) {
                if let Some(length) = self.follow(id, content, place, &run) {
                    at = place + length;
                    continue;
                }
            }
            if at + PAGE > data.len() {
                break;
            }
            // Any place within the next page.
            let end = (at + 2 * PAGE - SECTOR).min(data.len());
            let candidates: Vec<usize> = self.prints.candidates(&data[at..end]).collect();
            let found = candidates.iter().find(|place| self.examine(id, content, at + *place));
            at += found.map_or(PAGE, |place| place + PAGE);
        }
        self.report_old(now_ns);
    }

    /// Adds the page of `content` at a place to a copy that goes on, if it continues it. Returns
    /// the length of the page, or of what there is of it.
    fn follow(
        &mut self,
        id: FileId,
        content: Content<'_>,
        place: usize,
        run: &Run,
    ) -> Option<usize> {
        let target = content.offset.saturating_add(place as u64);
        let rest = &content.data[place..];
        let print = self.prints.of(rest);
        let other = print.and_then(|print| self.prints.find(print));
        let found = Found { file: run.source, offset: run.source_of(target) };
        // A page that the source has several times is noted once; one of zeroes is not noted.
        let is_next = match other {
            Some(other) => other.file == found.file && (other == found || run.is_known),
            None => run.is_known && print.is_none() && rest.len() >= PAGE,
        };
        if is_next && found.file != id && self.files.get(found.file)?.size > found.offset {
            self.advance(id, content, found, target, PAGE as u64);
            return Some(PAGE);
        }
        // The rest of the page is in the next request, or the source ends within it: its first
        // sector has to do.
        let source = self.files.get(found.file)?;
        let left = source.size.saturating_sub(found.offset).min(PAGE as u64) as usize;
        let is_cut = rest.len() < PAGE || left < PAGE;
        let is_next = is_cut
            && left >= SECTOR
            && run.is_known
            && found.file != id
            && self.prints.begins_with(rest.get(..SECTOR)?, found.file, found.offset);
        if !is_next {
            return None;
        }
        self.advance(id, content, found, target, left as u64);
        Some(left.next_multiple_of(SECTOR).min(rest.len()))
    }

    /// Whether the page at a place of `content` has the content of another file. A copy then begins
    /// or goes on.
    fn examine(&mut self, id: FileId, content: Content<'_>, place: usize) -> bool {
        let target = content.offset.saturating_add(place as u64);
        let print = self.prints.of(&content.data[place..]);
        let found = print.and_then(|print| self.prints.find(print));
        let Some(found) = found.filter(|found| found.file != id) else { return false };
        self.advance(id, content, found, target, PAGE as u64)
    }

    /// Adds `bytes` at the place `target` of a file to its copy. `false` if the source is not known
    /// any more.
    fn advance(
        &mut self,
        id: FileId,
        content: Content<'_>,
        found: Found,
        target: u64,
        bytes: u64,
    ) -> bool {
        let Some(source_size) = self.files.get(found.file).map(|source| source.size) else {
            return false;
        };
        let Some(file) = self.files.get_mut(id) else { return false };
        // What was found of another copy is reported before.
        if file.run.is_known && !file.run.continues(found, target) {
            self.report_copy(id, content.now_ns);
        }
        let Some(file) = self.files.get_mut(id) else { return false };
        let had_unreported = file.run.is_known && file.run.unreported > 0;
        file.run.add(found, target, bytes);
        if !file.run.is_copy(file.size, source_size) {
            return true;
        }
        let (is_known, is_full) = (file.run.is_known, file.run.unreported >= REPORT_BYTES);
        file.run.is_known = true;
        if !is_known {
            // What a call has copied has been noted.
            let is_called =
                self.files.get(id).is_some_and(|file| file.settled.has_calls(content.now_ns));
            if !is_called {
                self.begin_copy(id, found.file, None, content.now_ns);
            }
        }
        if !had_unreported {
            self.unreported.push_back((id, content.now_ns));
        }
        if is_full {
            self.report_copy(id, content.now_ns);
        }
        true
    }

    /// Notes a copy that was recognised now. Returns its place among the copies.
    pub(super) fn begin_copy(
        &mut self,
        id: FileId,
        source: FileId,
        evidence: Option<Evidence>,
        now_ns: u64,
    ) -> Option<usize> {
        let (file, source) = (self.files.get(id)?, self.files.get(source)?);
        // The target's writer is rarely known without interception, but who read the source is.
        let process = if file.writer.is_known() { file.writer } else { source.reader };
        let record = CopyRecord {
            begun_ns: now_ns,
            last_ns: now_ns,
            target: Subject::of(&file.facts()),
            source: Subject::of(&source.facts()),
            bytes: 0,
            actor: Actor::new(process, file.cgroup),
            evidence,
        };
        let is_same = |(_, old): &(FileId, CopyRecord)| {
            let (old, new) = ((old.target, old.source), (record.target, record.source));
            old.0.is_same(&new.0) && old.1.is_same(&new.1)
        };
        if let Some(same) = self.copies.iter().rposition(is_same) {
            // Another part of the same file.
            let (of, copy) = &mut self.copies[same];
            *of = id;
            copy.evidence = copy.evidence.or(evidence);
            return Some(same);
        }
        if self.copies.len() == RECORDS {
            self.copies.pop_front();
        }
        self.copies.push_back((id, record));
        self.counts.copies += 1;
        Some(self.copies.len() - 1)
    }

    /// Reports the bytes of a copy that have not been reported.
    pub(super) fn report_copy(&mut self, id: FileId, now_ns: u64) {
        let Some(file) = self.files.get_mut(id) else { return };
        if !file.run.is_known || file.run.unreported == 0 {
            return;
        }
        let found = std::mem::take(&mut file.run.unreported);
        let bytes = file.settled.find(found, now_ns);
        let source = file.run.source;
        if bytes == 0 {
            return;
        }
        let source_path = self.files.get(source).map_or(Name::NONE, |source| source.path);
        let is_own =
            |(of, copy): &(FileId, CopyRecord)| *of == id && copy.source.path == source_path;
        let own = self.copies.iter().rposition(is_own);
        if let Some(place) = own.or_else(|| self.begin_copy(id, source, None, now_ns)) {
            self.add_to_copy(place, bytes, None, now_ns);
        }
    }

    /// Reports further bytes of a copy.
    pub(super) fn add_to_copy(
        &mut self,
        place: usize,
        bytes: u64,
        evidence: Option<Evidence>,
        now_ns: u64,
    ) {
        self.counts.copied_bytes += bytes;
        let Some((_, copy)) = self.copies.get_mut(place) else { return };
        copy.bytes += bytes;
        copy.last_ns = now_ns;
        let copy = *copy;
        self.push(Pattern {
            pattern_ts: now_ns,
            kind: PatternKind::Copy as u8,
            evidence: evidence.map_or(0, |evidence| evidence as u8),
            source_path: copy.source.path.0,
            bytes,
            files: 1,
            ..of_subject(&copy.target, copy.actor)
        });
    }

    /// Reports what has waited for more of the same copy for some time.
    pub fn report_old(&mut self, now_ns: u64) {
        while let Some((id, since_ns)) = self.unreported.front().copied() {
            if now_ns.saturating_sub(since_ns) < REPORT_NS {
                return;
            }
            self.unreported.pop_front();
            self.report_copy(id, now_ns);
        }
    }

    /// Reports all that was found.
    pub fn report_all(&mut self, now_ns: u64) {
        while let Some((id, _)) = self.unreported.pop_front() {
            self.report_copy(id, now_ns);
        }
    }
}
