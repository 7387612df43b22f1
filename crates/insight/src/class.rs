//! The I/O class: the caching priority of a request.

use std::fmt;

use crate::kind::Kind;

/// A priority for caching: 0 (large files) to 5 (metadata), or 32 (unique data, not worth
/// deduplicating).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IoClass(pub u8);

impl IoClass {
    /// Unique data: deduplication is skipped.
    pub const UNIQUE: Self = Self(32);
}

/// The class that an application names in the ten bits of an I/O priority that Linux leaves for
/// hints (3 to 12), as `guest/fathom.h` and `docs/hints.md` define it. The highest bit marks a hint
/// of this kind; drivers of other devices use small numbers. `None` for any other priority.
pub fn class_of_hint(io_priority: u16) -> Option<IoClass> {
    const MARK: u16 = 1 << 9;
    let hint = io_priority >> 3 & 0x3ff;
    let class = hint & !MARK;
    (hint & MARK != 0 && class <= IoClass::UNIQUE.0.into()).then_some(IoClass(class as u8))
}

/// The rules that assign a class to a request. The default is Table 6 of the Sky paper.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClassTable {
    /// Bounds of file sizes in bytes, in descending order. A file has class n - 1 if it is smaller
    /// than exactly n bounds, and class 0 if it is smaller than none of them.
    bounds: Vec<u64>,
    metadata: IoClass,
}

impl Default for ClassTable {
    /// Files smaller than 14, 10, 5, 2 and 1 MiB have the classes 0 to 4, metadata has class 5.
    fn default() -> Self {
        const MB: u64 = 1 << 20;
        Self { bounds: vec![14 * MB, 10 * MB, 5 * MB, 2 * MB, MB], metadata: IoClass(5) }
    }
}

/// Why a table of classes is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClassError {
    /// The bounds are not in descending order.
    Order,
    /// There are more than 31 bounds: class 32 is reserved ([`IoClass::UNIQUE`]).
    Many,
}

impl fmt::Display for ClassError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Order => "each bound of a file size must be smaller than the one before it",
            Self::Many => "there can be at most 31 bounds of file sizes",
        })
    }
}

impl std::error::Error for ClassError {}

impl ClassTable {
    /// Makes a table. Files smaller than the first bound (in bytes) have class 0, files smaller
    /// than the second class 1, and so on. Metadata has the next class above them. Files that reach
    /// the first bound have the default class, which is 0 too.
    ///
    /// # Errors
    /// When the bounds are not in descending order, or there are more than 31.
    pub fn new(bounds: Vec<u64>) -> Result<Self, ClassError> {
        if bounds.len() > 31 {
            return Err(ClassError::Many);
        }
        if bounds.windows(2).any(|pair| pair[1] >= pair[0]) {
            return Err(ClassError::Order);
        }
        let metadata = IoClass(bounds.len() as u8);
        Ok(Self { bounds, metadata })
    }

    /// The class that an application requests by its I/O priority (`ioprio_set(2)` of Linux, in the
    /// virtio header): that of its [hint](class_of_hint), at most the class of metadata. Without a
    /// hint, the real-time class has the class of metadata, the idle class has class 0, and any
    /// other has none.
    pub fn class_of_priority(&self, io_priority: u16) -> Option<IoClass> {
        /// The position of the class in a priority, in bits (`IOPRIO_CLASS_SHIFT`).
        const SHIFT: u32 = 13;
        if let Some(class) = class_of_hint(io_priority) {
            return Some(if class == IoClass::UNIQUE { class } else { class.min(self.metadata) });
        }
        match io_priority >> SHIFT {
            1 => Some(self.metadata),
            3 => Some(IoClass(0)),
            _ => None,
        }
    }

    /// The class of data of `kind` in a file of `file_size` bytes; `None` for kinds that the table
    /// has no class for. Files that reach the first bound have the default class, 0.
    pub fn class(&self, kind: Kind, file_size: u64) -> Option<IoClass> {
        match kind {
            Kind::Metadata | Kind::Journal | Kind::Directory => Some(self.metadata),
            Kind::Data | Kind::Direct => {
                let above = self.bounds.partition_point(|bound| file_size < *bound);
                Some(IoClass(above.saturating_sub(1) as u8))
            }
            Kind::Unknown | Kind::Swap | Kind::Device => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_table_of_the_paper() {
        const MB: u64 = 1 << 20;
        let table = ClassTable::default();
        let class = |size| table.class(Kind::Data, size).unwrap().0;
        let expected =
            [(14 * MB, 0), (14 * MB - 1, 0), (10 * MB - 1, 1), (5 * MB - 1, 2), (2 * MB - 1, 3)];
        for (size, wanted) in expected {
            assert_eq!(class(size), wanted, "{size}");
        }
        assert_eq!((class(MB - 1), class(0), class(u64::MAX)), (4, 4, 0));
        assert_eq!(table.class(Kind::Metadata, 0), Some(IoClass(5)));
        assert_eq!(table.class(Kind::Swap, 0), None);
        assert_eq!(table.class_of_priority(1 << 13 | 4), Some(IoClass(5)));
        assert_eq!(table.class_of_priority(3 << 13), Some(IoClass(0)));
        // Hints: whatever the priority is otherwise, and no others.
        let hint = |class: u16| 2 << 13 | (1 << 9 | class) << 3 | 4;
        for (class, expected) in [(0, 0), (4, 4), (5, 5), (31, 5), (32, 32)] {
            assert_eq!(table.class_of_priority(hint(class)), Some(IoClass(expected)), "{class}");
        }
        assert_eq!(table.class_of_priority(hint(4) | 3 << 13), Some(IoClass(4)));
        for other in [hint(33), hint(511), 2 << 13 | 7 << 3 | 4, 2 << 13 | 0x1ff << 3] {
            assert_eq!(table.class_of_priority(other), None, "{other:#x}");
        }
        assert_eq!(
            (table.class_of_priority(0), table.class_of_priority(2 << 13 | 7)),
            (None, None)
        );
    }

    #[test]
    fn bounds_must_descend() {
        assert_eq!(ClassTable::new(vec![1, 1]), Err(ClassError::Order));
        assert_eq!(ClassTable::new((0..40).rev().collect()), Err(ClassError::Many));
        assert!(ClassTable::new(vec![]).unwrap().class(Kind::Data, 7) == Some(IoClass(0)));
    }
}
