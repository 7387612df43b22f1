//! The result for a request, in a form that can be compared.

use fathom_insight::{Confidence, Facts, Insight, InsightSource, Kind, Names};

/// Facts about a part of a request, with texts in place of their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct NamedFacts {
    pub length: u64,
    pub kind: Kind,
    pub source: InsightSource,
    pub confidence: Confidence,
    pub inode: u64,
    pub file_size: u64,
    pub owner: u32,
    pub write_hint: u8,
    pub path: String,
    pub file_system: String,
    pub device: String,
    pub cgroup: String,
    pub process: String,
    pub process_id: u32,
}

impl NamedFacts {
    /// The facts about `length` bytes.
    pub fn new(length: u64, facts: &Facts, names: &Names) -> Self {
        let text = |name| names.text(name).map(|text| text.to_string()).unwrap_or_default();
        Self {
            length,
            kind: facts.kind,
            source: facts.source,
            confidence: facts.confidence,
            inode: facts.inode,
            file_size: facts.file_size,
            owner: facts.owner,
            write_hint: facts.write_hint,
            path: text(facts.path),
            file_system: text(facts.file_system),
            device: text(facts.device),
            cgroup: text(facts.cgroup),
            process: text(facts.process),
            process_id: facts.process_id,
        }
    }

    /// All parts of an insight into a request of `length` bytes.
    pub fn all(length: u64, insight: &Insight, names: &Names) -> Vec<Self> {
        insight.parts(length).map(|part| Self::new(part.length, &part.facts, names)).collect()
    }

    /// The first fact that contradicts `truth`. An unknown fact is no contradiction. Neither is the
    /// file system of a part whose kind is known from its completion only, nor [`Kind::Metadata`]
    /// for a journal or a directory.
    pub fn contradicts(&self, truth: &Self) -> Option<&'static str> {
        let part = [Kind::Journal, Kind::Directory].contains(&truth.kind);
        let invented = |mine: &str, its: &str| !mine.is_empty() && mine != its;
        let other = |mine: &str, its: &str| !its.is_empty() && invented(mine, its);
        let is_coarse = self.kind == Kind::Metadata && part;
        if self.kind != truth.kind && self.kind != Kind::Unknown && !is_coarse {
            Some("kind")
        } else if self.inode != 0 && self.inode != truth.inode {
            Some("inode")
        } else if other(&self.path, &truth.path) {
            Some("path")
        } else if other(&self.file_system, &truth.file_system) && !is_coarse {
            Some("file system")
        } else if other(&self.device, &truth.device) && !is_coarse {
            Some("device")
        } else if invented(&self.process, &truth.process) {
            Some("process")
        } else if invented(&self.cgroup, &truth.cgroup) {
            Some("group")
        } else {
            None
        }
    }
}
