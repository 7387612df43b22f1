//! The producer of `Patterns`: copies and encryption, by the layers `patterns` of the disks.

use std::sync::Arc;

use fathom_block::Clock;
use fathom_insight::pattern::Pattern;
use fathom_insight::stream;
use fathom_layers::Patterns;
use fathom_layers::patterns::PatternReader;
use fathom_layers::tap::Labels;

use super::producer::{Attached, Producer, Reading, RecordReader, Source};
use super::tap::labels_of;
use crate::daemon::Daemon;

/// The layers `patterns` of the disks.
pub(super) struct PatternsOfDisks;

/// A disk with such a layer.
struct PatternSource {
    labels: Labels,
    layer: Patterns,
}

impl Producer for PatternsOfDisks {
    fn stream(&self) -> usize {
        super::PATTERNS
    }

    fn sources(&self, daemon: &Arc<Daemon>) -> Vec<Box<dyn Source>> {
        let source = |served: Arc<crate::daemon::Served>| -> Option<Box<dyn Source>> {
            let layer = crate::features::patterns::of(&served)?;
            let labels = labels_of(&served.live().definition);
            Some(Box::new(PatternSource { labels, layer }))
        };
        daemon.served().into_iter().filter_map(source).collect()
    }
}

impl Source for PatternSource {
    fn key(&self) -> u64 {
        self.layer.key()
    }

    fn disk(&self) -> &str {
        &self.labels.virtual_disk
    }

    fn attach(&self) -> Option<Box<dyn Attached>> {
        let reader = self.layer.attach()?;
        Some(Box::new(Reading::<stream::Patterns, _>::new(reader, &self.labels)))
    }
}

impl RecordReader<Pattern> for PatternReader {
    fn drain(&mut self, records: &mut Vec<Pattern>) {
        PatternReader::drain(self, records, Clock::System.now_ns());
    }

    fn dropped(&self) -> u64 {
        PatternReader::dropped(self)
    }
}
